"""Which I/O backend a folder can take."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import ConfigError
from tiers.disk.io.base import IOBackend
from tiers.disk.io.buffered import BufferedIO
from tiers.disk.io.direct import DirectIO

__all__ = ["IO_BACKENDS", "choose_backend"]

IO_BACKENDS: dict[str, Callable[[], IOBackend]] = {"direct": DirectIO, "buffered": BufferedIO}
"""Backends by name, best first."""


def choose_backend(folder: Path, name: str = "auto") -> IOBackend:
    """The backend called `name`, or for ``auto`` the best that works in `folder`.

    Raises:
        ConfigError: if `name` is unknown, or does not work in `folder`.
    """
    if name != "auto":
        if name not in IO_BACKENDS:
            raise ConfigError(f"io = {name!r}: allowed are auto, {', '.join(IO_BACKENDS)}")
        backend = IO_BACKENDS[name]()
        reason = _try(backend, folder)
        if reason:
            raise ConfigError(f"io = {name!r} does not work in {folder}: {reason}")
        return backend
    reasons = []
    for candidate in IO_BACKENDS.values():
        backend = candidate()
        reason = _try(backend, folder)
        if not reason:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ConfigError(f"no I/O backend works in {folder}: {'; '.join(reasons)}")


def _try(backend: IOBackend, folder: Path) -> str | None:
    """Write and read one page; what went wrong, or None."""
    path = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        fd = backend.open(path)
        try:
            with memoryview(page) as view, view[:4096] as out, view[4096:8192] as back:
                out[:5] = b"probe"
                try:
                    backend.write(fd, [out], 0)
                except OSError as error:
                    # A full disk says nothing about the backend: what is there can be served.
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        return None
                    raise
                if backend.read(fd, [back], 0) != 4096 or bytes(back[:5]) != b"probe":
                    return "reads back something else than was written"
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)
        page.close()
    return None
