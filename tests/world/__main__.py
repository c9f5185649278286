"""Run many seeds of the world, and tell the story of those that fail.

    python -m tests.world --seeds 1000 --acts 100000
    python -m tests.world --seed 159 --acts 2000 --story 60

What has passed is kept in a file, so that a run can be ended at any time and gone on with. With
`--seed` and `--shrink` a seed that fails is made smaller: fewer kinds of acts, and fewer of them,
that still break a promise. Of a long one that takes hours.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.world.world import ACTS, BrokenError, World

TRIES = 12
"""Seeds that are tried for each smaller world: what is left out changes all that follows."""


def attempt(
    seed: int, acts: int, without: Collection[str] = ()
) -> tuple[World, BrokenError | None]:
    """Run one seed; returns its world, and what was broken."""
    world = World(seed, without)
    try:
        world.run(acts)
    except BrokenError as broken:
        return world, broken
    return world, None


def smaller(seed: int, acts: int, broken: BrokenError) -> tuple[World, BrokenError]:
    """The shortest world with the fewest kinds of acts in which the same kind of thing breaks."""
    kind = kind_of(broken)
    best, best_broken = attempt(seed, acts)
    assert best_broken is not None

    def tried(without: Collection[str]) -> Iterator[tuple[World, BrokenError]]:
        for number in range(TRIES):
            world, found = attempt(seed if not number else seed * 1000 + number, acts, without)
            if found is not None and kind_of(found) == kind:
                yield world, found

    without: set[str] = set()
    for act in ACTS:
        found = min(tried({*without, act}), key=lambda each: each[0].acts, default=None)
        if found is not None:
            without.add(act)
            best, best_broken = found
    return best, best_broken


def kind_of(broken: BrokenError) -> str:
    """What was broken, without names and numbers."""
    text = str(broken).partition(": ")[2]
    return "".join(letter for letter in text if letter.isalpha() or letter == " ")[:40]


def told(world: World, broken: BrokenError, lines: int) -> str:
    """The story of a world that failed."""
    without = " ".join(sorted(world.without))
    again = f"python -m tests.world --seed {world.seed} --acts {world.acts + 1}"
    again += f" --without {without}" if without else ""
    return "\n".join([*list(world.story)[-lines:], str(broken), f"again: {again}"])


def main() -> int:
    """Run what the command line says; 1 if a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--acts", type=int, default=2000)
    parser.add_argument("--without", nargs="*", default=[], choices=ACTS, metavar="ACT")
    parser.add_argument("--story", type=int, default=40, help="lines that are told")
    parser.add_argument("--shrink", action="store_true", help="make a seed that fails smaller")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="seeds at a time")
    parser.add_argument("--dry", action="store_true", help="a few acts only")
    parser.add_argument("--passed", type=Path, default=Path("build/world.json"))
    options = parser.parse_args()
    if options.dry:
        options.acts, options.seeds, options.passed = 30, 2, Path(os.devnull)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Collections look at what belongs to worlds alone.
    gc.freeze()
    if options.seed is not None:
        world, broken = attempt(options.seed, options.acts, options.without)
        if broken is None:
            print(f"seed {options.seed}: {world.acts} acts, {dict(sorted(world.counts.items()))}")
            return 0
        if options.shrink:
            world, broken = smaller(options.seed, options.acts, broken)
        print(told(world, broken, options.story))
        return 1
    return many(options)


def many(options: argparse.Namespace) -> int:
    """Run seeds side by side, each in a process of its own, and show how far it is."""
    done: dict[str, int] = {}
    if options.passed.is_file():
        done = json.loads(options.passed.read_text())
    wanted = range(options.first, options.first + options.seeds)
    left = [seed for seed in wanted if done.get(str(seed), 0) < options.acts]
    begun, failed = time.monotonic(), 0

    def one(seed: int) -> tuple[int, int, str]:
        command = [sys.executable, "-m", "tests.world", "--seed", str(seed)]
        ended = subprocess.run(
            [*command, "--acts", str(options.acts), "--story", str(options.story)],
            capture_output=True,
            text=True,
            check=False,
        )
        return seed, ended.returncode, ended.stdout or ended.stderr[-4000:]

    options.passed.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(one, seed) for seed in left]
        for count, each in enumerate(as_completed(running), 1):
            seed, status, text = each.result()
            if status:
                failed += 1
                print(f"\nseed {seed} fails:\n{text}", flush=True)
            else:
                done[str(seed)] = options.acts
                options.passed.write_text(json.dumps(done))
            spent = time.monotonic() - begun
            if not sys.stderr.isatty() and count % max(1, len(left) // 20):
                continue
            print(
                f"\r{len(wanted) - len(left) + count} of {len(wanted)} seeds, {failed} fail, "
                f"{spent / 60:.1f} min, {spent / count * (len(left) - count) / 60:.0f} min left",
                end="", flush=True,
            )  # fmt: skip
    print()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
