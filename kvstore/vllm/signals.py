"""Signals: the engine's process outlives those that come while its tiers are being closed.

vLLM gives SIGTERM and SIGINT their defaults back before it shuts its connectors down. Ctrl-C
reaches server and engine alike, and then the server sends the engine SIGTERM just in between: the
engine would die with chunks that are not copied. And a signal that comes while vLLM handles another
waits for ever for a lock that its handler holds already. vLLM's server still kills the engine after
``--shutdown-timeout``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ending", "outlive_signals"]

CORE = "vllm.v1.engine.core"
"""The module of vLLM whose engine process this is about."""

Handler = Callable[[int, Any], object]


class _Signals:
    """Stands for the module `signal` in vLLM's: defaults wait until every holder is closed."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._owed: set[int] = set()
        self._handling = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        if handler is signal.SIG_DFL and self._holders:
            self._owed.add(number)
            handler = _pass_over
        return signal.signal(number, handler)

    def hold(self, holder: object) -> None:
        self._holders.add(holder)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                if callable(handler) and handler.__module__ == CORE:
                    signal.signal(number, self._one_at_a_time(handler))

    def _one_at_a_time(self, handler: Handler) -> Handler:
        """The handler, but for signals that come amid another: all ask for the same."""

        def handle(number: int, frame: object) -> None:
            if self._handling.acquire(blocking=False):
                try:
                    handler(number, frame)
                finally:
                    self._handling.release()

        return handle

    def release(self, holder: object) -> None:
        self._holders.discard(holder)
        if not self._holders and threading.current_thread() is threading.main_thread():
            for number in self._owed:
                signal.signal(number, signal.SIG_DFL)
            self._owed.clear()


def _pass_over(number: int, frame: object) -> None:
    """Do nothing: the end is under way already."""


_signals = _Signals()


def outlive_signals(holder: object) -> None:
    """Let no signal end this process between vLLM's shutdown and the end of `ending(holder)`."""
    core = sys.modules.get(CORE)
    if core is not None:
        core.signal = _signals  # type: ignore[attr-defined]
        _signals.hold(holder)


@contextlib.contextmanager
def ending(holder: object) -> Iterator[None]:
    """A block in which `holder` closes its tiers."""
    try:
        yield
    finally:
        _signals.release(holder)
