"""Rollout side of inter-step overlap: who is in flight, partial rollouts, trajectory identity."""
