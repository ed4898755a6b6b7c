"""Scoring while decoding goes on: reward, critic and reference models prefill the chunks that the actor streams.

`scorer` holds the protocol and its plain data, `prefix_cache` the bookkeeping of what is cached, `paged_kv` the
tensors, `support` the checks at start, `paged_scorer` what all scorers share, `fsdp` the one on verl's FSDP engines,
`megatron` (with `megatron_model`, `megatron_weights`) those on Megatron-Core, and `workers` and `megatron_workers`
verl's worker classes with the registered methods. Import the submodules by name: this package imports nothing heavy by
itself.
"""
