"""The version of vLLM, and what it offers: the one module that asks.

A name that an older release lacks is given here in its place, or a flag says that it is absent.
"""

from __future__ import annotations

import enum
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import vllm

from kvstore.errors import ConfigError
from kvstore.types import about

__all__ = [
    "CANONICAL_FORMAT",
    "GROUP_BYTES",
    "HAS_GROUP_NUMBERS",
    "HAS_POSITIONS",
    "KNOWS_SESSIONS",
    "LOADS_WITHIN_STEPS",
    "NEWEST",
    "OLDEST",
    "PENDING_IS_HOST",
    "TELLS_OF_FLUSHES",
    "VERSION",
    "check_version",
    "group_number",
    "hashes_last",
    "hints_of",
    "join_server_log",
    "keep_position",
    "mediums",
    "position_of",
    "version_of",
]

logger = logging.getLogger("kvstore")


Version = tuple[int, int]

OLDEST: Version = (0, 29)
"""The first release that is supported."""

NEWEST: Version = (0, 33)
"""The last release that was run."""

UNKNOWN: Version = (999, 0)


def version_of(text: str) -> Version:
    """The minor release. A build that does not know its own counts as the newest of all."""
    found = re.match(r"(\d+)\.(\d+)\.", text)
    # 0.1.dev is what vLLM is called that was built without its history.
    if found is None or re.match(r"0\.[01]\.dev", text):
        return UNKNOWN
    return int(found[1]), int(found[2])


def _canonical_format() -> int | None:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
    except ImportError:
        return None
    # The first vLLM to derive it gave it no version, and did not offer it.
    found: int | None = getattr(canonical_mapping, "CANONICAL_FORMAT_VERSION", None)
    return found


VERSION = version_of(str(vllm.__version__))

TELLS_OF_FLUSHES = VERSION >= (0, 33)
"""vLLM reports when the workers have ended transfers that were under way at a reset."""

KNOWS_SESSIONS = VERSION >= (0, 33)
"""vLLM's half of the connector knows sessions that get more input, and resets that preempt."""

LOADS_WITHIN_STEPS = VERSION >= (0, 33)
"""vLLM can wait for a load within the step that has found it (`sync_load_budget_bytes`)."""

PENDING_IS_HOST = VERSION >= (0, 33)
"""vLLM assumes that pending chunks have a place in host memory, and counts them."""

HAS_HINTS = VERSION >= (0, 31)
"""Requests may come with an envelope of hints."""

HAS_POSITIONS = VERSION >= (0, 31)
"""vLLM says where in a prompt a key belongs."""

CANONICAL_FORMAT = _canonical_format()
"""The version of the pages in which no parallel shape shows; None where there are none."""

HAS_GROUP_NUMBERS = VERSION >= (0, 30)
"""KV cache groups may be left out, and say which number they have."""


GROUP_BYTES = 4
"""The end of a key, which names its group."""


class _Medium(enum.StrEnum):
    """The mediums for a vLLM that accepts any text."""

    CPU = "CPU"
    STORAGE = "STORAGE"


def mediums() -> Any:
    """Return the names in vLLM's events: `CPU` for host memory, `STORAGE` for slower tiers."""
    from vllm.v1.kv_offload import base

    return getattr(base, "Medium", _Medium)


def check_version(text: str | None = None) -> None:
    """Refuse a vLLM that is too old; log one that is untested.

    Raises:
        ConfigError: if it is too old.
    """
    text = str(vllm.__version__) if text is None else text
    version = version_of(text)
    if version < OLDEST:
        raise ConfigError(
            f"vLLM {text} is not supported: kvstore runs with {_told(OLDEST)} to {_told(NEWEST)}"
        )
    if version > NEWEST:
        logger.warning(
            "kvstore was not tried with vLLM %s, only with %s to %s: it is taken for %s",
            *(text, _told(OLDEST), _told(NEWEST), _told(NEWEST)),
            extra=about("server.untried_version", version=text),
        )


def _told(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def group_number(group: Any, place: int) -> int:
    """The number of a KV cache group that comes in this place; all of them come up to 0.29."""
    return int(group.group_id) if HAS_GROUP_NUMBERS else place


def hints_of(context: Any) -> object | None:
    """The envelope of hints that a request came with, of its `ReqContext`."""
    return context.kv_hints if HAS_HINTS else None


def position_of(context: Any) -> Callable[[Any], int | None] | None:
    """Return a function from a key to the token where it ends in the prompt; None if not known."""
    return context.get_offload_key_position if HAS_POSITIONS else None


def hashes_last(algorithm: str) -> bool:
    """Whether a prompt has the same block hashes in the next process."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    return "xxhash" not in algorithm


def keep_position(context: Any, key: Any, named: Any) -> Any:
    """Return `named`, another name of a key of a request, at the same place in its prompt."""
    if HAS_POSITIONS:
        position = context.get_offload_key_position(key)
        if position is not None:
            context.set_offload_key_position(named, position)
    return named


def join_server_log() -> None:
    """Let kvstore's log lines appear in the server's log."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
