"""The main job, run for real: a vLLM engine that keeps its KV cache through kvstore.

    make demo

Three engines, one after the other: one without offload, for the reference;
one over kvstore, cold and then from host memory; one more over the same disk,
as after a restart. A table shows the time to the first token, the tokens that
came from the cache, and whether every completion equals the reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPTS = [[seed, 2048] for seed in range(5)]

WARM_UP = {"name": "warm-up", "prompts": [[97, 512]]}
"""The first prompt of an engine costs what later ones do not."""


def engine(folder: Path, name: str, scenario: dict[str, Any]) -> dict[str, Any]:
    """Run one engine in a process of its own, showing that it is alive."""
    request, answer = folder / f"{name}.json", folder / f"{name}-report.json"
    rounds = [WARM_UP, *scenario["rounds"]]
    request.write_text(json.dumps({"model_dir": "tiny-llama", **scenario, "rounds": rounds}))
    log = folder / f"{name}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "rounds.py"), str(request), str(answer)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        while process.poll() is None:
            if sys.stdout.isatty():
                print(f"\r  {name}: {time.monotonic() - started:4.0f} s", end="", flush=True)
            time.sleep(0.5)
    if sys.stdout.isatty():
        print("\r", end="")
    if process.returncode or not answer.exists():
        print("\n".join(log.read_text().splitlines()[-40:]))
        raise SystemExit(f"the engine {name!r} failed; its log is above")
    for line in log.read_text().splitlines():
        if "kvstore: host" in line:
            print(f"  {name}: {line.split('kvstore: ', 1)[1]}")
    report: dict[str, Any] = json.loads(answer.read_text())
    del report["rounds"][0]
    return report


def main(prompts: list[list[int]]) -> int:
    """Run the three engines and print the table; 1 when a completion differs."""
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
        folder = Path(scratch)
        kvstore = {
            "cpu_bytes_to_use": "256MiB",
            "tiers": [{"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "1GiB"}],
        }
        print("Three vLLM engines on the CPU, one after the other; about two minutes.")
        plain = engine(folder, "without offload", {"rounds": [{"prompts": prompts}]})
        first = engine(
            folder,
            "with kvstore",
            {
                "kvstore": kvstore,
                "rounds": [
                    {"name": "cold", "prompts": prompts},
                    {"name": "from host memory", "prompts": prompts},
                ],
            },
        )
        second = engine(
            folder,
            "after a restart",
            {"kvstore": kvstore, "rounds": [{"name": "from disk", "prompts": prompts}]},
        )
    reference = [request["tokens"] for request in plain["rounds"][0]["requests"]]
    plain["rounds"][0]["name"] = "without offload"
    base = _ttft(plain["rounds"][0])
    print(f"\n{'':20}{'time to first token':>22}{'cached tokens':>16}{'completions':>16}")
    wrong = 0
    for found in plain["rounds"] + first["rounds"] + second["rounds"]:
        ttft = _ttft(found)
        cached = sum(request["cached"] for request in found["requests"])
        total = sum(length for _, length in prompts)
        equal = [request["tokens"] for request in found["requests"]] == reference
        wrong += not equal
        print(
            f"{found['name']:20}{f'{ttft * 1000:.0f} ms  ({base / ttft:.1f}x)':>22}"
            f"{f'{cached} of {total}':>16}{'equal' if equal else 'DIFFERENT':>16}"
        )
    return 1 if wrong else 0


def _ttft(found: dict[str, Any]) -> float:
    times: list[float] = [request["ttft"] for request in found["requests"]]
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="one short prompt: times mean nothing")
    sys.exit(main([[0, 256]] if parser.parse_args().dry else PROMPTS))
