"""Jobs: commands on many chunks, done a batch at a time while the store serves.

A job calls the core with at most `BATCH` keys at once, each time in a step of its own, so that no
step of the server becomes long. It ends when the last batch has taken effect, not when it was
handed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from kvstore.core import Core
from kvstore.errors import KVStoreError
from kvstore.types import about

__all__ = [
    "ACTIONS",
    "Act",
    "Action",
    "Changing",
    "Demote",
    "Job",
    "Prefetch",
    "Reencrypt",
    "Reset",
]

logger = logging.getLogger("kvstore")

BATCH = 128
"""Most keys of one call of the core."""

LOOK_SECONDS = 0.02
"""How often a job looks whether its batch has taken effect."""

IN_HOST, NOWHERE = "host", "nowhere"

_T = TypeVar("_T")


class Act(Protocol):
    """Makes a call on the core, with the time, in a step; returns what it returns.

    Raises:
        KVStoreError: if the store is closed.
    """

    def __call__(self, call: Callable[[Core, float], _T]) -> Awaitable[_T]: ...


class Action(ABC):
    """What one kind of job does, a batch of keys after the other.

    Attributes:
        affected: keys on which it has had an effect.
        failures: what it has failed with, in number and in words.
        uncleared: the tiers that it should have cleared and could not.
    """

    batch = BATCH
    affected = failures = 0
    failure = ""
    uncleared: Sequence[str] = ()

    @abstractmethod
    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        """Begin with the next batch."""

    def ended(self, core: Core) -> bool:
        """Whether the last batch has taken effect."""
        return True

    def cancel(self, core: Core) -> None:  # noqa: B027
        """Undo what has not taken effect of the last batch."""

    @property
    def fault(self) -> str | None:
        """What went wrong, if anything has."""
        if self.uncleared:
            return f"{', '.join(self.uncleared)} cannot be cleared now, which is tried again"
        return f"{self.failures} {self.failure}" if self.failures else None


class Prefetch(Action):
    """Fetch chunks to host memory: as many as are on a tier, half of host memory at a time."""

    failure = "chunks could not be read, or found no room in host memory"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._waiting: list[bytes] = []
        self._fetching: list[bytes] = []

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        where = {key: core.places(key) for key in keys}
        here = [key for key, places in where.items() if IN_HOST in places]
        # These stay, if they were to leave.
        core.prefetch(here, prefix=False)
        self._waiting = [key for key in keys if where[key] and IN_HOST not in where[key]]
        self._fetching = []

    def ended(self, core: Core) -> bool:
        if core.is_prefetching(self._fetching):
            return False
        came = sum(IN_HOST in core.places(key) for key in self._fetching)
        self.affected += came
        self.failures += len(self._fetching) - came
        self._fetching = []
        if self._waiting:
            others = core.is_prefetching()
            core.prefetch(self._waiting, prefix=False)
            taken = {
                key
                for key in self._waiting
                if IN_HOST in core.places(key) or core.is_prefetching((key,))
            }
            self._fetching = [key for key in self._waiting if key in taken]
            self._waiting = [key for key in self._waiting if key not in taken]
            if not taken and not others:
                # Their tier does not answer, or they have left it.
                self.failures += len(self._waiting)
                self._waiting = []
        return not (self._waiting or self._fetching)

    def cancel(self, core: Core) -> None:
        core.stop_prefetch(self._fetching)


class Retain(Action):
    """Protect chunks from eviction for ``seconds``, in host memory too unless ``host`` is false."""

    failure = "chunks are beyond pinned_share and are not retained"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._seconds = float(body["seconds"])
        self._host = bool(body.get("host", True))

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        pinned = core.pin(keys, now + self._seconds, host=self._host)
        self.failures += len(keys) - pinned
        self.affected += pinned


class Release(Action):
    """End the protection of chunks; unless ``cold`` is false, they are the first to leave."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._cold = bool(body.get("cold", True))

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        self.affected += core.unpin(keys, cold=self._cold)


class Demote(Action):
    """Let chunks leave host memory as soon as a slower tier has them."""

    failure = "chunks stay in host memory: used meanwhile, retained, or on no slower tier"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._leaving: list[bytes] = []

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        self._leaving = [key for key in keys if IN_HOST in core.places(key)]
        core.demote(self._leaving, now)

    def ended(self, core: Core) -> bool:
        if core.is_demoting(self._leaving):
            return False
        stayed = sum(IN_HOST in core.places(key) for key in self._leaving)
        self.affected += len(self._leaving) - stayed
        self.failures += stayed
        return True

    def cancel(self, core: Core) -> None:
        core.stop_demotion(self._leaving)


class Remove(Action):
    """Remove chunks from host memory and from every tier of this process, durably."""

    # All records of a tier are read for each batch.
    batch = 1024
    failure = "records could not be erased: a later process may find them"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._removal: Any = None
        self._era = 0

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        self._removal, self._era = core.remove(keys), core.era
        self.affected += self._removal.found

    def ended(self, core: Core) -> bool:
        if not self._removal.done:
            return False
        if core.era != self._era:
            # A reset has taken it over, or came before this was looked at.
            if core.clearing:
                return False
            self.uncleared = core.uncleared
        self.failures += len(self._removal.unerased)
        return True


ACTIONS: dict[str, Callable[[Mapping[str, Any]], Action]] = {
    "prefetch": Prefetch,
    "retain": Retain,
    "release": Release,
    "demote": Demote,
    "remove": Remove,
}
"""The commands on chunks."""


class Reset(Action):
    """Forget everything, on every tier, durably.

    Args:
        reset: the server's own way to do it.
    """

    def __init__(self, reset: Callable[[], None]) -> None:
        self._reset = reset

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        self._reset()

    def ended(self, core: Core) -> bool:
        self.uncleared = core.uncleared
        return not core.clearing


class Changing(Action):
    """Change settings, and wait until policies and sizes are as they were asked to be."""

    def __init__(self, change: Callable[[Core], None]) -> None:
        self._change = change

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        self._change(core)

    def ended(self, core: Core) -> bool:
        # What is rewritten meanwhile may take hours.
        return core.changing <= core.rewrites


class Reencrypt(Action):
    """Copy the chunks of segments, so that they are encrypted with the newest keys.

    Args:
        segments: those of each tier, by its number.
    """

    failure = (
        "segments could not be copied: chunks in them are left under older keys, which are still "
        "needed"
    )

    def __init__(self, segments: Mapping[int, Sequence[int]]) -> None:
        self._segments = segments

    def begin(self, keys: list[bytes], core: Core, now: float) -> None:
        for tier, its in self._segments.items():
            core.rewrite(tier, its)

    def ended(self, core: Core) -> bool:
        self.failures = core.unrewritten
        return not core.rewrites

    def cancel(self, core: Core) -> None:
        for tier in self._segments:
            core.rewrite(tier, ())


class Job:
    """One command under way: see the module's text.

    Attributes:
        number: its name. command: what was asked for. keys: how many keys it is about.
        done: keys that were dealt with. affected: keys on which it has had an effect.
        state: running, done, cancelled or failed.
    """

    def __init__(self, number: int, command: str, keys: int) -> None:
        self.number = number
        self.command = command
        self.keys = keys
        self.done = self.affected = 0
        self.state = "running"
        self._error: str | None = None
        self._left = 0
        self._cancelled = False
        self._began = time.monotonic()
        self._seconds = 0.0
        self.ended = asyncio.Event()

    def cancel(self) -> None:
        """End it soon. What it has done stays done."""
        self._cancelled = True

    def told(self) -> dict[str, Any]:
        """Return what is known of it, for JSON."""
        running = self.state == "running"
        return {
            "job": self.number,
            "command": self.command,
            "state": self.state,
            "keys": self.keys,
            "done": self.done,
            "affected": self.affected,
            "left": self._left,
            "seconds": round(time.monotonic() - self._began if running else self._seconds, 3),
            "error": self._error,
        }

    async def run(self, act: Act, action: Action, keys: Sequence[bytes]) -> None:
        """Do it. Never raises, except when it is cancelled as a task."""
        try:
            await self._run(act, action, keys)
        except KVStoreError as error:
            self.state, self._error = "failed", str(error)
        except Exception as error:
            self.state, self._error = "failed", repr(error)
            logger.exception("a control job failed", extra=about("control.failed"))
        finally:
            if self.state == "running":
                self.state, self._error = "failed", "the store is being closed"
            self._seconds = time.monotonic() - self._began
            self.affected = action.affected
            self.ended.set()
            logger.info(
                "kvstore: control: %s of %d keys: %s, %d affected, in %.2f s%s",
                self.command,
                self.keys,
                self.state,
                self.affected,
                self._seconds,
                f" ({self._error})" if self._error else "",
                extra=about("control.ended", command=self.command, state=self.state),
            )

    async def _run(self, act: Act, action: Action, keys: Sequence[bytes]) -> None:
        size = action.batch
        for at in range(0, max(1, len(keys)), size):
            some = list(keys[at : at + size])
            await act(partial(action.begin, some))
            while True:
                ended, self._left = await act(lambda core, now: (action.ended(core), core.changing))
                self.affected = action.affected
                if ended or self._cancelled:
                    break
                await asyncio.sleep(LOOK_SECONDS)
            if ended:
                self.done += len(some)
            if self._cancelled and not (ended and at + size >= len(keys)):
                await act(lambda core, now: action.cancel(core))
                self.state = "cancelled"
                return
        self._error = action.fault
        self.state = "failed" if self._error else "done"


async def places(act: Act, keys: Sequence[bytes]) -> dict[str, int]:
    """Count how many of `keys` are in each place; a key may be in several."""
    counted: Counter[str] = Counter()
    for at in range(0, len(keys), BATCH):
        batch = keys[at : at + BATCH]
        found = await act(partial(_places, batch))
        for there in found:
            counted.update(there or (NOWHERE,))
    return dict(counted)


def _places(keys: Sequence[bytes], core: Core, now: float) -> list[list[str]]:
    return list(map(core.places, keys))
