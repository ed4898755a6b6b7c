"""Liveness of the actors that a waiting trainer depends on.

Called by the replay buffer between two polls. It knows actor handles by name and whether anything moves, not what they
do.
"""

import time
from collections.abc import Mapping

import ray

from verl_oppo.rollout.controller import RolloutControllerGroup

PING_INTERVAL_S = 5.0
"""How often each actor is asked to answer; an actor that died answers with its own error."""


class HealthCheck:
    """Ends a wait that cannot end by itself.

    Invariant: `check` never blocks; it raises the dead actor's own error, or a TimeoutError once nothing has moved for
    `stall_timeout_s` seconds.
    """

    def __init__(
        self, actors: Mapping[str, ray.actor.ActorHandle], *, controller: RolloutControllerGroup, stall_timeout_s: float
    ) -> None:
        self._actors = dict(actors)
        self._controller = controller
        self._stall_timeout_s = stall_timeout_s
        self._pings: dict[ray.ObjectRef, str] = {}
        self._pinged_at = 0.0

    def check(self) -> None:
        """Raise if an actor is dead or nothing has moved for too long."""
        now = time.monotonic()
        if now - self._pinged_at < PING_INTERVAL_S:
            return
        self._pinged_at = now
        if self._pings:
            answered, _ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0)
            for ref in answered:
                name = self._pings.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    raise RuntimeError(f"{name} died while the trainer waited for rollouts") from error
        waiting = set(self._pings.values())
        for name, actor in self._actors.items():
            if name not in waiting:
                self._pings[actor.__ray_ready__.remote()] = name
        state = self._controller.call("state")
        if state.idle_s > self._stall_timeout_s:
            raise TimeoutError(
                f"no prompt completed and no token was kept for {state.idle_s:.0f} s while the trainer waited for "
                f"rollouts (trainer.v1.oppo.inter_step.stall_timeout_s is {self._stall_timeout_s}): {state.waiting_for}"
            )
