"""Read by every Python process of a test run before anything else: imports start faster.

A real run starts fourteen processes that import torch, verl and vLLM. A fifth of that time is the garbage collector
looking, again and again, at objects that live as long as the process. tests/conftest.py puts it on their path.
"""

import gc

gc.set_threshold(50_000, 20, 100)
