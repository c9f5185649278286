"""What steering a busy vLLM engine costs it, and how soon each command is acknowledged.

    python benchmarks/control.py DIR
    python benchmarks/control.py DIR --conversations 16 --turns 12

Sixteen conversations go on in a real engine over host memory and a disk in DIR. Meanwhile a client
of its control socket halves and doubles both sizes, switches both policies, removes 1,000 chunks
and fetches 1,000, again and again, as `kvstore ctl` does. Every completion is compared with that
of an engine without offload. A step is the time inside kvstore from one run of the model to the
next. Prints one JSON row with commands and one without. Exit status 1 if a token differs or a
command failed. A prefetch may: what it fetches is displaced by what the engine stores.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from dry import read_options
from random_model import write_model
from rounds import prompt
from stepped import Server
from turmoil import COMPLETED, TIE, config_of

from kvstore.tools.ctl import Client

BLOCK, FIRST, MORE = 32, 512, 256
"""Tokens of a block, of a conversation's first prompt, and by how many each turn is longer."""

ENGINE = {
    "load_format": "auto",
    "block_size": BLOCK,
    "max_model_len": 4096,
    "max_num_seqs": 16,
}
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
"""Of the connector, by vLLM's scheduler, in each step."""

CHUNK = 2 * 2 * 2 * 32 * 4 * BLOCK
"""Bytes of one: keys and values, layers, heads, their size, 32 bits, tokens."""


class Steps:
    """The time that a scheduler's calls of a connector take, step by step."""

    def __init__(self, connector: Any) -> None:
        self.seconds: list[float] = []
        self.own: list[float] = []
        """Of these the processor's time of this thread: the rest others have had."""
        self._spent = self._own = 0.0
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name), name))

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, own = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent += time.perf_counter() - began
                self._own += time.thread_time() - own
                if name == "build_connector_meta":
                    self.seconds.append(self._spent)
                    self.own.append(self._own)
                    self._spent = self._own = 0.0

        return timed


class Operator(threading.Thread):
    """Sends one command after the other until it is told to stop."""

    def __init__(self, where: str, keys: list[str], host: int, disk: int) -> None:
        super().__init__()
        self._client = Client(where, None)
        self._keys = keys
        self._host, self._disk = host, disk
        self.stopped = threading.Event()
        self.acknowledged: list[float] = []
        self.ended: list[float] = []
        self.failed: list[str] = []
        self.displaced = 0
        """Fetches of which chunks found no room, or lost it."""

    def run(self) -> None:
        number = 0
        while not self.stopped.is_set():
            for command, body in self._commands(number):
                self._send(command, body)
                if self.stopped.is_set():
                    return
            number += 1

    def _commands(self, number: int) -> list[tuple[str, dict[str, Any]]]:
        policy = ("arc", "s3-fifo", "hit-density", "lru")[number % 4]
        half = {
            "host": {"bytes": self._host // 2},
            "tiers": {"0": {"capacity_bytes": self._disk // 2}},
        }
        whole = {"host": {"bytes": self._host}, "tiers": {"0": {"capacity_bytes": self._disk}}}
        switch = {"host": {"eviction_policy": policy}, "tiers": {"0": {"eviction_policy": policy}}}
        keys = self._keys[number % 4 :: 4][:1000] if len(self._keys) > 4000 else self._keys[:1000]
        return [
            ("settings", half),
            ("prefetch", {"keys": keys}),
            ("settings", whole),
            ("settings", switch),
            ("remove", {"keys": keys}),
        ]

    def _send(self, command: str, body: dict[str, Any]) -> None:
        began = time.monotonic()
        job = self._client.ask("POST", f"/v1/{command}", body)
        self.acknowledged.append(time.monotonic() - began)
        while job["state"] == "running" and not self.stopped.is_set():
            job = self._client.ask("GET", f"/v1/jobs/{job['job']}?wait=1")
        self.ended.append(time.monotonic() - began)
        if job["state"] == "failed" and command == "prefetch":
            self.displaced += 1
        elif job["state"] == "failed":
            self.failed.append(f"{command}: {job['error']}")


def length_of(turn: int) -> int:
    return FIRST + MORE * turn


def reference(folder: Path, conversations: int, turns: int) -> None:
    """The completions of every prompt, up to a tie, by an engine without offload."""
    server = Server(folder, config_of("llama"), None, num_gpu_blocks_override=4096, **ENGINE)
    for seed in range(conversations):
        for turn in range(turns):
            case, length = (seed, turn), length_of(turn)
            server.ask(case, prompt(seed, length), COMPLETED, leads=True)
    right = []
    for case, tokens in server.run():
        tie = next((n for n, lead in enumerate(server.leads[case]) if lead < TIE), COMPLETED)
        right.append((case, tokens[:tie]))
    (folder / "reference.json").write_text(json.dumps(right))
    server.end()


def run(folder: Path, options: argparse.Namespace, steered: bool) -> dict[str, Any]:
    """One engine, whose conversations go on, with commands or without."""
    found = json.loads((folder / "reference.json").read_text())
    right = {tuple(case): tokens for case, tokens in found}
    rows = options.conversations * length_of(options.turns) // BLOCK // 2
    host, disk = rows * CHUNK, 8 * rows * CHUNK
    where = str(folder / "control.sock")
    offload = {
        "cpu_bytes_to_use": host,
        "tiers": [
            {
                "type": "disk",
                "path": str(folder / "cache"),
                "capacity_bytes": disk,
                "segment_bytes": "1MiB",
            }
        ],
        "recompute_s": 0,
        "control": where,
    }
    # For half of the conversations: the others come from host memory and the disk.
    blocks = options.conversations * length_of(options.turns) // BLOCK // 2 + 600
    server = Server(folder, config_of("llama"), offload, num_gpu_blocks_override=blocks, **ENGINE)
    connector = server.scheduler.connector
    keys = [
        key.hex()
        for seed in range(options.conversations)
        for key in connector._keys_of_prompt(prompt(seed, length_of(options.turns)), {})
    ]
    steps = Steps(connector)
    operator = Operator(where, keys, host, disk) if steered else None
    gc.collect()
    gc.freeze()
    if operator is not None:
        operator.start()
    began = time.monotonic()
    done = []
    for turn in range(options.turns):
        for seed in range(options.conversations):
            server.ask((seed, turn), prompt(seed, length_of(turn)), COMPLETED)
        done += server.run()
        if turn % 3 == 2:
            server.engine.reset_prefix_cache()
    seconds = time.monotonic() - began
    if operator is not None:
        operator.stopped.set()
        operator.join()
    loaded = server.manager._core.stats().loaded_from
    server.end()
    wrong = [
        case for case, tokens in done if tokens[: len(right[case])] != right[case][: len(tokens)]
    ]
    ordered, own = sorted(steps.seconds), sorted(steps.own)
    told: dict[str, Any] = {
        "steered": steered,
        "completions": len(done),
        "wrong": len(wrong),
        "seconds": round(seconds, 2),
        "steps": len(ordered),
        "step_ms": {
            "p50": round(1000 * statistics.median(ordered), 3),
            "p99": round(1000 * ordered[int(0.99 * len(ordered))], 3),
            "worst": round(1000 * ordered[-1], 3),
            "worst of this thread": round(1000 * own[-1], 3),
        },
        "loaded": loaded,
    }
    if operator is not None:
        told |= {
            "commands": len(operator.acknowledged),
            "acknowledged_ms": {
                "p50": round(1000 * statistics.median(operator.acknowledged), 1),
                "worst": round(1000 * max(operator.acknowledged), 1),
            },
            "ended_s_worst": round(max(operator.ended), 2),
            "failed": operator.failed,
            "fetches displaced": operator.displaced,
        }
    return told


def main() -> int:
    """Read the command line and run; 1 if a token differs or a command failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--part", choices=("reference", "steered", "alone"))
    options = read_options(parser, conversations=4, turns=2)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.part == "reference":
        write_model(options.folder / "tiny-model", config_of("llama"))
        reference(options.folder, options.conversations, options.turns)
        return 0
    if options.part is not None:
        told = run(options.folder, options, options.part == "steered")
        print(json.dumps(told), flush=True)
        return int(bool(told["wrong"] or told.get("failed")))
    status = 0
    for part in ("reference", "alone", "steered"):
        sizes = ["--conversations", str(options.conversations), "--turns", str(options.turns)]
        command = [sys.executable, __file__, options.folder, "--part", part, *sizes]
        status |= subprocess.run(command, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
