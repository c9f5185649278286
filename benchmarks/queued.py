"""Time to the first token in a backlog, with and without fetching for queued requests.

    python benchmarks/queued.py FOLDER [--prompts 32] [--length 4096] [--running 4] [--rounds 3]

An engine stores the prompts below FOLDER. Then, round by round and each setting in turn, an engine
that has just started runs as many other requests as it may, and gets all the prompts behind them.
Prints the mean and the 95th percentile of the time to the first token of the prompts, and how long
they waited for the disk together. Ends with status 1 if a prompt was not found, or was answered
otherwise than before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from dry import read_options
from meter import median, percentile
from revision import ROOT

sys.path.insert(0, str(ROOT))

from tests.vllm.engines import ONE_PROCESS, Round, run_engine

BLOCK = 32
CHUNK_BYTES = 512 * 1024
SETTINGS = {"when asked for": False, "while queued": True}


def engine(
    folder: Path, options: argparse.Namespace, rounds: list[dict[str, Any]], *, queued: bool
) -> dict[str, Round]:
    """The rounds of one engine; host memory holds half of the prompts."""
    chunks = options.prompts * options.length // BLOCK
    disk = {
        "type": "disk",
        "path": str(folder / "cache"),
        "capacity_bytes": 4 * chunks * CHUNK_BYTES,
    }
    scenario = {
        "max_tokens": 8,
        "engine": {
            "max_num_seqs": options.running,
            "max_model_len": options.length + 128,
            "num_gpu_blocks_override": (options.running + 1) * (options.length // BLOCK + 8),
        },
        "kvstore": {
            "cpu_bytes_to_use": chunks // 2 * CHUNK_BYTES,
            "tiers": [disk],
            "fetch_queued": queued,
        },
        "rounds": rounds,
    }
    return run_engine(folder, scenario, ONE_PROCESS, launcher=None).rounds


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--running", type=int, default=4, help="requests that run at once")
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, prompts=8, length=512, rounds=1)
    prompts = [[seed, options.length] for seed in range(100, 100 + options.prompts)]
    before = [[seed, 64] for seed in range(options.running)]
    told: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SETTINGS}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kvstore-queued-", dir=options.folder) as place:
        folder = Path(place)
        stored = engine(folder, options, [{"prompts": prompts, "pause": 1}], queued=False)["0"]
        for number in range(options.rounds):
            for name in sorted(SETTINGS, reverse=bool(number % 2)):
                round_ = {"prompts": before + prompts, "together": True}
                found = engine(folder, options, [round_], queued=SETTINGS[name])["0"]
                wrong += found.tokens[len(before) :] != stored.tokens
                wrong += found.cached[len(before) :] != [options.length] * options.prompts
                first = found.first_token[len(before) :]
                waited = found.metrics.get("wait_seconds_sum", 0.0)
                late = percentile(first, 0.95)
                told[name].append((sum(first) / len(first), late, waited))
    print(f"{'fetched':16}{'mean':>10}{'p95':>10}{'waited':>10}")
    for name, runs in told.items():
        mean, late, waited = (median([run[place] for run in runs]) for place in range(3))
        print(f"{name:16}{mean:>8.3f} s{late:>8.3f} s{waited:>8.2f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
