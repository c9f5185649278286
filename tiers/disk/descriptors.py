"""File descriptors: raise the limit. A large lane needs two per segment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource

from kvstore.types import about

__all__ = ["NO_DESCRIPTORS", "SPARE_DESCRIPTORS", "allow_descriptors", "descriptors_left"]

SPARE_DESCRIPTORS = 128
"""For everything else that the process opens."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors that mean that no more files may be open; they say nothing about the file."""

logger = logging.getLogger("kvstore.disk")


def descriptors_left() -> int:
    """How many more files this process may open.

    Raises:
        OSError: if there is none left to find out.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/proc/self/fd"))


def allow_descriptors(more: int, what: str, *, tells: bool = True) -> int:
    """Raise this process's soft limit so that `more` files can be opened, as far as the hard one.

    Args:
        tells: where that is not far enough, one warning says what is missing.

    Returns:
        How many can be opened, at most `more`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    needed = used + more
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return more
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        soft = max(soft, most)
    if needed > soft and tells:
        logger.warning(
            "%s needs %d open files when it is full, and the process may have %d: "
            "raise the limit (ulimit -Hn) or segment_bytes",
            what,
            needed,
            soft,
            extra=about("disk.few_files", needed=needed, allowed=soft),
        )
    return max(0, min(needed, soft) - used)
