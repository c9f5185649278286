"""Turns: a scheduler and the upkeep of an idle server use one core, never both at once.

A call of the scheduler waits for the upkeep's turn to end, which is a few
microseconds of plain computation. Upkeep never waits for the scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_turns"]

_C = TypeVar("_C", bound=type)


def in_turns(*names: str) -> Callable[[_C], _C]:
    """The methods `names` of a class run while they hold the lock in its `_turn`."""

    def decorate(cls: _C) -> _C:
        for name in names:
            setattr(cls, name, _in_turn(getattr(cls, name)))
        return cls

    return decorate


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def taking_turns(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return taking_turns
