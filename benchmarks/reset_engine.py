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
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

PROMPTS = 24
TOKENS = 512


class Server:
    """An engine in this process, driven step by step."""

    def __init__(self, folder: Path, cache: Path | None, rng: random.Random) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.chdir(folder)
        from rounds import ENGINE, LLAMA, prompt
        from vllm import LLM, SamplingParams

        model = Path("tiny-llama")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(LLAMA))
        arguments: dict[str, Any] = dict(ENGINE)
        if cache is not None:
            copy_late(rng)
            tier: dict[str, Any] = {"type": "disk", "path": str(cache), "capacity_bytes": "1GiB"}
            # Both have the same weights, so that there is much to be taken and to be mixed up.
            tier |= {"share_after_reset": True}
            arguments["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KVStoreOffloadingSpec",
                    "spec_module_path": "kvstore.vllm",
                    "cpu_bytes_to_use": "48MiB",
                    "tiers": [tier],
                },
            }
        self.engine: Any = LLM(str(model), **arguments).llm_engine
        self._prompt = prompt
        self._sampling = SamplingParams(
            temperature=0, max_tokens=6, detokenize=False, ignore_eos=True
        )
        self._ids = 0
        self._seeds: dict[str, int] = {}
        self.cached = 0

    def ask(self, seed: int) -> None:
        self._ids += 1
        name = f"r{self._ids}"
        self._seeds[name] = seed
        prompt = {"prompt_token_ids": self._prompt(seed, TOKENS)}
        self.engine.add_request(name, prompt, self._sampling)

    def run(self, steps: int | None = None) -> list[tuple[int, list[int]]]:
        """So many steps, or until nothing is left; what was completed, by seed."""
        done: list[tuple[int, list[int]]] = []
        while self.engine.has_unfinished_requests() and steps != 0:
            for output in self.engine.step():
                if output.finished:
                    seed = self._seeds.pop(output.request_id)
                    done.append((seed, list(output.outputs[0].token_ids)))
                    self.cached += output.num_cached_tokens or 0
            steps = None if steps is None else steps - 1
        return done

    def end(self) -> None:
        """Let everything go while the interpreter still lives."""
        self.engine.engine_core.shutdown()

    @property
    def manager(self) -> Any:
        scheduler = self.engine.engine_core.engine_core.scheduler
        return scheduler.connector.connector_scheduler.manager

    def reset(self, running: bool = False) -> None:
        try:
            self.engine.reset_prefix_cache(running, reset_connector=True)
        except RuntimeError:
            # Requests that wait for a load cannot be put back; the connector's turn all the same.
            self.engine.reset_prefix_cache(False, reset_connector=True)

    def drain(self) -> None:
        """Steps without requests, until everything is on disk."""
        end = time.monotonic() + 10
        while self.manager.has_pending_work() and time.monotonic() < end:
            self.engine.step()
            time.sleep(0.002)


def copy_late(rng: random.Random) -> None:
    """Let the workers' copies land when they are waited for, or looked after, now and then."""
    from kvstore.vllm.worker import HostCopyWorker

    copy, finished = HostCopyWorker._copy, HostCopyWorker.get_finished
    begun: dict[int, tuple[Any, Any, bool]] = {}

    def begin(self: Any, job: int, device: Any, host: Any, *, store: bool) -> bool:
        begun[job] = (device, host, store)
        return True

    def land(worker: Any, job: int) -> None:
        device, host, store = begun.pop(job)
        copy(worker, job, device, host, store=store)

    def get_finished(self: Any) -> Any:
        for job in list(begun):
            if rng.random() < 0.3:
                land(self, job)
        return finished(self)

    def wait(self: Any, jobs: set[int]) -> None:
        for job in jobs & begun.keys():
            land(self, job)

    patched: Any = HostCopyWorker
    patched._copy, patched.get_finished, patched.wait = begin, get_finished, wait


def reference(folder: Path) -> None:
    """The completions of every prompt, from an engine without offload."""
    server = Server(folder, None, random.Random(0))
    for seed in range(PROMPTS):
        server.ask(seed)
    (folder / "reference.json").write_text(json.dumps(sorted(server.run())))


def neighbour(folder: Path) -> None:
    """Does what it is told on standard input: "reset", or seeds to complete."""
    # vLLM's log goes where nobody waits for an answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server(folder, folder / "cache", random.Random(1))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        done: list[tuple[int, list[int]]] = []
        if line.strip() == "reset":
            server.reset()
        else:
            for seed in json.loads(line):
                server.ask(seed)
            done = server.run()
            server.drain()
        print(json.dumps(done), file=out, flush=True)


class Neighbour:
    """The other engine, from here."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--neighbour", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "neighbour.log").open("w"),
            text=True,
        )

    def begun(self) -> None:
        """Wait until it serves."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "see neighbour.log"

    def tell(self, what: str) -> list[tuple[int, list[int]]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        done: list[tuple[int, list[int]]] = json.loads(self._process.stdout.readline())
        return done

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def trial(
    server: Server, other: Neighbour, rng: random.Random, seeds: list[int]
) -> tuple[list[tuple[int, list[int]]], int]:
    """One reset amid requests; what was completed by both, and the rows that it left to copies."""
    shared, own = rng.sample(seeds, 4), rng.sample(seeds, 3)
    for seed in own:
        server.ask(seed)
    done = server.run(rng.randrange(1, 12))
    first = rng.random() < 0.75
    if first:
        other.tell("reset")
    server.reset(running=rng.random() < 0.3)
    left = server.manager._core.pool.held
    if not first:
        time.sleep(0.1)
        other.tell("reset")
    done += other.tell(json.dumps(shared))
    # The neighbour's chunks are seen after half a second.
    time.sleep(rng.choice((0.0, 0.6, 0.8)))
    # Steps with something to do, in which it hears of them.
    server.ask(own[0])
    done += server.run(2)
    for seed in rng.sample(shared, 3):
        server.ask(seed)
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
    parser.add_argument("--neighbour", metavar="FOLDER")
    options = parser.parse_args()
    if options.reference:
        reference(Path(options.reference))
        return 0
    if options.neighbour:
        neighbour(Path(options.neighbour))
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
            server = Server(folder, folder / "cache", rng)
            other.begun()
            done: list[tuple[int, list[int]]] = []
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
            held = server.manager._core.pool.held
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
