"""Drives: how worn the drives under a folder are, as they themselves say.

A flash drive estimates which share of its endurance is used, and counts the hours for which it was
on (NVM Express Base Specification, SMART / Health Information log). Two programs read that, mostly
for root alone: ``smartctl`` and ``nvme``. A server is seldom root, so its metrics do not have it:
`write_metrics` writes a file of its own for Prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.sizes import format_size

__all__ = ["Wear", "drives_under", "read_wear", "wear_under", "write_metrics"]

YEARS = 3.0
"""Years that a drive shall last; if it will not, less should be written to it."""

LEAST_USED = 0.03
"""Share of the endurance below which nothing is forecast: drives tell it in whole hundredths."""

SECONDS = 10.0
"""How long a program may take to answer."""

UNIT = 512_000
"""Bytes of one unit in which drives count what was written."""

BLOCK_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Wear:
    """What a drive says of its wear.

    Attributes:
        drive: its device, such as ``/dev/nvme0n1``.
        used: the share of its endurance that is used; above 1 where it has outlived it.
        written_bytes: what was written to it in all.
        hours: for how long it was on.
    """

    drive: str
    used: float
    written_bytes: int
    hours: int

    @property
    def hours_left(self) -> float | None:
        """How long it lasts if it goes on as so far; None where too little of it is used."""
        if self.used >= 1:
            return 0.0
        return self.hours * (1 - self.used) / self.used if self.used >= LEAST_USED else None

    @property
    def years_left(self) -> float | None:
        """The same in years."""
        return None if self.hours_left is None else self.hours_left / 24 / 365

    @property
    def daily_bytes(self) -> int | None:
        """How much may be written to it in a day, by all, for it to last `YEARS` years more.

        It takes as many bytes for each hundredth of its endurance as so far.
        """
        if self.hours_left is None or not 0 < self.used < 1 or not self.written_bytes:
            return None
        return int(self.written_bytes * (1 - self.used) / self.used / (YEARS * 365))

    def __str__(self) -> str:
        line = (
            f"{self.drive}: {100 * self.used:.0f} % of its endurance used in "
            f"{self.hours / 24:,.0f} days, {format_size(self.written_bytes)} written"
        )
        if self.used >= 1:
            return f"{line}: replace it."
        if self.years_left is None:
            return f"{line}: too little to say how long it lasts."
        return f"{line}; at that pace it lasts {self.years_left:.1f} years more."


def drives_under(folder: Path) -> list[str]:
    """The devices of the drives on which `folder` lies; none where that cannot be told.

    Partitions and what is made of several drives are followed down to the drives.
    """
    try:
        number = os.stat(folder).st_dev
    except OSError:
        return []
    device = BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    return sorted({f"/dev/{each.name}" for each in _drives(device.resolve())})


def _drives(device: Path) -> Iterator[Path]:
    if not device.is_dir():
        return
    if (device / "partition").exists():
        device = device.parent
    below = device / "slaves"
    parts = sorted(below.iterdir()) if below.is_dir() else []
    if not parts:
        yield device
    for part in parts:
        yield from _drives(part.resolve())


def wear_under(folder: Path) -> tuple[list[Wear], list[str]]:
    """Ask the drives on which `folder` lies for their wear; returns why the others do not tell."""
    asked = [read_wear(drive) for drive in drives_under(folder)]
    told = [each for each in asked if isinstance(each, Wear)]
    return told, [each for each in asked if isinstance(each, str)]


def write_metrics(drives: Sequence[Wear], file: Path) -> None:
    """Write what drives tell in Prometheus' text format; replaces `file` as a whole.

    Raises:
        KVStoreError: if a package is missing, or the file cannot be written.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError as error:
        raise KVStoreError(
            "metrics are written by another package: pip install 'kvstore-offload[top]'; "
            "missing is prometheus_client"
        ) from error
    registry = CollectorRegistry()

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"kvstore_drive_{name}", text, ["drive"], registry=registry)

    used = gauge("used_ratio", "Share of its endurance that the drive has used; 1 at its end.")
    written = gauge("written_bytes", "Bytes that were written to the drive in all, by anybody.")
    left = gauge("left_seconds", "How long the drive lasts if it goes on to be used as so far.")
    for each in drives:
        used.labels(each.drive).set(each.used)
        written.labels(each.drive).set(each.written_bytes)
        if each.hours_left is not None:
            left.labels(each.drive).set(each.hours_left * 3600)
    if file.exists() and not file.is_file():
        # A device would be replaced by a file.
        raise KVStoreError(f"{file} is no regular file: give the name of one")
    try:
        write_to_textfile(str(file), registry)
    except OSError as error:
        raise KVStoreError(f"{file}: {error.strerror}") from error


def read_wear(drive: str) -> Wear | str:
    """Ask a drive for its wear; returns in words what went wrong, if it cannot be told."""
    told = "neither smartctl nor nvme is installed"
    for program, arguments in (("smartctl", ("-j", "-a")), ("nvme", ("smart-log", "-o", "json"))):
        path = shutil.which(program)
        if path is None:
            continue
        try:
            # The status of smartctl tells of the drive's health, too.
            answer = subprocess.run(
                [path, *arguments, drive], capture_output=True, timeout=SECONDS, check=False
            )
            found = _wear_in(drive, json.loads(answer.stdout))
        except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired):
            found = None
        if found is not None:
            return found
        told = f"{drive} does not tell {program}, which mostly has to be root"
    return told


def _wear_in(drive: str, answer: Any) -> Wear | None:
    """Read the answer of either program."""
    if not isinstance(answer, dict):
        return None
    log = answer.get("nvme_smart_health_information_log", answer)
    if not isinstance(log, dict):
        return None
    used = _whole(log.get("percentage_used", log.get("percent_used")), most=255)
    written, hours = _whole(log.get("data_units_written")), _whole(log.get("power_on_hours"))
    if used is None or written is None or hours is None:
        return None
    return Wear(drive, used / 100, written * UNIT, hours)


def _whole(value: object, most: int = 2**128) -> int | None:
    """A number as a drive has it; some versions of nvme write whole numbers as 20.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        return None
    return value
