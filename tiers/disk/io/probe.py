"""Probe: find the I/O backends that work in a folder."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.disk.io.aio import AioIO
from kvstore.tiers.disk.io.base import NO_ROOM, IOBackend, IORequest
from kvstore.tiers.disk.io.buffered import BufferedIO, DirectIO
from kvstore.tiers.disk.io.mapped import MappedIO
from kvstore.tiers.disk.io.portable import PortableIO
from kvstore.types import about

__all__ = ["IO_BACKENDS", "choose_backend"]

logger = logging.getLogger("kvstore.disk")

IO_BACKENDS: dict[str, Callable[[], IOBackend]] = {
    "aio": AioIO,
    "direct": DirectIO,
    "mmap": MappedIO,
    "buffered": BufferedIO,
    "portable": PortableIO,
}
"""Backends by name."""

AUTO = ("aio", "direct", "buffered", "portable")
"""The backends that ``auto`` tries, best first."""


def choose_backend(folder: Path, name: str = "auto") -> IOBackend:
    """The backend called `name`, or for ``auto`` the best that works in `folder`.

    Raises:
        ConfigError: if `name` is unknown, or does not work in `folder`.
    """
    if name != "auto":
        if name not in IO_BACKENDS:
            raise ConfigError(f"io = {name!r}: allowed are auto, {', '.join(IO_BACKENDS)}")
        chosen, reason = _try(IO_BACKENDS[name], folder)
        if chosen is not None:
            return chosen
        raise ConfigError(f"io = {name!r} does not work in {folder}: {reason}")
    reasons: list[str] = []
    for candidate in AUTO:
        chosen, reason = _try(IO_BACKENDS[candidate], folder)
        if chosen is not None:
            if reasons:
                logger.info(
                    "I/O by %s in %s: %s",
                    candidate,
                    folder,
                    "; ".join(reasons),
                    extra=about("disk.io_chosen", path=folder, io=candidate, errors=reasons),
                )
            return chosen
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"no I/O backend works in {folder}: {'; '.join(reasons)}")


def _try(make: Callable[[], IOBackend], folder: Path) -> tuple[IOBackend, None] | tuple[None, str]:
    """Write and read one page as the tier does: the backend, or what went wrong."""
    path = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    try:
        backend = make()
        tried = _made(path)
        fd = backend.open(tried)
        try:
            with memoryview(page) as view, view[:4096] as out, view[4096:8192] as back:
                out[:5] = b"probe"
                if tried == path:
                    (written,) = backend.move_all([IORequest(fd, [out], 0)], load=False)
                    if isinstance(written, OSError):
                        # A full disk says nothing about the backend: what is there can be served.
                        if written.errno in NO_ROOM:
                            return backend, None
                        raise written
                (read,) = backend.move_all([IORequest(fd, [back], 0)], load=True)
                if isinstance(read, OSError):
                    raise read
                if tried == path and (read.length != 4096 or bytes(back[:5]) != b"probe"):
                    return None, "reads back something else than was written"
        finally:
            backend.close(fd)
    except OSError as error:
        return None, error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)
        # After a call that failed halfway its error still refers to a part of the page.
        with contextlib.suppress(BufferError):
            page.close()
    return backend, None


def _made(path: Path) -> Path:
    """Make a file to try; where there is no room for one, return a segment beside it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        there = next(path.parent.glob("segment-*"), None)
        if there is None or error.errno not in NO_ROOM:
            raise
        return there
    return path
