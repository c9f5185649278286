"""Tiny models whose answers depend on all of their KV cache.

With vLLM's own dummy weights attention hardly matters, and a model whose output is tied to its
input says its last token again and again: a server that loads wrong KV would still answer right.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

__all__ = ["SHARP", "write_apart", "write_model"]

SPREAD = 0.2
"""Of the weights."""

FAINT = 0.1
"""By how much embeddings are scaled: a token shall not outweigh what attention adds to it."""

SHARP = {"query_pre_attn_scalar": 1}
"""For models that normalise queries and keys: attention is to few tokens, not to all alike."""


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights in float32, and the configuration, to `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = AutoConfig.for_model(**config, initializer_range=SPREAD)
    model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    model.get_input_embeddings().weight.data *= FAINT
    model.save_pretrained(folder)


def write_apart(folder: Path, config: dict[str, Any]) -> None:
    """Do as `write_model` in another process: one that has computed may not be forked.

    Raises:
        SystemExit: it could not be written.
    """
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=write_model, args=(folder, config))
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit("the model could not be written")
