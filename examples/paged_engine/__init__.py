"""A paged-attention engine in a few hundred lines that offloads its KV cache.

Continuous batching, chunked prefill, preemption, a prefix cache on the device, layers with a
sliding window by option: what a server has, on a tiny Llama with random weights. `engine` and
`scheduler` show where the two halves of `kvstore.connector` are called.
"""
