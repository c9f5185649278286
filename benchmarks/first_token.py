"""Time to the first token of a disk hit in a real vLLM engine, of two revisions in turn.

    python benchmarks/first_token.py FOLDER [--against HEAD~5] [--rounds 3]

One engine stores prompts of 2048 tokens below FOLDER. Then, round by round and each revision in
turn, an engine that has just started is asked for five of them one by one, and for eight
others at once; one token each, tiny Llama on the CPU. Prints the median of those that were
alone and the median of the last of the eight, and the same without a cache. Ends with status 1
if a prompt was not found, or was answered otherwise than without a cache.

The other revision is installed into a folder of its own, compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import median

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 2048

ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The model's threads sleep while they wait. By default they spin on every core, which no model on
a GPU does, and then some requests take 100 ms longer."""

ALONE = [[seed, LENGTH] for seed in range(5)]
TOGETHER = [[seed, LENGTH] for seed in range(5, 13)]


def engine(folder: Path, code: Path, scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds of one engine, in a process of its own, by the packages of `code`."""
    request, answer, log = folder / "scenario.json", folder / "report.json", folder / "log.txt"
    common = {
        "model_dir": "tiny-llama",
        "max_tokens": 1,
        "engine": {"num_gpu_blocks_override": 640},
    }
    request.write_text(json.dumps({**common, **scenario}))
    program = [sys.executable, str(ROOT / "examples" / "rounds.py"), str(request), str(answer)]
    with log.open("w") as output:
        done = subprocess.run(
            program,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**ASLEEP, **os.environ, "PYTHONPATH": str(code)},
            check=False,
        )
    if done.returncode:
        raise SystemExit("\n".join(log.read_text().splitlines()[-40:]))
    rounds: list[dict[str, Any]] = json.loads(answer.read_text())["rounds"]
    return rounds


def installed(folder: Path, revision: str) -> Path:
    """Another revision, compiled as it is where it is installed."""
    tree = folder / "tree"
    add = ["git", "worktree", "add", "--detach", str(tree), revision]
    subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
    try:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder / "installed"), str(tree)], check=True)
    finally:
        remove = ["git", "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, cwd=ROOT, check=False)
    return folder / "installed"


def told(found: list[dict[str, Any]], reference: list[list[int]] | None) -> dict[str, Any]:
    """What the rounds "alone" and "together" gave."""
    alone, together = found[-2]["requests"], found[-1]["requests"]
    answers = [request["tokens"] for request in alone + together]
    return {
        "alone_ms": [1000 * request["ttft"] for request in alone],
        "together_ms": [1000 * max(request["ttft"] for request in together)],
        "missed": sum(request["cached"] < LENGTH - 1 for request in alone + together),
        "different": 0
        if reference is None
        else sum(a != b for a, b in zip(answers, reference, strict=True)),
        "answers": answers,
    }


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", metavar="REV", help="measure this revision too, in turn")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [
        {"name": "alone", "prompts": ALONE, "reset": False},
        {"name": "together", "prompts": TOGETHER, "together": True, "reset": False},
    ]
    with tempfile.TemporaryDirectory(prefix="kvstore-token-", dir=options.folder) as place:
        folder = Path(place)
        disk = {"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "2GiB"}
        kvstore = {"cpu_bytes_to_use": "1GiB", "tiers": [disk]}
        codes = {"this": ROOT}
        if options.against:
            codes[options.against] = installed(folder, options.against)
        plain = told(engine(folder, ROOT, {"rounds": rounds}), None)
        engine(folder, ROOT, {"kvstore": kvstore, "rounds": [{"prompts": ALONE + TOGETHER}]})
        found: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for name in sorted(codes, reverse=bool(number % 2)):
                scenario = {"kvstore": kvstore, "rounds": rounds}
                its = told(engine(folder, codes[name], scenario), plain["answers"])
                found.setdefault(name, []).append(its)
                shown = {key: its[key] for key in its if key != "answers"}
                print(json.dumps({"revision": name, **shown}), flush=True)
    print(f"{'':24}{'alone':>10}{'last of 8':>12}")
    for name, runs in {"without a cache": [plain], **found}.items():
        alone = median([ms for run in runs for ms in run["alone_ms"]])
        together = median([ms for run in runs for ms in run["together_ms"]])
        print(f"{name:24}{alone:>7.1f} ms{together:>9.1f} ms")
    return (
        1
        if any(run["missed"] or run["different"] for runs in found.values() for run in runs)
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
