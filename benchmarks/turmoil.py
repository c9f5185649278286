"""Everything at once that makes a real vLLM engine start over, against no offload, token by token.

    python benchmarks/turmoil.py --episodes 100 [--model gemma] [--engine JSON] [--seed N]

In each episode requests with shared prefixes arrive at an engine whose cache on the device is too
small for them, so that vLLM preempts some; clients go away, most of them while their prompt is
being loaded; the connector is reset amid stores and loads; and after every third episode the engine
sleeps and wakes up with its weights. A copy between device and host memory lands as
late as vLLM allows. Every completion is compared with that of an engine without offload. Prints
how often each of these happened, as JSON. Exit status 1 if a token differs, or a row is held at
the end.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from dry import read_options
from random_model import SHARP, write_apart
from rounds import MODELS, prompt
from stepped import Completed, Server, copy_late

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gemma": {"sliding_window": 64, **SHARP},
}
"""What differs from the models of `examples/rounds.py`."""

ENGINE = {
    "load_format": "auto",
    "block_size": 32,
    "max_model_len": 416,
    "max_num_seqs": 6,
}
DEVICE_BLOCKS = {"llama": 28, "gemma": 50}
"""For three or four prompts; completions then need more than there is."""

HOST_BYTES = {"llama": "1MiB", "gemma": "2MiB"}
"""For some of the prompts; the rest comes from disk."""

PROMPTS = 6
LENGTHS = (128, 224, 350)
"""Of each prompt the first tokens, so that requests share prefixes; one ends amid a block."""

COMPLETED = 40

TIE = 0.01
"""Where the log probabilities of two tokens are nearer to each other, the order in which a batch
adds up decides between them: what comes from there on is not compared."""

Case = tuple[int, int]
"""A prompt and how many of its tokens."""


def config_of(model: str) -> dict[str, Any]:
    return {**MODELS[model], **SMALL.get(model, {})}


def started(
    folder: Path, model: str, engine: dict[str, Any], offload: dict[str, Any] | None, blocks: int
) -> Server:
    arguments = {**ENGINE, "num_gpu_blocks_override": blocks, **engine}
    return Server(folder, config_of(model), offload, **arguments)


def reference(folder: Path, model: str, engine: dict[str, Any]) -> None:
    """The completions of every case up to a tie, by an engine without offload with room for all."""
    write_apart(folder / "tiny-model", config_of(model))
    server = started(folder, model, engine, None, 20 * DEVICE_BLOCKS[model])
    for seed in range(PROMPTS):
        for length in LENGTHS:
            server.ask((seed, length), prompt(seed, length), COMPLETED, leads=True)
    right = []
    for case, tokens in server.run():
        tie = next((n for n, lead in enumerate(server.leads[case]) if lead < TIE), COMPLETED)
        right.append((case, tokens[:tie]))
    (folder / "reference.json").write_text(json.dumps(right))
    server.end()


class Turmoil:
    """What happens to a server, decided by a random source.

    Attributes:
        done: what was completed.
        happened: how often each thing did.
    """

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server = server
        self.done: Completed = []
        self.happened: Counter[str] = Counter()
        self._rng = rng

    def episode(self, *, sleeps: bool) -> None:
        """Requests, and what befalls them, until none is left; then perhaps a sleep."""
        server, rng = self.server, self._rng
        for _ in range(rng.randrange(20, 60)):
            if rng.random() < 0.4 and len(server.requests()) < 9:
                self._ask()
            if rng.random() < 0.25:
                self._abort()
            if rng.random() < 0.05:
                self._reset()
            self.done += server.run(1)
        self.done += server.run()
        server.drain()
        if sleeps:
            server.sleep(1)
            self.happened["sleeps"] += 1

    def _ask(self) -> None:
        seed, length = self._rng.randrange(PROMPTS), self._rng.choice(LENGTHS)
        tokens = self._rng.randrange(1, COMPLETED + 1)
        self.server.ask((seed, length), prompt(seed, length), tokens)
        self.happened["requests"] += 1

    def _abort(self) -> None:
        loading = self.server.requests("WAITING_FOR_REMOTE_KVS")
        names = loading or (self.server.requests() if self._rng.random() < 0.3 else [])
        if names:
            self.server.abort(self._rng.choice(names))
            self.happened["aborted while loading" if loading else "aborted"] += 1

    def _reset(self) -> None:
        self.server.reset(running=self._rng.random() < 0.5)
        held = self.server.manager._core._pool.held
        self.happened["resets amid copies" if held else "resets"] += 1


def run(options: argparse.Namespace, folder: Path, right: dict[Case, list[int]]) -> int:
    """All episodes; the number of wrong completions."""
    rng = random.Random(options.seed)
    copy_late(rng)
    tier = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "256MiB"}
    offload = {
        "cpu_bytes_to_use": HOST_BYTES[options.model],
        "tiers": [{**tier, "segment_bytes": "8MiB"}],
        "recompute_s": 0,
        **options.offload,
    }
    blocks = DEVICE_BLOCKS[options.model]
    server = started(folder, options.model, options.engine, offload, blocks)
    turmoil = Turmoil(server, rng)
    for number in range(options.episodes):
        turmoil.episode(sleeps=number % 3 == 2)
        if number % 10 == 9:
            print(f"{number + 1} episodes: {dict(turmoil.happened)}", file=sys.stderr, flush=True)
    server.drain()
    core = server.manager._core
    stats = core.stats()
    # Rows of disk writes that a reset has overtaken are held as long as the disk takes. Where two
    # workers have both processors, that may be minutes.
    moves = core._transfers.moves
    late = sum(len(moves[number].rows) for number in core._transfers.orphans)
    held = core._pool.held - late
    server.end()
    wrong = [
        case
        for case, tokens in turmoil.done
        if tokens[: len(right[case])] != right[case][: len(tokens)]
    ]
    told = {
        **turmoil.happened,
        "preempted": server.preempted,
        "completed": len(turmoil.done),
        "compared": sum(min(len(right[case]), len(each)) for case, each in turmoil.done),
        "wrong": len(wrong),
        "cached tokens": server.cached,
        "loaded": stats.loaded_from,
        "rows held": held,
        "rows held by late writes": late,
        "illegal": stats.illegal,
    }
    print(json.dumps(told))
    return len(wrong) + int(held) + int(stats.illegal)


def main() -> int:
    """Read the command line and run; 1 if a token differs or a row is held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--model", choices=sorted(DEVICE_BLOCKS), default="llama")
    parser.add_argument("--engine", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--offload", type=json.loads, default={}, help="kvstore's, as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="of the model and the right tokens; kept")
    parser.add_argument("--reference", action="store_true", help="only make what is there")
    options = read_options(parser, episodes=2)
    with tempfile.TemporaryDirectory(prefix="kvstore-turmoil-") as name:
        folder = options.folder or Path(name)
        if options.reference:
            reference(folder, options.model, options.engine)
            return 0
        if not (folder / "reference.json").exists():
            same = ["--model", options.model, "--engine", json.dumps(options.engine)]
            subprocess.run(
                [sys.executable, __file__, "--reference", "--folder", folder, *same],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        found = json.loads((folder / "reference.json").read_text())
        right = {tuple(case): tokens for case, tokens in found}
        return int(run(options, folder, right) > 0)


if __name__ == "__main__":
    sys.exit(main())
