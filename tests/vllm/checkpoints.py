"""A tiny Llama and tiny LoRA adapters with weights of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What differs from the Llama of `examples/rounds.py`."""

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}
"""The `quantization_config` of what `save_int8` writes."""

HIDDEN, INNER, VOCABULARY, KV = 128, 256, 32000, 64


def save_llama(folder: Path, seed: int) -> None:
    """Weights for `CONFIG`, wild enough that each one decides over the tokens."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * 0.2).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for part, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = weight(rows, HIDDEN)
        tensors[f"{name}.mlp.gate_proj.weight"] = weight(INNER, HIDDEN)
        tensors[f"{name}.mlp.up_proj.weight"] = weight(INNER, HIDDEN)
        tensors[f"{name}.mlp.down_proj.weight"] = weight(HIDDEN, INNER)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))


def save_int8(model: Path, folder: Path) -> None:
    """The weights of `model` in 8 bits, one scale for each row."""
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def save_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for `CONFIG`, in the place of one that may be there."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for part, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN, generator=random) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 8, generator=random) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
