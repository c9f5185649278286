"""fio: what the disk gives to a program that does nothing but I/O.

fio takes the buffer of a new operation from the top of a stack, so a run of depth 8
moves the same 8 buffers again and again, and with small blocks they stay in the
processor's cache. A store of chunks cannot do that: it moves rows of a large pool.
Two kinds of runs stand for the two sides of this:

* *pooled*: so many operations are outstanding that their buffers together are as large as
  the store's pool, and all of them are in use in turn. The same memory footprint, but a
  queue so deep that some kernels spend more time on it.
* *warm*: depth 4 to 32 and a few buffers.

The tier is held against the first; the second is told beside it. Both get transparent huge
pages, by way of glibc's ``glibc.malloc.hugetlb`` (2.35 or newer), and O_DIRECT, and neither
pays for verifying, scrambling, refilling or faulting in its buffers. A run
moves a number of bytes and ends with the last of them, as a job of the tier does: of a run
that ends by the clock fio counts what was under way at both ends, and with a queue this
deep that looked a tenth faster than the disk is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Fio", "FioResult", "Way"]

WORKLOADS = {
    "write": ["--rw=write"],
    "read": ["--rw=read"],
    "random read": ["--rw=randread", "--norandommap"],
    "mixed": ["--rw=rw", "--rwmixread=70"],
    "first write": ["--rw=write"],
}


@dataclass(frozen=True, slots=True)
class Way:
    """How fio is asked to do it."""

    engine: str
    depth: int
    jobs: int = 1

    def __str__(self) -> str:
        return f"{self.engine} {self.jobs}x{self.depth}"


@dataclass(frozen=True, slots=True)
class FioResult:
    """What one run gave."""

    gbps: float
    cpu_per_gb: float


class Fio:
    """Runs fio on a file of its own.

    Args:
        folder: where the file is made.
        footprint: bytes of the file, and of the buffers of a pooled run.
    """

    def __init__(self, folder: Path, footprint: int) -> None:
        self._folder = folder
        self._footprint = footprint
        self._refused: set[str] = set()
        """Engines that do not work here."""

    @staticmethod
    def missing() -> str | None:
        """Why there is no fio, or None."""
        return None if shutil.which("fio") else "fio is not installed"

    def prepare(self) -> int:
        """Fill the file with random bytes; returns how many bytes of huge pages fio was given."""
        way = Way("libaio", self._footprint // 2**20)
        command = self._command(way, 2**20, ["--rw=write", f"--size={self._footprint}"])
        command.append("--thread")
        huge = 0
        with subprocess.Popen(
            command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                    lines = [li for li in text.splitlines() if li.startswith("AnonHugePages:")]
                    huge = max(huge, *(int(line.split()[1]) * 1024 for line in lines), 0)
                time.sleep(0.01)
            if process.returncode:
                assert process.stderr is not None
                raise RuntimeError(f"fio: {process.stderr.read().decode()[-500:]}")
        return huge

    def pooled(self, block: int) -> list[Way]:
        """Ways whose buffers fill the footprint.

        One job each: of several fio tells the longest time, not that from the first beginning to
        the last end.
        """
        depth = max(1, self._footprint // block)
        return [Way("io_uring", depth), Way("libaio", depth)]

    def warm(self, block: int) -> list[Way]:
        """Ways with few buffers."""
        ways = [Way("psync", 1, 4), Way("libaio", 8), Way("libaio", 32), Way("io_uring", 16)]
        return [way for way in ways if way.depth * way.jobs * block < self._footprint]

    def sweep(self, ways: list[Way], workload: str, block: int) -> dict[Way, float]:
        """GB/s of a short run of each, the fastest way first; without those that do not work."""
        best: dict[Way, float] = {}
        for way in ways:
            if way.engine not in self._refused:
                try:
                    best[way] = self.run(way, workload, block).gbps
                except RuntimeError:
                    self._refused.add(way.engine)
        return dict(sorted(best.items(), key=lambda item: -item[1]))

    def run(self, way: Way, workload: str, block: int) -> FioResult:
        """Measure once: as many bytes as the footprint. A first write goes into a new file."""
        part = self._footprint // way.jobs // block * block
        options = [*WORKLOADS[workload], f"--size={part}", f"--offset_increment={part}"]
        if workload == "first write":
            new = self._folder / "fio-new"
            new.unlink(missing_ok=True)
            options += [f"--filename={new}", "--unlink=1"]
        told = subprocess.run(
            self._command(way, block, options),
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if told.returncode:
            raise RuntimeError(f"fio {way}: {told.stderr[-500:]}")
        report: Any = json.loads(told.stdout[told.stdout.index("{") :])["jobs"][0]
        moved = report["read"]["io_bytes"] + report["write"]["io_bytes"]
        took = max(report["read"]["runtime"], report["write"]["runtime"]) / 1000
        if report["error"] or not moved or not took:
            raise RuntimeError(f"fio {way}: error {report['error']}")
        # Percentages of the time that the jobs ran, averaged over them.
        cpu = (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1000
        return FioResult(moved / took / 1e9, cpu / (moved / 1e9))

    def _command(self, way: Way, block: int, options: list[str]) -> list[str]:
        command = [
            "fio",
            "--name=bench",
            "--output-format=json",
            "--group_reporting",
            "--direct=1",
            "--randrepeat=0",
            "--scramble_buffers=0",
            "--iomem=malloc",
            "--iomem_align=2m",
            f"--bs={block}",
            f"--ioengine={way.engine}",
            f"--iodepth={way.depth}",
            f"--numjobs={way.jobs}",
            *options,
        ]
        if not any(option.startswith("--filename") for option in options):
            command.append(f"--filename={self._folder / 'fio'}")
        return command


def _environment() -> dict[str, str]:
    return {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.perturb=85"}
