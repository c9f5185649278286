"""A slow disk: the kernel's limit on the bytes per second of a group of processes.

It holds for direct I/O in both directions and for whatever reads from the device, whoever
asks; both caches move their chunks by direct I/O. Needs root and a control group of
version 1 with the controller `blkio`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

__all__ = ["Throttle"]

BLKIO = Path("/sys/fs/cgroup/blkio")
LIMITS = ("read", "write")


class Throttle:
    """A control group; servers started as `command` says are in it.

    Raises:
        OSError: if this machine has none, or does not let this process make one.
    """

    def __init__(self, folder: Path) -> None:
        self._device = whole_disk(folder)
        self._group = BLKIO / f"kvstore-serving-{secrets.token_hex(4)}"
        self._group.mkdir()
        try:
            self.set(0)
        except OSError:
            self._group.rmdir()
            raise

    def command(self, command: list[str]) -> list[str]:
        """`command`, run inside the group."""
        enter = f'echo $$ > "{self._group}/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *command]

    def set(self, bytes_per_second: int) -> None:
        """Limit reads and writes to so much each; 0: no limit."""
        for way in LIMITS:
            path = self._group / f"blkio.throttle.{way}_bps_device"
            path.write_text(f"{self._device} {bytes_per_second}")

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.1)


def whole_disk(folder: Path, sysfs: Path = Path("/sys/dev/block")) -> str:
    """Major and minor number of the disk that `folder` lies on; limits are not for partitions."""
    number = folder.stat().st_dev
    device = (sysfs / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()
