"""Which calls belong to one request of the server.

A request looks its prompt up, gets what is there and puts the rest. A caller may name
the request. Calls without a name are put together by their keys:

* lookups of the same keys are one request until its chunks are got;
* a get belongs to an answered lookup of the same prompt, whole or in part: one
  list of keys begins with the other, as ``get(keys[:resolved])`` does;
* a put belongs to a get or lookup of the same prompt, or goes on where the get ended.

Two users that ask for the same prompt at the same time can be taken for each
other; as they use the same chunks, nothing is lost by that.

For the policies, a request without a name is over once it has had or stored all that is
known of its prompt. The recording waits a while longer: its answer may be put too.

What was fetched for a lookup is leased until it is got. Without a name nobody
promises to come back: such leases end as soon as others wait for room and nobody
has asked for `UNNAMED_SECONDS`.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core import Core
from kvstore.types import group_of

__all__ = ["Prompt", "Prompts", "Share", "UnderWay"]

UNNAMED_SECONDS = 0.25
"""How long chunks are kept from others for a lookup without a name that is not repeated."""

LINGER_SECONDS = 30.0
"""How long a request of which nothing is heard may still go on."""

MOST_OPEN = 1024
"""Requests that may go on; beyond that the oldest are taken for ended."""

MOST_KEYS = 2**17
"""Keys of all of them together."""

MOST_ENDS = 8
"""Requests that one step ends."""

MOST_LAPSES = 64
"""Lookups without a name that one step looks at."""


Record = Callable[[Sequence[Sequence[bytes]], float], None]


class Stage(enum.IntEnum):
    """What the last call for a request did."""

    ASKED = 0
    HAD = 1
    STORED = 2


class Prompt:
    """A request of the server.

    Attributes:
        id: its name in the core.
        keys: the longest part of its prompt that was shown.
        stage: see `Stage`.
        told: the answer to its last lookup; None while there is none.
        reach: leading keys that it has had or stored.
        since: when it was first heard of.
        used: when it was last heard of.
        busy: calls that run for it.
        chains: its keys that are finished and not recorded yet, by group.
    """

    __slots__ = ("busy", "chains", "id", "keys", "named", "reach", "since", "stage", "told", "used")

    def __init__(self, name: str, keys: Sequence[bytes], now: float, *, named: bool) -> None:
        self.id = name
        self.named = named
        self.keys = keys
        self.stage = Stage.ASKED
        self.told: int | None = None
        self.reach = 0
        self.since = self.used = now
        self.busy = 0
        self.chains: dict[bytes, list[bytes]] = {}


class Prompts:
    """See the module's text. Belongs to the loop that owns the core.

    Args:
        lease: seconds for which a named lookup is kept for.
        record: told the keys of each request that has ended, by group, and when it began.
    """

    def __init__(self, core: Core, lease: float, record: Record | None = None) -> None:
        self._core = core
        self._record = record
        self._ending: Prompt | None = None
        self._now = 0.0
        if record is not None:
            core.on_prompt_end(self._over)
        self._linger = max(LINGER_SECONDS, lease)
        self._numbers = itertools.count()
        self._open: OrderedDict[str, Prompt] = OrderedDict()
        """By name, in the order in which they were last heard of."""
        self._keys = 0
        self._asked: dict[tuple[int, bytes], Prompt] = {}
        """Lookups without a name that nobody has got, by the number of keys and the last."""
        self._heads: dict[bytes, dict[str, Prompt]] = {}
        """Requests without a name, by the first key of their prompts."""
        self._rests: dict[bytes, dict[str, Prompt]] = {}
        """Those whose chunks were got, by the first key that was not there."""
        self._leasing: OrderedDict[str, Prompt] = OrderedDict()
        """Lookups without a name for which chunks are or may be kept, roughly by last use."""

    # -- calls -------------------------------------------------------------------------

    def waiting(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt | None:
        """The request that looks `keys` up and is deferred, if there is one.

        To ask again for what is being fetched is the same work for any number of keys, which
        are not checked once more.
        """
        if not (type(keys) is list and keys and type(keys[0]) is type(keys[-1]) is bytes):
            return None
        if request is None:
            prompt = self._asked.get((len(keys), keys[-1]))
        else:
            prompt = self._open.get(request) if isinstance(request, str) else None
        if prompt is None or not self._core.is_waiting(prompt.id):
            return None
        self._heard(prompt, now)
        return prompt

    def asking(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt:
        """The request that looks `keys` up."""
        if request is not None:
            return self._named(request, keys, now)
        place = (len(keys), keys[-1])
        prompt = self._asked.get(place)
        if prompt is None:
            prompt = self._asked[place] = self._begin(keys, now)
        self._heard(prompt, now)
        return prompt

    def told(self, prompt: Prompt, answer: int | None) -> None:
        """A lookup was answered, or deferred: then its answer may find nobody."""
        prompt.told = answer
        if not prompt.named:
            self._leasing[prompt.id] = prompt
            self._leasing.move_to_end(prompt.id)

    def getting(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt:
        """The request that gets `keys`."""
        if request is not None:
            return self._named(request, keys, now)
        prompt = self._asked.get((len(keys), keys[-1])) or self._answered(keys)
        if prompt is None:
            prompt = self._begin(keys, now)
        self._no_lookup(prompt)
        self._show(prompt, 0, keys)
        prompt.stage = Stage.HAD
        self._heard(prompt, now)
        return prompt

    def had(self, prompt: Prompt, count: int) -> None:
        """It was given the first `count` keys."""
        self._reached(prompt, count)

    def storing(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt:
        """The request that puts `keys`; to be followed by `stored`."""
        if request is not None:
            return self._named(request, keys, now)
        prompt = self._continued(keys) or self._same(keys)
        if prompt is None:
            prompt = self._begin(keys, now)
        self._no_lookup(prompt)
        before = 0 if keys[0] == prompt.keys[0] else prompt.reach
        self._show(prompt, before, keys)
        prompt.stage = Stage.STORED
        self._reached(prompt, max(prompt.reach, before + len(keys)))
        self._heard(prompt, now)
        return prompt

    # -- ends --------------------------------------------------------------------------

    def end(self, prompt: Prompt) -> None:
        """The request has ended, or its call was cancelled: what was fetched for it may leave."""
        if self._open.get(prompt.id) is prompt:
            del self._open[prompt.id]
            self._keys -= len(prompt.keys)
            self._no_lookup(prompt)
            self._no_rest(prompt)
            if not prompt.named:
                _take_out(self._heads, prompt.keys[0], prompt)
        if not prompt.named or prompt.id not in self._open:
            self._finish(prompt)
        if prompt.chains and self._record is not None:
            self._record(list(prompt.chains.values()), prompt.since)
            prompt.chains = {}

    def release(self, request: str) -> None:
        """The request of this name has ended."""
        prompt = self._open.get(request)
        if prompt is not None:
            self.end(prompt)
        else:
            self._core.on_request_finished(request)

    def returned(self, prompt: Prompt) -> None:
        """A call that made the request `busy` has ended."""
        prompt.busy -= 1
        if prompt.busy:
            return
        if self._open.get(prompt.id) is not prompt:
            # It had ended before.
            self.end(prompt)
        elif not prompt.named and prompt.reach >= len(prompt.keys):
            if self._record is None:
                self.end(prompt)
            else:
                self._finish(prompt)

    def given_up(self, prompt: Prompt) -> None:
        """A wait that made the request `busy` was cancelled: without a name nobody asks again."""
        prompt.busy -= 1
        if not prompt.busy and not prompt.named and prompt.stage is Stage.ASKED:
            self.end(prompt)

    def end_all(self) -> None:
        """No more calls come."""
        for prompt in list(self._open.values()):
            self.end(prompt)

    def expire(self, now: float, *, crowded: bool) -> None:
        """End requests that were not heard of for too long.

        Args:
            crowded: whether others wait for room.
        """
        self._now = now
        if crowded:
            self._lapse_silent(now - UNNAMED_SECONDS)
        for _ in range(MOST_ENDS):
            if not self._end_oldest(now):
                break

    def _lapse_silent(self, silent: float) -> None:
        """Let go of what is kept for lookups that were last heard of at `silent` or before."""
        leasing = self._leasing
        for _ in range(min(MOST_LAPSES, len(leasing))):
            prompt = next(iter(leasing.values()))
            if prompt.used > silent:
                break
            if prompt.busy or self._core.is_waiting(prompt.id):
                # It has a place in the queue, and its answer comes.
                leasing.move_to_end(prompt.id)
            else:
                del leasing[prompt.id]
                self._core.lapse(prompt.id)

    def _end_oldest(self, now: float) -> bool:
        """End the request that was heard of longest ago, if it is time; whether to look further."""
        if not self._open:
            return False
        prompt = next(iter(self._open.values()))
        idle = prompt.used <= now - self._linger
        if not idle and len(self._open) <= MOST_OPEN and self._keys <= MOST_KEYS:
            return False
        if prompt.busy:
            self._heard(prompt, now)
        elif idle or not (prompt.named or self._core.is_waiting(prompt.id)):
            self.end(prompt)
        else:
            # Who waits, or has a name, is not ended because there are many.
            self._open.move_to_end(prompt.id)
        return True

    # -- inside ------------------------------------------------------------------------

    def _named(self, request: str, keys: Sequence[bytes], now: float) -> Prompt:
        prompt = self._open.get(request)
        if prompt is None:
            # Its calls need not be found by their keys.
            prompt = self._open[request] = Prompt(request, (), now, named=True)
        self._heard(prompt, now)
        return prompt

    def _begin(self, keys: Sequence[bytes], now: float) -> Prompt:
        # No name that a caller would choose.
        prompt = Prompt(f"\0{next(self._numbers)}", list(keys), now, named=False)
        self._open[prompt.id] = prompt
        self._heads.setdefault(keys[0], {})[prompt.id] = prompt
        self._keys += len(keys)
        return prompt

    def _heard(self, prompt: Prompt, now: float) -> None:
        prompt.used = now
        if prompt.id in self._open:
            self._open.move_to_end(prompt.id)

    def _no_lookup(self, prompt: Prompt) -> None:
        self._leasing.pop(prompt.id, None)
        if prompt.stage is Stage.ASKED and not prompt.named:
            place = (len(prompt.keys), prompt.keys[-1])
            if self._asked.get(place) is prompt:
                del self._asked[place]

    def _answered(self, keys: Sequence[bytes]) -> Prompt | None:
        """The answered lookup of the prompt of which a part is got."""
        found: Prompt | None = None
        for prompt in self._heads.get(keys[0], {}).values():
            if (
                prompt.stage is Stage.ASKED
                and prompt.told is not None
                and _agree(prompt.keys, keys)
                and (found is None or prompt.told == len(keys))
            ):
                found = prompt
                if prompt.told == len(keys):
                    break
        return found

    def _continued(self, keys: Sequence[bytes]) -> Prompt | None:
        """The request whose get or put ended where `keys` begin."""
        for prompt in self._rests.get(keys[0], {}).values():
            if _agree(prompt.keys, keys, prompt.reach):
                return prompt
        return None

    def _same(self, keys: Sequence[bytes]) -> Prompt | None:
        """The request of the same prompt that has stored less of it."""
        found, best = None, (0, False)
        for prompt in self._heads.get(keys[0], {}).values():
            fresh = prompt.stage is not Stage.STORED
            if fresh:
                if prompt.stage is Stage.ASKED and prompt.told is None:
                    continue
            elif prompt.busy or len(keys) <= prompt.reach:
                continue
            worth = (min(len(prompt.keys), len(keys)), fresh)
            if worth > best and _agree(prompt.keys, keys):
                found, best = prompt, worth
        return found

    def _finish(self, prompt: Prompt) -> None:
        self._ending = prompt
        self._core.on_request_finished(prompt.id)
        self._ending = None

    def _over(self, chains: Sequence[Sequence[bytes]]) -> None:
        """The core is done with the keys of a request."""
        prompt = self._ending
        if prompt is None:
            # The core ended it by itself, as it remembers too many.
            assert self._record is not None
            self._record(chains, self._now)
            return
        for chain in chains:
            whole = prompt.chains.setdefault(group_of(chain[0]), [])
            known = set(whole)
            whole += [key for key in chain if key not in known]

    def _show(self, prompt: Prompt, start: int, keys: Sequence[bytes]) -> None:
        """From `start` on, `keys` are those of its prompt."""
        more = start + len(keys) - len(prompt.keys)
        if more > 0:
            self._no_rest(prompt)
            prompt.keys = [*prompt.keys[:start], *keys]
            self._keys += more

    def _reached(self, prompt: Prompt, count: int) -> None:
        self._no_rest(prompt)
        prompt.reach = count
        if not prompt.named and count < len(prompt.keys):
            self._rests.setdefault(prompt.keys[count], {})[prompt.id] = prompt

    def _no_rest(self, prompt: Prompt) -> None:
        if prompt.reach < len(prompt.keys):
            _take_out(self._rests, prompt.keys[prompt.reach], prompt)


def _agree(one: Sequence[bytes], other: Sequence[bytes], start: int = 0) -> bool:
    """Whether `one` from `start` on and `other` begin alike; a key tells all that is before it."""
    last = min(len(one) - start, len(other)) - 1
    return last >= 0 and one[start + last] == other[last]


def _take_out(table: dict[bytes, dict[str, Prompt]], key: bytes, prompt: Prompt) -> None:
    found = table.get(key)
    if found is not None:
        found.pop(prompt.id, None)
        if not found:
            del table[key]


@dataclass(slots=True)
class Share:
    """Keys that one prompt has prepared in one era of the core."""

    prompt: Prompt
    era: int
    keys: list[bytes] = field(default_factory=list)


class UnderWay:
    """Loads, or stores, that were prepared and are not complete.

    A key that was prepared several times is completed in that order.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, list[tuple[Prompt, int]]] = {}

    def add(self, keys: Iterable[bytes], prompt: Prompt, era: int) -> None:
        """`prompt` has prepared `keys`."""
        for key in keys:
            self._shares.setdefault(key, []).append((prompt, era))
            prompt.busy += 1

    def take(self, keys: Iterable[bytes]) -> tuple[list[Share], list[bytes]]:
        """Whose `keys` are, and those that nobody has prepared."""
        found: dict[tuple[str, int], Share] = {}
        stray: list[bytes] = []
        for key in keys:
            shares = self._shares.get(key)
            if shares is None:
                stray.append(key)
                continue
            prompt, era = shares.pop(0)
            if not shares:
                del self._shares[key]
            found.setdefault((prompt.id, era), Share(prompt, era)).keys.append(key)
        return list(found.values()), stray
