"""A cable between two network namespaces, which delays, throttles and loses frames.

Each end is a TAP device of one namespace; a process carries Ethernet frames from one to the other.
TCP, timeouts and retransmissions are the kernel's own. Needs root. (`tc netem` would do as well,
where the kernel has it.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import random
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ADDRESSES", "Cable", "Quality"]

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000

MTU = 9000

ADDRESSES = ("10.77.0.1", "10.77.0.2")

QUEUE_BYTES = 256 * 2**10
"""What waits for a throttled cable; more is lost, as in any router."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a cable does to frames, in both directions.

    Attributes:
        delay_s: seconds that each frame is under way.
        bytes_per_s: 0 for as fast as it goes.
        loss: share of frames that are lost, 1 for a cable that is cut.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0


class Cable:
    """A cable between two new namespaces; the first has `ADDRESSES[0]`, the second the other.

    Raises:
        RuntimeError: if namespaces or devices cannot be made.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names
        self._remove_namespaces()
        for name in names:
            _ip("netns", "add", name)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        devices = (f"kvs{os.getpid()}a", f"kvs{os.getpid()}b")
        self._tell({"devices": devices})
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("no TAP device can be made: this needs root")
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            _ip("link", "set", device, "netns", name)
            within = ("netns", "exec", name, "ip")
            _ip(*within, "link", "set", "lo", "up")
            _ip(*within, "address", "add", f"{address}/24", "dev", device)
            _ip(*within, "link", "set", device, "mtu", str(MTU), "up")

    def set(self, quality: Quality) -> None:
        """From now on it is like this."""
        self._tell(asdict(quality))

    def close(self) -> None:
        """Remove it, and the namespaces."""
        self._process.kill()
        self._process.wait()
        self._remove_namespaces()

    def _remove_namespaces(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _tell(self, words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class _Direction:
    """Frames from one end to the other."""

    def __init__(self, source: int, sink: int) -> None:
        self.quality = Quality()
        self._source, self._sink = source, sink
        self._frames: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._free_at = 0.0
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        dice = random.Random(1)
        while True:
            frame = os.read(self._source, MTU + 100)
            quality = self.quality
            if quality.loss and dice.random() < quality.loss:
                continue
            due = now = time.monotonic()
            if quality.bytes_per_s:
                begin = max(now, self._free_at)
                if (begin - now) * quality.bytes_per_s > QUEUE_BYTES:
                    continue
                due = self._free_at = begin + len(frame) / quality.bytes_per_s
            if not quality.delay_s and due == now and self._frames.empty():
                self._put(frame)
            else:
                self._frames.put((due + quality.delay_s, frame))

    def _write(self) -> None:
        while True:
            due, frame = self._frames.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._put(frame)

    def _put(self, frame: bytes) -> None:
        # The other end may not be up.
        with contextlib.suppress(OSError):
            os.write(self._sink, frame)


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    asked = struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER)
    fcntl.ioctl(descriptor, TUNSETIFF, asked)
    return descriptor


def main() -> None:
    """Carry frames; each line of the standard input is a `Quality`, the first names devices."""
    ends = [_tap(name) for name in json.loads(sys.stdin.readline())["devices"]]
    directions = [_Direction(*ends), _Direction(*reversed(ends))]
    print("ready", flush=True)
    for line in sys.stdin:
        quality = Quality(**json.loads(line))
        for direction in directions:
            direction.quality = quality


if __name__ == "__main__":
    main()
