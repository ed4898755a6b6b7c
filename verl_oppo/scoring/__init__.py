"""Scoring while decoding goes on: reward, critic and reference models prefill the chunks that the actor streams.

`scorer` holds the protocol and its plain data, `prefix_cache` the bookkeeping of what is cached, `paged_kv` the
tensors, `support` the checks at start, `fsdp` the scorer on verl's FSDP engines and `workers` verl's worker classes
with the registered methods. Import the submodules by name: this package imports nothing heavy by itself.
"""
