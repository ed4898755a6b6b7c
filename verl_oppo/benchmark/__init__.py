"""The benchmark: arms of the same work side by side, and what their traces say. Command: `scripts/benchmark.py`."""
