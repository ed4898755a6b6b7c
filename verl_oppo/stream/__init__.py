"""Between the decoding servers and the scorers: chunks in, prefill calls out, and the final score calls.

`hub` keeps what waits, `pump` issues the calls to one scorer, `service` is the CPU actor that holds both for every
scorer. Import the submodules by name: this package imports nothing by itself.
"""
