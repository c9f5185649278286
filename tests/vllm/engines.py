"""Real vLLM engines for the tests, each in a process of its own.

Most are forked from a launcher, which has imported vLLM: what an engine would import takes twice
as long as its start. There are two launchers for each worker of pytest. Their hash seeds
differ, so what an engine of the one has stored is found by an engine of the other only if nothing
depends on the order of sets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.servers import ENVIRONMENT as SERVING
from benchmarks.serving.servers import Server
from tests.vllm.launcher import Child, Launcher

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = ROOT / "examples" / "rounds.py"

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Scheduler and worker in the process that asks: an engine that starts faster."""

FORKED = {"KVSTORE_FORKED": "1"}
"""The processes that an engine starts are forks, too, and import nothing."""

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for others sleep: another engine may need the cores."""


BEGUN_WITH = dict(os.environ)
"""What vLLM sets while it is configured in this process is nothing to an engine in another."""

ENGINE_SECONDS = 600.0
"""Some take half a minute where the cores are free, and ten times that where others want them."""

PATIENT_SECONDS = 30.0
"""A disk that is busy with others' writes may not answer for seconds, or take longer than
computing: a miss would be right, but tests are of hits."""


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
    """Watches the shared memory of kvstore that the processes of a session hold.

    Attributes:
        session: the session, once it has begun.
        seen: (seconds, bytes of all regions together, regions), at each change.
    """

    def __init__(self) -> None:
        self.session: int | None = None
        self.seen: list[tuple[float, int, int]] = []
        self._looks: Counter[str] = Counter()
        self._others = set(os.listdir("/proc"))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def peak(self) -> int:
        """The most bytes that were there at once."""
        return max(size for _, size, _ in self.seen)

    @property
    def holders(self) -> int:
        """How many processes held a region, those left out that did so for a moment only."""
        return sum(looks >= 3 for looks in self._looks.values())

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
                if name.isdigit() and self._is_ours(int(name)):
                    found = self._of(int(name))
                    held.update(found)
                    self._looks[name] += bool(found)
            now = (sum(held.values()), len(held))
            if not self.seen or self.seen[-1][1:] != now:
                self.seen.append((time.monotonic() - started, *now))

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(pid) == self.session
        return False

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


_launchers: dict[int, Launcher] = {}


def start_script(
    script: Path,
    arguments: list[str],
    folder: Path,
    log: Path,
    environment: dict[str, str],
    *,
    launcher: int | None = 0,
    memory: SharedMemory | None = None,
) -> subprocess.Popen[bytes] | Child:
    """Start a Python script in a process and a session of its own.

    A launcher runs one after the other: each must have been waited for before the next starts.

    Args:
        folder: where it runs.
        log: what it wrote.
        environment: what its environment has besides this process's.
        launcher: which one forks it; with None it gets an interpreter of its own.
        memory: what watches its session.
    """
    ours = {**BEGUN_WITH, **SHARED_CORES}
    process: subprocess.Popen[bytes] | Child
    if launcher is None:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**ours, **environment},
                cwd=folder,
                start_new_session=True,
            )
    else:
        if launcher not in _launchers:
            _launchers[launcher] = Launcher(ours)
        forker, whole = _launchers[launcher], {**ours, **environment}
        assert forker.fits(whole), "it is read at the start of an interpreter: let it have its own"
        try:
            process = forker.run([str(script), *arguments], folder, whole, log)
        except BaseException:
            # Whoever comes next would take its answer for his own.
            _launchers.pop(launcher).end()
            raise
    if memory is not None:
        memory.session = process.pid
    return process


def run_script(
    script: Path,
    arguments: list[str],
    folder: Path,
    log: Path,
    environment: dict[str, str],
    *,
    launcher: int | None = 0,
    memory: SharedMemory | None = None,
    timeout: float,
) -> int:
    """The exit status of a Python script that ran in a process and a session of its own.

    Args:
        timeout: seconds. TimeoutExpired when it takes longer; it is killed.

    The others: see `start_script`.
    """
    process = start_script(
        script, arguments, folder, log, environment, launcher=launcher, memory=memory
    )
    try:
        return process.wait(timeout)
    finally:
        # The script's own processes outlive one that is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ForkedServer(Server):
    """vLLM's API server in a fork of a launcher; its engine is a fork of that.

    Args:
        environment: what its environment has besides this process's.

    The others: see `Server`.
    """

    def __init__(self, *told: Any, environment: dict[str, str] | None = None, **more: Any) -> None:
        self._more = environment or {}
        super().__init__(*told, **more)

    def _started(self, command: list[str]) -> Any:
        _, _, module, *arguments = command
        place = importlib.util.find_spec(module)
        assert place is not None
        assert place.origin is not None
        environment = {**SERVING, **with_root(), **FORKED, **self._more}
        return start_script(Path(place.origin), arguments, self.log.parent, self.log, environment)


def with_root() -> dict[str, str]:
    """An environment in which `benchmarks` and `tests` are found."""
    inherited = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])
    return {"PYTHONPATH": os.pathsep.join(inherited)}


def run_engine(
    folder: Path,
    scenario: dict[str, Any],
    environment: dict[str, str] | None = None,
    *,
    launcher: int | None = 0,
    memory: SharedMemory | None = None,
) -> Run:
    """Start an engine in a process of its own, run the scenario, fail loudly if it fails.

    `launcher` and `memory`: see `run_script`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("scenario-*.json")))
    request = folder / f"scenario-{number}.json"
    answer = folder / f"report-{number}.json"
    log = folder / f"log-{number}.txt"
    # A relative path: the model has the same name wherever the test runs.
    told = {"model_dir": "tiny-model", **scenario}
    if told.get("kvstore") is not None:
        told["kvstore"] = {"deadline_s": PATIENT_SECONDS, "recompute_s": 0, **told["kvstore"]}
    request.write_text(json.dumps(told))
    status = run_script(
        ROUNDS,
        [str(request), str(answer)],
        folder,
        log,
        environment or {},
        launcher=launcher,
        memory=memory,
        timeout=ENGINE_SECONDS,
    )
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
