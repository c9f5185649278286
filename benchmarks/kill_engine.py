"""kill -9 of a real vLLM engine in the middle of stores, again and again.

    python benchmarks/kill_engine.py --kills 20

Each child runs vLLM over the cache that its killed predecessor left. It first
checks that every chunk which was ever reported stored on disk is found again
and that prompts complete as they did before, then stores new prompts. It is
killed at a random moment after it has reported the first of their chunks. After
each kill every payload is read against its digest from outside. Exit status 1
if anything is missing or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from dry import read_options
from rounds import ENGINE, ENVIRONMENT, LLAMA, over_kvstore, prompt


def child(folder: Path, first_seed: int) -> None:
    """Check what is there, then store prompt after prompt until the end comes."""
    os.environ.update({**ENVIRONMENT, **os.environ})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.chdir(folder)
    from vllm import LLM, SamplingParams

    model = Path("tiny-llama")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    options = {
        "cpu_bytes_to_use": "128MiB",
        "tiers": [{"type": "disk", "path": str(folder / "cache"), "capacity_bytes": "8GiB"}],
    }
    llm: Any = LLM(str(model), **ENGINE, kv_transfer_config=over_kvstore(options))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    directory = scheduler.connector.connector_scheduler.manager._core.tiers[0]
    told = Path("told")
    earlier = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    reported = {key for entry in earlier for key in entry["stored"]}
    missing = [key for key in reported if bytes.fromhex(key) not in directory.entries]
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)

    def complete(seed: int) -> tuple[list[int], int]:
        (output,) = llm.generate(
            [{"prompt_token_ids": prompt(seed, 1024)}], sampling, use_tqdm=False
        )
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    again = random.Random(first_seed).sample(earlier, min(3, len(earlier)))
    outcomes = [(complete(entry["seed"]), entry) for entry in again]
    Path(f"checked-{first_seed}").write_text(
        json.dumps(
            {
                "reported": len(reported),
                "missing": missing,
                "cached": sum(cached for (_, cached), _ in outcomes),
                "asked": 1024 * len(outcomes),
                "different": sum(tokens != entry["tokens"] for (tokens, _), entry in outcomes),
            }
        )
    )
    known = set(directory.entries)
    seed = first_seed
    with told.open("a") as out:
        while True:
            tokens, _ = complete(seed)
            new = set(directory.entries) - known
            known |= new
            line = {"seed": seed, "tokens": tokens, "stored": [key.hex() for key in new]}
            out.write(json.dumps(line) + "\n")
            out.flush()
            seed += 1


def reported(told: Path) -> int:
    """How many chunks the children have reported."""
    lines = told.read_text().splitlines(keepends=True) if told.exists() else []
    return sum(len(json.loads(line)["stored"]) for line in lines if line.endswith("\n"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SEED"))
    options = read_options(parser, kills=1)
    if options.child:
        child(Path(options.child[0]), int(options.child[1]))
        return 0
    rng = random.Random()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvstore-kill-") as name:
        folder = Path(name)
        for number in range(options.kills + 1):
            seed = 1000 * (number + 1)
            before = reported(folder / "told")
            log = (folder / "log").open("w")
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", str(folder), str(seed)],
                stdout=log,
                stderr=log,
            )
            while reported(folder / "told") == before:
                if process.poll() is not None:
                    print((folder / "log").read_text()[-4000:])
                    print(f"child {number} ended by itself")
                    return 1
                time.sleep(0.05)
            time.sleep(rng.uniform(0.1, 6.0))
            process.send_signal(signal.SIGKILL)
            process.wait()
            found = json.loads((folder / f"checked-{seed}").read_text())
            verify = subprocess.run(
                [sys.executable, "-m", "kvstore.tools", "verify", str(folder / "cache"), "--json"],
                capture_output=True,
                text=True,
                check=False,
            )
            faults = json.loads(verify.stdout)
            wrong = bool(found["missing"] or found["different"] or faults["faults"])
            bad += wrong
            print(
                f"kill {number:2}: {found['reported']} chunks had been reported, "
                f"{len(found['missing'])} missing; {found['cached']} of {found['asked']} tokens "
                f"came back, {found['different']} completions differ; {faults['chunks']} chunks "
                f"verified, {len(faults['faults'])} faults",
                flush=True,
            )
    print("all kills survived" if not bad else f"{bad} kills lost or spoilt something")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
