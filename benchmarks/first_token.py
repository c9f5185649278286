"""Time to the first token of a disk hit in a real vLLM engine, of two revisions in turn.

    python benchmarks/first_token.py FOLDER [--against HEAD~5] [--rounds 3]

One engine stores prompts of 2048 tokens below FOLDER. Then, round by round and each revision in
turn, an engine that has just started is asked for five of them one by one, and for eight
others at once; one token each, tiny Llama on the CPU. The five are asked for twice more: while the
device holds them, and from host memory. Prints the medians of those that were alone, the median
of the last of the eight, and the same without a cache. By how much hits from host memory and disk
are slower than those on the device is the most that loading layer by layer, beside the computing,
could save. Ends with status 1 if a prompt was not found, or was answered otherwise than without a
cache.

The other revision is checked out into a folder of its own, and compiled. Threads of the model sleep
while they wait: by default they spin on every core, which no model on a GPU does, and then
some requests take 100 ms longer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dry import read_options
from meter import median
from revision import ROOT, checked_out

sys.path.insert(0, str(ROOT))

from tests.vllm.engines import Round, run_engine

ALONE = range(5)
TOGETHER = range(5, 13)
AGAIN = ("alone", "device", "host")
"""Rounds of the same prompts: from disk, from the device, from host memory."""

BLOCK = 32
"""Tokens of a block: of a whole prompt on the device the last one is computed."""


def engine(folder: Path, code: Path, scenario: dict[str, Any]) -> dict[str, Round]:
    """The rounds of one engine, in a process of its own, by the packages of `code`."""
    common = {"max_tokens": 1, "engine": {"num_gpu_blocks_override": 640}}
    packages = {"PYTHONPATH": str(code)}
    return run_engine(folder, {**common, **scenario}, packages, launcher=None).rounds


def told(found: dict[str, Round], reference: list[list[int]] | None, length: int) -> dict[str, Any]:
    """What the rounds "alone" and "together" gave, held against the `reference`'s tokens."""
    alone, together = found["alone"], found["together"]
    answers = [tokens for each in found.values() for tokens in each.tokens]
    expected = answers if reference is None else reference
    return {
        **{f"{name}_ms": [1000 * each for each in found[name].first_token] for name in AGAIN},
        "together_ms": [1000 * max(together.first_token)],
        "missed": sum(cached < length - 1 for cached in alone.cached + together.cached)
        + sum(cached < length - BLOCK for name in AGAIN[1:] for cached in found[name].cached),
        "different": sum(a != b for a, b in zip(answers, expected, strict=True)),
        "answers": answers,
    }


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", metavar="REV", help="measure this revision too, in turn")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, rounds=1, length=256, against=None)
    alone, together = ([[seed, options.length] for seed in seeds] for seeds in (ALONE, TOGETHER))
    rounds = [
        {"name": "alone", "prompts": alone, "reset": False},
        {"name": "device", "prompts": alone},
        {"name": "host", "prompts": alone},
        {"name": "together", "prompts": together, "together": True, "reset": False},
    ]
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(prefix="kvstore-token-", dir=options.folder)
        folder = Path(stack.enter_context(place))
        disk = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "2GiB"}
        kvstore = {"cpu_bytes_to_use": "1GiB", "tiers": [disk]}
        codes = {"this": ROOT}
        if options.against:
            tree = checked_out(options.against, folder / "tree")
            codes[options.against] = stack.enter_context(tree)
        plain = told(engine(folder, ROOT, {"rounds": rounds}), None, options.length)
        engine(folder, ROOT, {"kvstore": kvstore, "rounds": [{"prompts": alone + together}]})
        found: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for name in sorted(codes, reverse=bool(number % 2)):
                scenario = {"kvstore": kvstore, "rounds": rounds}
                its = told(engine(folder, codes[name], scenario), plain["answers"], options.length)
                found.setdefault(name, []).append(its)
                shown = {key: its[key] for key in its if key != "answers"}
                print(json.dumps({"revision": name, **shown}), flush=True)
    print(f"{'':24}{'disk':>10}{'last of 8':>12}{'device':>12}{'host':>12}")
    for name, runs in {"without a cache": [plain], **found}.items():
        row = f"{name:24}"
        for case in ("alone", "together", "device", "host"):
            shown = median([ms for run in runs for ms in run[f"{case}_ms"]])
            row += f"{shown:>7.1f} ms  "
        print(row)
    return int(any(run["missed"] or run["different"] for runs in found.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
