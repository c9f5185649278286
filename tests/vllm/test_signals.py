"""Signals that reach the engine's process while it handles one, and while it closes its tiers."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvstore.vllm.signals import CORE, ending, outlive_signals


class Holder:
    """Has tiers that must be closed in order."""


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Stands for vLLM's engine core; what handles signals stays as it was."""
    module = ModuleType(CORE)
    module.signal = signal  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CORE, module)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield module
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_amid_another_does_not_wait_for_what_that_holds(core: ModuleType) -> None:
    lock, handled, stuck = threading.Lock(), 0, 0

    def handler(number: int, frame: object) -> None:
        nonlocal handled, stuck
        if not lock.acquire(blocking=False):
            stuck += 1
            return
        handled += 1
        if handled == 1:
            signal.raise_signal(signal.SIGTERM)
        lock.release()

    handler.__module__ = CORE
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    holder = Holder()
    outlive_signals(holder)
    signal.raise_signal(signal.SIGINT)
    assert (handled, stuck) == (1, 0)
    # And one that comes later is handled as ever.
    signal.raise_signal(signal.SIGTERM)
    assert (handled, stuck) == (2, 0)
    with ending(holder):
        pass


def test_defaults_come_back_when_every_holder_is_closed(core: ModuleType) -> None:
    holders = [Holder(), Holder()]
    for each in holders:
        outlive_signals(each)
    core.signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for each in holders:
        with ending(each):
            # It would end this process.
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_others_are_left_alone(core: ModuleType) -> None:
    before = signal.getsignal(signal.SIGINT)
    holder = Holder()
    outlive_signals(holder)
    assert signal.getsignal(signal.SIGINT) is before
    with ending(holder):
        pass
