"""Real vLLM engines for the tests, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = Path(__file__).resolve().parents[2] / "examples" / "rounds.py"

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Scheduler and worker in the process that asks: an engine that starts faster."""

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for others sleep: another engine may need the cores."""


PATIENT_SECONDS = 30.0
"""A disk that is busy with others' writes may not answer for seconds: a miss would be right, but
tests are of hits."""


@dataclass
class Round:
    """What one round of prompts gave."""

    seconds: float
    tokens: list[list[int]]
    cached: list[int]
    first_token: list[float]
    """Seconds until the first token of each request."""
    metrics: dict[str, float]
    """kvstore's, totals at the end of the round."""


@dataclass
class Run:
    """What one engine did, and its log."""

    rounds: dict[str, Round]
    log: str


class SharedMemory:
    """Watches the shared memory of kvstore that processes with a mark in their environment hold.

    Attributes:
        mark: what to add to the environment of the processes.
        seen: (seconds, bytes of all regions together, regions), at each change.
    """

    def __init__(self) -> None:
        self.mark = {"KVSTORE_TEST_MARK": secrets.token_hex(8)}
        self.seen: list[tuple[float, int, int]] = []
        self._others = set(os.listdir("/proc"))
        self._marked: set[int] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def peak(self) -> int:
        """The most bytes that were there at once."""
        return max(size for _, size, _ in self.seen)

    @property
    def regions(self) -> int:
        """The most regions that were there at once."""
        return max(count for _, _, count in self.seen)

    def __enter__(self) -> SharedMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._done.wait(0.002):
            held: dict[int, int] = {}
            for name in set(os.listdir("/proc")) - self._others:
                if name.isdigit() and self._is_marked(int(name)):
                    held.update(self._of(int(name)))
            now = (sum(held.values()), len(held))
            if not self.seen or self.seen[-1][1:] != now:
                self.seen.append((time.monotonic() - started, *now))

    def _is_marked(self, pid: int) -> bool:
        if pid not in self._marked:
            with contextlib.suppress(OSError):
                if (
                    self.mark["KVSTORE_TEST_MARK"].encode()
                    in Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    self._marked.add(pid)
        return pid in self._marked

    def _of(self, pid: int) -> dict[int, int]:
        held = {}
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(fd)
                    if target.startswith("/memfd:kvstore-") and "records" not in target:
                        told = fd.stat()
                        held[told.st_ino] = told.st_blocks * 512
        return held


def run_engine(
    folder: Path, scenario: dict[str, Any], environment: dict[str, str] | None = None
) -> Run:
    """Start an engine in a process of its own, run the scenario, fail loudly if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("scenario-*.json")))
    request = folder / f"scenario-{number}.json"
    answer = folder / f"report-{number}.json"
    log = folder / f"log-{number}.txt"
    # A relative path: the model has the same name wherever the test runs.
    told = {"model_dir": "tiny-model", **scenario}
    if told.get("kvstore") is not None:
        told["kvstore"] = {"deadline_s": PATIENT_SECONDS, **told["kvstore"]}
    request.write_text(json.dumps(told))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROUNDS), str(request), str(answer)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SHARED_CORES, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = process.wait(240)
        finally:
            # The engine's own processes outlive one that is killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text()
    assert status == 0, "\n".join(text.splitlines()[-60:])
    report = json.loads(answer.read_text())
    rounds = {
        found["name"]: Round(
            found["seconds"],
            [request["tokens"] for request in found["requests"]],
            [request["cached"] for request in found["requests"]],
            [request["ttft"] for request in found["requests"]],
            found["metrics"],
        )
        for found in report["rounds"]
    }
    return Run(rounds, text)
