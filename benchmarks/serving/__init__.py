"""Three real vLLM servers over HTTP, compared in one run: `python -m benchmarks.serving`."""
