"""Signals: the engine's process outlives those that come while its tiers are being closed.

vLLM gives SIGTERM and SIGINT their defaults back before it shuts its connectors down. Ctrl-C
reaches server and engine alike, and then the server sends the engine SIGTERM just in between: the
engine would die with chunks that are not copied. vLLM's server still kills it after
``--shutdown-timeout``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["ending", "outlive_signals"]

CORE = "vllm.v1.engine.core"
"""The module of vLLM whose engine process this is about."""


class _Signals:
    """Stands for the module `signal` in vLLM's: defaults wait until every holder is closed."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._owed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        if handler is signal.SIG_DFL and self._holders:
            self._owed.add(number)
            handler = _pass_over
        return signal.signal(number, handler)

    def hold(self, holder: object) -> None:
        self._holders.add(holder)

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
