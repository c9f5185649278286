"""Identity of a vLLM engine: the namespace of its chunks."""
