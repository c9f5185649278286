"""An HTTP server of OpenAI-style completions that keeps its KV cache in kvstore.

    python -m examples.http_server --port 8000 --cpu-bytes 64MiB --disk DIR --disk-bytes 1GiB

The model is a small Llama with random weights: what it says means nothing, what
it computes is real. README.md tells how to use it, `cache.py` is all that
touches kvstore's store.
"""
