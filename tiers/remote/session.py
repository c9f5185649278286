"""Session: a connection of Mooncake's client, and the threads that use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.tiers.remote.client import StoreError

__all__ = ["Session"]


class Session:
    """An engine that has found its master.

    The engine gives a transfer up after a minute, but what it has begun goes on as long as bytes
    come. Only the end of the engine is the end of that.

    Args:
        engine: is nobody else's from now on.

    Attributes:
        ends: whether it takes no more calls.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._users = 0
        self._left = self._ended = False
        self.ends = False

    @contextmanager
    def used(self) -> Iterator[Any]:
        """The engine, for a call of this thread.

        Raises:
            StoreError: if the session ends.
        """
        with self._changed:
            if self.ends:
                raise StoreError("the connection ends, as a transfer was given up")
            self._users += 1
        try:
            yield self._engine
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()
                last = self._left and not self._users
            if last:
                self._close()

    def end(self, patience: float | None = None) -> None:
        """End the engine once nobody uses it. Then nothing that it has begun touches memory.

        Blocks. A thread that uses the engine must not call it.

        Args:
            patience: seconds after which users are not waited for: the last one ends the engine,
                as it would crash in their calls.
        """
        with self._changed:
            if self.ends:
                self._changed.wait_for(lambda: self._ended, patience)
                return
            self.ends = True
            if not self._changed.wait_for(lambda: not self._users, patience):
                self._left = True
                return
        self._close()

    def _close(self) -> None:
        # Holds the interpreter's lock for about a second.
        try:
            self._engine.close()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
