"""A tiny Llama whose answers depend on its whole prompt, to try a server without a download.

    python -m examples.tiny_model FOLDER

It has random weights and no tokenizer: prompts are lists of token ids below 8192.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from examples.rounds import LLAMA

__all__ = ["kv_bytes_per_token", "write_model"]

CONFIG: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}


def kv_bytes_per_token() -> int:
    """What one token has in the KV cache."""
    width = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    return int(2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * width * 4)


def write_model(folder: Path, seed: int = 0) -> None:
    """Write a configuration and random weights to `folder`.

    vLLM's own dummy weights are so small that attention hardly matters: a server that
    loads wrong KV would still give right answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        scale = gain / columns**0.5
        values: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), np.float32)
        values *= scale
        return values

    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden),
        "model.norm.weight": ones,
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(hidden, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(hidden, hidden),
            # Attention counts for more than the token itself.
            f"{name}.self_attn.o_proj.weight": matrix(hidden, hidden, 2.0),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description="Write a tiny model with random weights.")
    parser.add_argument("folder", type=Path)
    write_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()
