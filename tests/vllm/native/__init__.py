"""vLLM's own tests, with parts of kvstore in the place of the parts that they were written for.

    python -m tests.vllm.native 0.32.0

The tests come from vLLM's source distribution, see `source`. `plugin` puts our parts in their
place, and `verdict` holds what came of it against what is expected, `expected/`.
"""
