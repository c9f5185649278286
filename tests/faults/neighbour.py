"""Another process that uses a cache, and can be killed, stopped or made to kill itself.

Processes are forked from one that has everything imported already, so that
hundreds of them can live and die in a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore.tiers.disk.io import IORequest
from tests.faults.support import Caller, calling
from tests.patience import PATIENCE

__all__ = ["Neighbour", "strike"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kvstore", "kvstore.maintenance.offline", "tests.faults.support"])


def strike(targets: str, when: str, count: int, number: int) -> None:
    """Patch functions so that the `count`-th call of any of them sends `number` to this process.

    Args:
        targets: ``module:name`` or ``module:Class.name``, several with a space in between. With
            ``?load=True`` or ``?load=False`` at its end, only the calls that move this way count.
        when: "before" it, "after" it, or "half" way: the last argument that is
            bytes, a list of buffers or of runs is halved, and then comes the signal.
    """
    calls = itertools.count(1)
    for target in targets.split():
        place, _, way = target.partition("?")
        module, _, path = place.partition(":")
        *holders, name = path.split(".")
        holder: Any = importlib.import_module(module)
        for part in holders:
            holder = getattr(holder, part)
        works = getattr(holder, name)
        setattr(holder, name, _striking(works, way, calls, when, count, number))


def _striking(
    works: Callable[..., Any], way: str, calls: Iterator[int], when: str, count: int, number: int
) -> Callable[..., Any]:
    def patched(*arguments: Any, **named: Any) -> Any:
        if (way and way != _way(arguments, named)) or next(calls) != count:
            return works(*arguments, **named)
        if when == "half":
            works(*_halved(arguments), **named)
        if when == "after":
            result = works(*arguments, **named)
            os.kill(os.getpid(), number)
            return result
        os.kill(os.getpid(), number)
        return works(*arguments, **named)

    return patched


def _way(arguments: Sequence[Any], named: dict[str, Any]) -> str:
    """Which way a call of a backend moves, or one of what it has under way."""
    return f"load={named['load'] if 'load' in named else arguments[0]._load}"


def _halved(arguments: Sequence[Any]) -> list[Any]:
    halved = list(arguments)
    for index in reversed(range(len(halved))):
        if isinstance(halved[index], (bytes, list)) and len(halved[index]) > 1:
            halved[index] = halved[index][: len(halved[index]) // 2]
            break
        if isinstance(halved[index], (bytes, list)) and halved[index]:
            (whole,) = halved[index]
            halved[index] = [_half(whole)]
            break
    return halved


def _half(whole: Any) -> Any:
    if isinstance(whole, IORequest):
        return whole._replace(buffers=_halved([list(whole.buffers)])[0])
    return whole[: len(whole) // 2]


class Neighbour:
    """A process that runs `work` with a connection to this one.

    Args:
        work: a function of this package, called with the connection and `arguments`.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(work, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def heard(self) -> list[Any]:
        """All that it said and that was not heard yet."""
        said = []
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                said.append(self.connection.recv())
        return said

    def hear(self) -> Any:
        """Wait for its next word."""
        assert self.connection.poll(PATIENCE), "the other process says nothing"
        return self.connection.recv()

    def ask(self, *question: Any) -> Any:
        """Send a question and wait for the answer."""
        self.connection.send(question)
        return self.hear()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        """Wait until it stands still, whoever stopped it."""
        end = time.monotonic() + PATIENCE
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "it does not stop"
            time.sleep(0.005)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(PATIENCE)
        self.connection.close()

    def until_dead(self) -> int:
        """Wait until it has ended; returns the signal that killed it, or 0."""
        self._process.join(PATIENCE)
        status = self._process.exitcode
        assert status is not None, "it does not end"
        return max(0, -status)


def _run(work: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    logging.disable(logging.CRITICAL)
    work(connection, *arguments)


def serve(connection: Connection, path: Path, changes: dict[str, Any]) -> None:
    """Keep a store open and answer questions about it until told to end.

    A question is the name of a method of `Caller` and its arguments, or one of
    "forget" (host memory), "strike" (see there), "tier" (the statistics of one) and "end".
    """

    async def answer(caller: Caller, what: str, *arguments: Any) -> Any:
        if what == "forget":
            caller.forget_host()
        elif what == "strike":
            strike(*arguments)
        elif what == "tier":
            caller.asked()
            return caller.stats.tiers[arguments[0]]
        else:
            return await getattr(caller, what)(*arguments)
        return None

    async def main() -> None:
        async with calling(path, **changes) as caller:
            connection.send("ready")
            while True:
                question = await asyncio.to_thread(connection.recv)
                if question[0] == "end":
                    return
                try:
                    connection.send(await answer(caller, *question))
                except Exception as error:
                    connection.send(repr(error))

    asyncio.run(main())
