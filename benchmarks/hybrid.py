"""Models with several kinds of layers, without offload, over vLLM's tiering and over kvstore.

    python benchmarks/hybrid.py FOLDER [--models lfm2,gemma] [--rows 16,4096] [--rounds 3]

For each model and size of host memory, in chunks: an engine stores the prompts, one after the
other, and ends. Then, round by round and each engine in turn, one that has just started gets all of
them at once. Prints the seconds until all are answered as a ratio to the engine without offload,
the share of the prompts' tokens that were not computed, and the waits that ended at a deadline.
Ends with status 1 if an engine over kvstore gives another token than the one without offload; with
vLLM's dummy weights, which it takes, tokens hardly depend on the KV cache. `turns.py` compares
answers: with weights of more effect a batch of another size changes tokens by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dry import read_options
from meter import median
from revision import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.serving.servers import offload
from tests.vllm.engines import ONE_PROCESS, Round, run_engine

CHUNK_BYTES = {
    "llama": 2**19,
    "gemma": 2**15,
    "lfm2": 2**16,
    "qwen": 2**17,
    "granite": 3 * 2**16,
    "falcon": 3 * 2**16,
    "nemotron": 3 * 2**16,
}
ENGINES = ("none", "native", "kvstore")
DISK_BYTES = 2**30
PROMPTS = 18


@dataclass
class Case:
    """One model with one size of host memory."""

    folder: Path
    model: str
    rows: int
    prompts: list[list[int]]

    def engine(self, name: str, rounds: list[dict[str, Any]]) -> dict[str, Round]:
        """The rounds of one engine that starts over what the ones before it have left on disk."""
        host = self.rows * CHUNK_BYTES[self.model]
        options = offload(name, host, DISK_BYTES, self.folder / name)
        scenario: dict[str, Any] = {
            "model": self.model,
            "max_tokens": 8,
            "engine": {
                "enable_prefix_caching": True,
                "max_model_len": 2048,
                "num_gpu_blocks_override": 1200,
            },
            "rounds": [{"prompts": self.prompts, **each} for each in rounds],
        }
        if name == "kvstore":
            # As an operator has it; `run_engine` is more patient.
            scenario["kvstore"] = {"deadline_s": 2.0, "recompute_s": "auto", **(options or {})}
        elif options is not None:
            scenario["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": options,
            }
        environment = {**ONE_PROCESS, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        return run_engine(self.folder, scenario, environment, launcher=None).rounds


def compare(case: Case, rounds: int) -> int:
    """Measure and print one case; how many rounds over kvstore were answered wrong."""
    for name in ENGINES[1:]:
        case.engine(name, [{"pause": 2}])
    found: dict[str, list[Round]] = {name: [] for name in ENGINES}
    for number in range(rounds):
        for name in ENGINES[::-1] if number % 2 else ENGINES:
            found[name].append(case.engine(name, [{"together": True}])["0"])
    truth = found["none"][0].tokens
    asked = sum(length for _, length in case.prompts)
    base = median([each.seconds for each in found["none"]])
    for name, runs in found.items():
        seconds = median([each.seconds for each in runs])
        cached = median([sum(each.cached) / asked for each in runs])
        late = max(each.metrics.get("timeouts", 0) for each in runs)
        wrong = sum(a != b for each in runs for a, b in zip(each.tokens, truth, strict=True))
        print(
            f"{case.model:10}{case.rows:>6}  {name:10}{seconds:>8.2f} s{seconds / base:>8.2f}"
            f"{cached:>8.0%}{late:>6.0f}{wrong:>6}",
            flush=True,
        )
    return sum(each.tokens != truth for each in found["kvstore"])


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(CHUNK_BYTES))
    parser.add_argument("--rows", default="16,4096", help="chunks that host memory holds")
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, models="lfm2", rows="64", rounds=1)
    prompts = [[seed, (300, 500, 700)[seed % 3]] for seed in range(PROMPTS)]
    print(f"{'model':10}{'rows':>6}  {'engine':10}{'time':>10}{'ratio':>8}{'hits':>8}  late wrong")
    wrong = 0
    for model in options.models.split(","):
        for rows in map(int, options.rows.split(",")):
            with tempfile.TemporaryDirectory(prefix="kvstore-hybrid-", dir=options.folder) as place:
                wrong += compare(Case(Path(place), model, rows, prompts), options.rounds)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
