"""Where an object of the library may be used: on the running loop it was made on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable

from kvstore.errors import KVStoreError

__all__ = ["Home", "outlast"]


class Home:
    """The loop that runs where this is made, with its thread and its process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this loop is the one that runs."""
        # A loop runs in one thread, and none runs in the child of a fork.
        return running_loop() is self.loop

    def check(self) -> None:
        """Refuse a call from elsewhere.

        Raises:
            KVStoreError: if this loop is not the one that runs here.
        """
        if running_loop() is not self.loop:
            raise KVStoreError(self._where())

    def send(self, call: Callable[[], object]) -> None:
        """Make the call at home, soon; not at all if the loop has ended or this is another process.

        May be called from any thread.
        """
        if os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(call)

    def _where(self) -> str:
        if os.getpid() != self._pid:
            return (
                f"the store belongs to process {self._pid}, this is {os.getpid()}; "
                "open one of your own after a fork"
            )
        if threading.current_thread() is not self._thread:
            return (
                f"the store belongs to the loop of thread {self._thread.name!r}, this is "
                f"{threading.current_thread().name!r}; call it there by "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )
        return "the store belongs to the loop on which it was opened, which does not run here"


async def outlast(task: asyncio.Future[None], on_cancel: Callable[[], None]) -> None:
    """Wait for `task`, however often the caller is cancelled; its cancellation comes afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    task.result()
