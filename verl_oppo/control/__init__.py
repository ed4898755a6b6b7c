"""Controllers of OPPO in pure Python: what to admit, what to train, how much to overcommit, how large a chunk.

Used alike by the trainer (through a worker without GPU), the benchmark and the simulator; nothing here imports ray,
torch, verl or omegaconf.
"""
