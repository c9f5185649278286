"""A small trained model, and what `kvstore gate` finds of it.

    python benchmarks/trained_model.py FOLDER --minutes 20

A model with random weights is sure of nothing, so a rounded number easily changes its answers. What
a trained one bears cannot be told from it. This one has learnt the source of Python's standard
library, byte by byte; its prompts are from files that it has not seen. FOLDER keeps the model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from dry import read_options

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Three and a half million weights; heads are as large as those of common models."""

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}

BATCH, LENGTH = 8, 512
WARM_UP = 50
"""Steps in which the rate of learning grows."""

HELD_OUT = 10
"""Of so many files one is for prompts alone."""


def texts() -> tuple[bytes, list[bytes]]:
    """What is learnt, and the files that prompts are cut from."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts)
    )
    random.Random(0).shuffle(files)
    read = [path.read_bytes() for path in files]
    return b"\n".join(read[len(read) // HELD_OUT :]), read[: len(read) // HELD_OUT]


def train(folder: Path, text: bytes, seconds: float) -> float:
    """Train for so long, and write the model to `folder`; returns the loss at the end, in nats."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    begun, told, loss = time.monotonic(), time.monotonic(), math.inf
    step = 0
    while (spent := time.monotonic() - begun) < seconds:
        rate = 1e-3 * min((step + 1) / WARM_UP, (1 + math.cos(math.pi * spent / seconds)) / 2)
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        tokens = torch.stack([data[start : start + LENGTH] for start in starts]).long()
        with torch.autocast("cpu", torch.bfloat16):
            found = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        loss = found.item() if step == 1 else 0.95 * loss + 0.05 * found.item()
        if time.monotonic() - told > 30:
            told = time.monotonic()
            left = (seconds - spent) / 60
            print(f"{step} steps, {loss:.3f} nats, {left:.0f} min left", file=sys.stderr)
    model.to(torch.bfloat16).save_pretrained(folder)
    return loss


def write_prompts(path: Path, files: list[bytes], options: argparse.Namespace) -> None:
    """Write token ids: excerpts of files that were not learnt."""
    rng = random.Random(1)
    long = [each for each in files if len(each) > options.length]
    lines = []
    for _ in range(options.prompts):
        text = rng.choice(long)
        start = rng.randrange(len(text) - options.length)
        lines.append(json.dumps(list(text[start : start + options.length])))
    path.write_text("\n".join(lines))


def main() -> None:
    """Train the model if it is not there, and try it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20, help="of training")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--length", type=int, default=800, help="of a prompt, in tokens")
    options = read_options(parser, minutes=0.05, prompts=2, length=300)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    text, held_out = texts()
    row: dict[str, Any] = {"bytes": len(text), "minutes": options.minutes}
    if not (folder / "config.json").exists():
        row["loss_nats"] = round(train(folder, text, options.minutes * 60), 3)
    write_prompts(folder / "prompts", held_out, options)
    command = [sys.executable, "-m", "kvstore.tools", "gate", str(folder)]
    command += [str(folder / "int8.gate"), "--prompts", str(folder / "prompts")]
    command += ["--engine", json.dumps(ENGINE)]
    command += ["--host", "128MiB", "--disk-bytes", "2GiB", "--control", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (0, 1):
        sys.exit("kvstore gate failed")
    print(json.dumps(row | json.loads(ended.stdout)))


if __name__ == "__main__":
    main()
