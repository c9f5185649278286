"""Turns of conversations over kvstore, token by token and log probability by log probability.

    python benchmarks/turns.py --turns 1000 [--model lfm2] [--offload JSON] [--seed N]

Conversations take turns, one request at a time. Each turn sends all that its user said before and
some more; the cache on the device and host memory are too small for all conversations. Now and
then a client goes away amid its prompt or its answer, the connector is reset, or the engine ends
and another starts over what is on disk. Copies land as late as vLLM allows. Prompts are computed
a block at a time, with and without hits, so every step has the same shape as in an engine without
offload and without prefix caching, and the answers have to be equal to the last bit. Prints what
happened, as JSON. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
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
from random_model import write_apart
from rounds import prompt
from stepped import Server, copy_late
from turmoil import config_of

BLOCK = {
    "llama": 32,
    "gemma": 32,
    "lfm2": 32,
    "qwen": 32,
    "granite": 96,
    "falcon": 96,
    "nemotron": 96,
}
"""Tokens of a block, the fewest in which vLLM keeps a state."""

CONVERSATIONS = 8
SAID = (8, 90)
"""Fewest and most tokens of a user in one turn."""

ANSWERED = (1, 24)
MOST_TOKENS = 640
"""A conversation ends before it gets longer, and another takes its place."""

DEVICE_BLOCKS = {
    "llama": 26,
    "gemma": 70,
    "lfm2": 36,
    "qwen": 36,
    "granite": 24,
    "falcon": 24,
    "nemotron": 24,
}
HOST_BYTES = {
    "llama": "3MiB",
    "gemma": "3MiB",
    "lfm2": "4MiB",
    "qwen": "10MiB",
    "granite": "5MiB",
    "falcon": "5MiB",
    "nemotron": "5MiB",
}
"""For two or three conversations; the rest comes from disk."""

ENGINE = {
    "load_format": "auto",
    "max_model_len": MOST_TOKENS + 64,
    "max_num_seqs": 4,
}

Turn = dict[str, Any]
"""What is asked and what the right answer is: `prompt`, `answer` and its `logprobs`."""


def started(folder: Path, options: argparse.Namespace, offload: dict[str, Any] | None) -> Server:
    blocks = DEVICE_BLOCKS[options.model] * (1 if offload is not None else 20)
    arguments = {
        **ENGINE,
        "block_size": BLOCK[options.model],
        "max_num_batched_tokens": BLOCK[options.model],
        "num_gpu_blocks_override": blocks,
        "enable_prefix_caching": offload is not None,
        **options.engine,
    }
    return Server(folder, config_of(options.model), offload, **arguments)


def answer(server: Server, asked: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The greedy completion of a prompt, and the log probability of each of its tokens."""
    server.ask("turn", asked, tokens, leads=True)
    ((_, said),) = server.run()
    return said, server.logprobs["turn"]


def write_turns(folder: Path, options: argparse.Namespace) -> None:
    """Let an engine without offload answer every turn, and write all of them to `folder`."""
    write_apart(folder / "tiny-model", config_of(options.model))
    server = started(folder, options, None)
    rng = random.Random(options.seed)
    seeds = iter(range(10**9))
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns: list[Turn] = []
    for _ in range(options.turns):
        place = rng.randrange(CONVERSATIONS)
        said = prompt(next(seeds), rng.randint(*SAID))
        tokens = rng.randint(*ANSWERED)
        if len(histories[place]) + len(said) > MOST_TOKENS:
            histories[place] = []
        asked = histories[place] + said
        answered, logprobs = answer(server, asked, tokens)
        # What was answered is left out: those tokens were computed one by one, not block by block.
        histories[place] = asked
        turns.append({"prompt": asked, "answer": answered, "logprobs": logprobs})
    (folder / "turns.json").write_text(json.dumps(turns))
    server.end()


class Engine:
    """One engine over kvstore, from its start to its end, and what befalls it.

    Attributes:
        happened: how often each thing did.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, rng: random.Random) -> None:
        tier = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "512MiB"}
        offload = {
            "cpu_bytes_to_use": HOST_BYTES[options.model],
            "tiers": [{**tier, "segment_bytes": "8MiB"}],
            "recompute_s": 0,
            "deadline_s": 30,
            **options.offload,
        }
        self.server = started(folder, options, offload)
        self.happened: Counter[str] = Counter()
        self._rng = rng

    def take(self, turn: Turn, others: list[Turn]) -> None:
        """One turn, after what may come before it."""
        rng, server = self._rng, self.server
        if rng.random() < 0.1:
            self._abort(rng.choice(others))
        if rng.random() < 0.03:
            server.reset()
            self.happened["resets"] += 1
        if rng.random() < 0.2:
            server.drain()
        said, logprobs = answer(server, turn["prompt"], len(turn["answer"]))
        self.happened["turns"] += 1
        self.happened["wrong tokens"] += said != turn["answer"]
        self.happened["wrong log probabilities"] += logprobs != turn["logprobs"]

    def _abort(self, turn: Turn) -> None:
        """A client asks, and goes away after some steps."""
        server = self.server
        server.ask("aborted", turn["prompt"], len(turn["answer"]))
        server.run(self._rng.choice((1, 1, 2, 3, 8)))
        names = server.requests()
        loading = bool(server.requests("WAITING_FOR_REMOTE_KVS"))
        for name in names:
            server.abort(name)
            self.happened["aborted while loading" if loading else "aborted"] += 1

    def end(self) -> dict[str, Any]:
        """End it; what happened."""
        self.server.drain()
        stats = self.server.manager._core.stats()
        self.happened["cached tokens"] = self.server.cached
        self.happened["illegal"] = stats.illegal
        for medium, chunks in stats.loaded_from.items():
            self.happened[f"loaded from {medium}"] = chunks
        self.server.end()
        return dict(self.happened)


def run_engine(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Take the turns from `options.first` on, as far as one engine takes them."""
    turns = json.loads((folder / "turns.json").read_text())
    rng = random.Random(options.seed + options.first)
    # Of its own: how often copies are asked for depends on the machine.
    copy_late(random.Random(rng.random()))
    engine = Engine(folder, options, rng)
    for turn in turns[options.first : options.first + options.each]:
        engine.take(turn, turns)
    return engine.end()


def in_process(folder: Path, part: str, first: int = 0) -> str:
    """Run a part of this program in an interpreter of its own; what it prints last."""
    arguments = [*sys.argv[1:], "--folder", str(folder), "--part", part, "--first", str(first)]
    command = [sys.executable, __file__, *arguments]
    # Threads of the model that wait for each other do not take the cores from others.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout.strip().rpartition("\n")[2]


def run(folder: Path, options: argparse.Namespace) -> int:
    """All turns, engine after engine; how many answers are wrong."""
    in_process(folder, "turns")
    total: Counter[str] = Counter()
    for first in range(0, options.turns, options.each):
        total.update(json.loads(in_process(folder, "engine", first)))
        total["engines"] += 1
        print(f"{total['turns']} turns: {dict(total)}", file=sys.stderr, flush=True)
    asked = sum(len(turn["prompt"]) for turn in json.loads((folder / "turns.json").read_text()))
    print(json.dumps({"model": options.model, **total, "prompt tokens": asked}))
    return total["wrong tokens"] + total["wrong log probabilities"] + total["illegal"]


def main() -> int:
    """Read the command line and run; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--each", type=int, default=100, help="turns of an engine")
    parser.add_argument("--model", choices=sorted(DEVICE_BLOCKS), default="lfm2")
    parser.add_argument("--engine", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--offload", type=json.loads, default={}, help="kvstore's, as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("turns", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = read_options(parser, turns=12, each=6)
    if options.part == "turns":
        write_turns(options.folder, options)
        return 0
    if options.part == "engine":
        print(json.dumps(run_engine(options.folder, options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstore-turns-") as name:
        return int(run(Path(name), options) > 0)


if __name__ == "__main__":
    sys.exit(main())
