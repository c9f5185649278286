"""An event loop in one background thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

__all__ = ["DETACH_SECONDS", "LoopThread", "new_event_loop"]

DETACH_SECONDS = 0.25
"""How long tasks that are left behind get to notice it."""

JOIN_SECONDS = 5.0
"""How long the thread gets to end, those tasks included."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop where uvloop is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """A loop that runs in a daemon thread until `end`. A child of a fork has no such thread.

    Attributes:
        loop: what is to run there is handed to its ``call_soon_threadsafe``.

    Args:
        keeps: lives as long as the thread, which may outlive whoever began it: tasks that
            nobody refers to any more are destroyed, with a warning.
        at_end: called in the thread when the loop will run nothing more.
    """

    def __init__(self, name: str, keeps: object, at_end: Callable[[], None] = lambda: None) -> None:
        self.loop = new_event_loop()
        self._keeps = keeps
        self._at_end = at_end
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    @property
    def here(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End soon, from any thread; may be called again.

        What was handed over before has begun by then. Tasks that are left are cancelled.
        """
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def end(self) -> None:
        """`stop`, and wait for the end, but not for ever."""
        self.stop()
        self.join(JOIN_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=DETACH_SECONDS))
            self._at_end()
            # A task that waits for a call that never returns is destroyed without a warning.
            self.loop.set_exception_handler(lambda loop, context: None)
            self.loop.close()
            self._keeps = None
