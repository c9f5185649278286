"""What the fuzzer needs: copies of a sound cache, and a process that judges them."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests.patience import PATIENCE

EXAMPLES = os.environ.get("KVSTORE_FUZZ")

fuzz = settings(
    max_examples=int(EXAMPLES or 8),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Worker:
    """The other process; a new one after each that did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def judge(self, path: Path) -> None:
        """Fail if something goes wrong with the cache at `path`."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tiers.fuzz_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
                # An arena for every thread would be taken for memory in use.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(str(path)), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        if not ready:
            self.end()
            raise AssertionError("it hangs")
        told = self._process.stdout.readline()
        if not told:
            status = self.end()
            raise AssertionError(f"it crashes with status {status}")
        wrong = json.loads(told)
        assert wrong is None, wrong

    def end(self) -> int:
        """Kill it."""
        if self._process is None:
            return 0
        self._process.kill()
        status = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process = None
        return status


@dataclass
class Bed:
    """A sound cache of two full segments, and places for copies of it."""

    sound: Path
    copies: Iterator[Path]
    worker: Worker

    def try_with(self, change: Callable[[Path], None]) -> None:
        """Change a copy and let the worker do everything with it."""
        path = next(self.copies)
        shutil.copytree(self.sound, path, symlinks=True)
        try:
            change(path)
            self.worker.judge(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
