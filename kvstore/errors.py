"""Errors that kvstore raises. Each names what is wrong and what is allowed.

Faults at run time (a slow disk, a failed write, a flipped byte) are not here:
they are misses, counted in the statistics and logged once.
"""

from __future__ import annotations

__all__ = [
    "MALFORMED",
    "NOT_PARSED",
    "BlockKeyError",
    "ConfigError",
    "ForeignFileError",
    "KVStoreError",
    "LaneBusyError",
    "LeaseEndedError",
    "NamespaceMismatchError",
    "PathUnusableError",
    "TraceError",
]

NOT_PARSED = (ValueError, RecursionError)
"""What parsers of JSON and TOML raise for a text that is none, or is nested too deeply."""

MALFORMED = (*NOT_PARSED, LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading a document of others may raise: parts are missing, of another type, or no number."""


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """A configuration value cannot be used; names the key, the value and what is allowed."""


class PathUnusableError(KVStoreError, OSError):
    """A path given for the cache cannot hold it; names the path and the reason."""


class NamespaceMismatchError(KVStoreError):
    """The namespace on disk belongs to another model, dtype, layout or geometry."""


class LaneBusyError(KVStoreError):
    """Another living process writes to the lane; names the lane and the process id."""


class ForeignFileError(KVStoreError):
    """A file is not a segment of this format; names the file and what is wrong with it."""


class BlockKeyError(KVStoreError, ValueError):
    """A block key has the wrong type or length."""


class LeaseEndedError(KVStoreError):
    """Chunks were used after the lease that protected them had ended."""


class TraceError(KVStoreError):
    """A trace or a recording cannot be read; names the file, the place and what is wrong."""
