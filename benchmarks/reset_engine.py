"""Resets of a real vLLM engine in the middle of its stores and loads, beside a neighbour.

    python benchmarks/reset_engine.py --resets 100

Two engines share one path and have the same weights. Again and again the neighbour
is reset; the first engine is stopped somewhere amid its requests and reset, too; the
neighbour stores prompts; and the first goes on, asks for them, and for its own. A
copy between device and host memory lands as late as vLLM allows: while it is
waited for, or some steps after it was begun, as on a GPU. Every completion is compared
with that of an engine without offload. Exit status 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from dry import read_options
from rounds import LLAMA, prompt
from stepped import Completed, Server, copy_late

PROMPTS = 24
TOKENS = 512
COMPLETED = 6


def started(folder: Path, cache: Path | None, rng: random.Random) -> Server:
    """An engine, over host memory and `cache` unless that is None."""
    if cache is None:
        return Server(folder, LLAMA, None)
    copy_late(rng)
    tier: dict[str, Any] = {"type": "disk", "path": str(cache), "capacity_bytes": "1GiB"}
    # Both have the same weights, so that there is much to be taken and to be mixed up.
    tier |= {"share_after_reset": True}
    return Server(folder, LLAMA, {"cpu_bytes_to_use": "48MiB", "tiers": [tier]})


def ask(server: Server, seed: int) -> None:
    server.ask(seed, prompt(seed, TOKENS), COMPLETED)


def reference(folder: Path) -> None:
    """The completions of every prompt, from an engine without offload."""
    server = started(folder, None, random.Random(0))
    for seed in range(PROMPTS):
        ask(server, seed)
    (folder / "reference.json").write_text(json.dumps(sorted(server.run())))


def neighbour(folder: Path, told: Connection) -> None:
    """Does what it is told: "reset", or to complete the prompts of seeds."""
    log = os.open(folder / "neighbour.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    server = started(folder, folder / "cache", random.Random(1))
    told.send("ready")
    while True:
        what = told.recv()
        done: Completed = []
        if what == "reset":
            server.reset()
        else:
            for seed in what:
                ask(server, seed)
            done = server.run()
            server.drain()
        told.send(done)


class Neighbour:
    """The other engine, from here: a fork, which does not import again what is imported."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._its, its = context.Pipe()
        self._process = context.Process(target=neighbour, args=(folder, its), daemon=True)
        self._process.start()
        # Whoever reads from one that has ended is told so.
        its.close()

    def begun(self) -> None:
        """Wait until it serves. EOFError: it has ended, see neighbour.log."""
        assert self._its.recv() == "ready"

    def tell(self, what: str | list[int]) -> Completed:
        self._its.send(what)
        done: Completed = self._its.recv()
        return done

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def trial(
    server: Server, other: Neighbour, rng: random.Random, seeds: list[int]
) -> tuple[Completed, int]:
    """One reset amid requests; what was completed by both, and the rows that it left to copies."""
    shared, own = rng.sample(seeds, 4), rng.sample(seeds, 3)
    for seed in own:
        ask(server, seed)
    done = server.run(rng.randrange(1, 12))
    first = rng.random() < 0.75
    if first:
        other.tell("reset")
    server.reset(running=rng.random() < 0.3)
    left = server.manager._core._pool.held
    if not first:
        time.sleep(0.1)
        other.tell("reset")
    done += other.tell(shared)
    # The neighbour's chunks are seen after half a second.
    time.sleep(rng.choice((0.0, 0.6, 0.8)))
    # Steps with something to do, in which it hears of them.
    ask(server, own[0])
    done += server.run(2)
    for seed in rng.sample(shared, 3):
        ask(server, seed)
    if rng.random() < 0.7:
        done += server.run()
    return done, left


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--right", metavar="FILE", help="the right tokens, as [seed, tokens], computed before"
    )
    parser.add_argument("--reference", metavar="FOLDER")
    options = read_options(parser, resets=2)
    if options.reference:
        reference(Path(options.reference))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstore-reset-") as name:
        folder = Path(name)
        told = options.right or folder / "reference.json"
        if not options.right:
            subprocess.run(
                [sys.executable, __file__, "--reference", name],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        right = dict(json.loads(Path(told).read_text()))
        rng = random.Random(options.seed)
        other = Neighbour(folder)
        try:
            server = started(folder, folder / "cache", rng)
            other.begun()
            done: Completed = []
            amid = wrong = 0
            for number in range(options.resets):
                completed, left = trial(server, other, rng, sorted(right))
                amid += left > 0
                bad = sum(tokens != right[seed] for seed, tokens in completed)
                wrong += bad
                done += completed
                if bad or number % 10 == 9:
                    print(f"reset {number + 1:3}: {bad} of {len(completed)} differ", flush=True)
            rest = server.run()
            wrong += sum(tokens != right[seed] for seed, tokens in rest)
            done += rest
            sources = server.manager._core.stats().loaded_from
            held = server.manager._core._pool.held
            server.end()
        finally:
            other.end()
    print(
        f"{options.resets} resets, {amid} amid device copies; {len(done)} completions, {wrong} "
        f"wrong; {server.cached} tokens from the cache, chunks loaded from {sources}; "
        f"{held} rows held at the end"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
