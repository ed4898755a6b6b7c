"""The benchmark: arms of the same work side by side, and what their traces say. `scripts/benchmark.py` is its command."""
