"""Interfaces through which any engine can offload its KV cache.

`manager` tracks what is offloaded and decides where it goes, `backend` is one medium of blocks,
`reuse` keeps out what is looked up only once, `mediums` says where the blocks of a transfer lie.
Nothing here is specific to an engine or imports torch at import time.
"""
