"""Hints: what a server, or a router in front of it, knows about a request's future.

Hints come with a request and apply to its whole prompt. They are advice within bounds: retained
chunks take up a limited share of host memory and tiers. Hints that are malformed or not
known are counted and ignored.

They come in either of two forms:

* as ``kv_transfer_params``, which an HTTP client can send, below the key ``kvstore``:
  ``{"kvstore": {"retain_s": 300, "demote": true, "prefetch_after_s": 50}}``;
* as an envelope of actions, ``kv_hints``. Each has an ``action_type`` and a ``payload``: ``retain``
  ``{"ttl_s": 300, "host": false}``, ``release`` ``{}``, ``demote`` ``{}``, ``prefetch``
  ``{"after_s": 50}``, ``do_not_store`` ``{}``. Its ``action_version`` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["NO_HINTS", "PARAMS_KEY", "Hints", "read_hints"]

PARAMS_KEY = "kvstore"
"""Where hints are in the transfer parameters of a request."""

VERSIONS = ("1",)
"""Versions of actions that are known, by their first number."""

MOST_ACTIONS = 64
"""Most actions of one envelope that are read."""

MOST_SECONDS = 7 * 24 * 3600.0
"""The longest time that a hint may name."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What to do with the chunks of a request once it has ended.

    Attributes:
        retain_s: pin them for this many seconds; None: do not pin them.
        retain_host: pin them in host memory, too; else only on slower tiers, where there are any.
        release: end their pins, and let those that no other prompt shares leave before others.
        demote: let those that no other prompt shares leave host memory once a slower tier has them.
        prefetch_after_s: fetch them to host memory again this many seconds later; None: never.
        store: whether chunks that the request computes are stored at all.
    """

    retain_s: float | None = None
    retain_host: bool = False
    release: bool = False
    demote: bool = False
    prefetch_after_s: float | None = None
    store: bool = True

    @property
    def at_end(self) -> bool:
        """Whether the hints ask for anything when the request has ended."""
        waits = self.retain_s is not None or self.prefetch_after_s is not None
        return waits or self.release or self.demote


NO_HINTS = Hints()


def read_hints(params: object, envelope: object = None) -> tuple[Hints, int, int]:
    """Read the hints of a request from its transfer parameters and envelope; either may be None.

    Where hints contradict each other, the last one counts.

    Returns:
        The hints, how many there were, and how many were ignored.
    """
    reader = _Reader()
    table = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    if isinstance(table, Mapping):
        for name, value in table.items():
            reader.read(_PARAMS.get(name), value)
    elif table is not None:
        reader.ignored += 1
    actions = getattr(envelope, "actions", None)
    if isinstance(actions, (list, tuple)):
        for action in actions[:MOST_ACTIONS]:
            known = str(getattr(action, "action_version", "")).split(".")[0] in VERSIONS
            read = _ACTIONS.get(str(getattr(action, "action_type", ""))) if known else None
            reader.read(read, getattr(action, "payload", None))
        reader.ignored += max(0, len(actions) - MOST_ACTIONS)
    elif envelope is not None:
        reader.ignored += 1
    return reader.hints, reader.taken, reader.ignored


_Read = Callable[[Hints, Any], Hints]


class _Reader:
    def __init__(self) -> None:
        self.hints = NO_HINTS
        self.taken = self.ignored = 0

    def read(self, read: _Read | None, value: object) -> None:
        """Take in one hint; ignore it if it is malformed or not known."""
        if read is not None:
            try:
                self.hints = read(self.hints, value)
            except (TypeError, ValueError):
                read = None
        self.taken += read is not None
        self.ignored += read is None


def _seconds(value: object, *, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("no number of seconds")
    if not least <= value <= MOST_SECONDS or math.isnan(value):
        raise ValueError("not that many seconds")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _table(value: object, *allowed: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not set(value) <= set(allowed):
        raise TypeError(f"no table of {', '.join(allowed)}")
    return value


def _retain_s(hints: Hints, value: object) -> Hints:
    return replace(hints, retain_s=_seconds(value, least=1e-3), release=False)


def _release(hints: Hints, value: object) -> Hints:
    released = _flag(value)
    return replace(hints, release=released, retain_s=None if released else hints.retain_s)


def _retain(hints: Hints, payload: object) -> Hints:
    table = _table(payload, "ttl_s", "host")
    hints = replace(hints, retain_host=_flag(table.get("host", False)))
    return _retain_s(hints, table.get("ttl_s"))


def _prefetch(hints: Hints, payload: object) -> Hints:
    after = _table(payload, "after_s").get("after_s", 0.0)
    return replace(hints, prefetch_after_s=_seconds(after, least=0.0))


def _bare(**changes: bool) -> _Read:
    """Return the reader of an action without parameters."""

    def read(hints: Hints, payload: object) -> Hints:
        _table(payload)
        return replace(hints, **changes)

    return read


_PARAMS: Mapping[object, _Read] = {
    "retain_s": _retain_s,
    "retain_host": lambda hints, value: replace(hints, retain_host=_flag(value)),
    "release": _release,
    "demote": lambda hints, value: replace(hints, demote=_flag(value)),
    "prefetch_after_s": lambda hints, value: replace(
        hints, prefetch_after_s=_seconds(value, least=0.0)
    ),
    "store": lambda hints, value: replace(hints, store=_flag(value)),
}

_ACTIONS: Mapping[str, _Read] = {
    "retain": _retain,
    "release": lambda hints, payload: _release(hints, _table(payload) == {}),
    "demote": _bare(demote=True),
    "prefetch": _prefetch,
    "do_not_store": _bare(store=False),
}
