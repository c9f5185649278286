"""Blocking calls that nobody has to wait for in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["Daemons"]

_T = TypeVar("_T")


class Daemons(Executor):
    """Makes each call in a thread that cannot keep the process from ending.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(fn(*arguments, **named))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name=self._name, daemon=True).start()
        return future
