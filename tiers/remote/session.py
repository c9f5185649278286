"""Session: a connection of Mooncake's client, and the threads that use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.tiers.remote.client import StoreError

__all__ = ["Session"]


class Session:
    """An engine that is connected to its master.

    The engine gives up a transfer after a minute, but the transfer continues as long as bytes
    arrive. Only closing the engine ends it.

    Args:
        engine: owned by the session from now on.

    Attributes:
        ends: whether it accepts no more calls.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._users = 0
        self._left = self._ended = False
        self.ends = False

    @contextmanager
    def used(self) -> Iterator[Any]:
        """Use the engine for a call of this thread.

        Raises:
            StoreError: if the session is ending.
        """
        with self._changed:
            if self.ends:
                raise StoreError("the connection is closing, because a transfer was given up")
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
        """Close the engine once no thread uses it. After that, no transfer touches memory.

        Blocks. A thread that uses the engine must not call this.

        Args:
            patience: seconds to wait for threads that use the engine. After that the last of them
                closes it, because closing it during their calls would crash.
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
