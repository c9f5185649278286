"""Match the calls that belong to one request of the server.

A request looks up its prompt, gets the chunks that are found and puts the rest. A caller may
name the request. Calls without a name are matched by their keys:

* lookups of the same keys are one request until its chunks are got, or more of them may be there;
* a get belongs to an answered lookup of the same prompt, complete or in part: one
  list of keys begins with the other, as ``get(keys[:resolved])`` does;
* a put belongs to a get or lookup of the same prompt, or continues where the get ended.

Two users that ask for the same prompt at the same time can be mistaken for each
other; as they use the same chunks, this does no harm.

For the policies, an unnamed request is over once it has got or stored every key that is
known of its prompt. The recording waits longer, as chunks of the answer may be put too.

Chunks fetched for a lookup are leased until they are got. An unnamed lookup may never
be followed by a get: its lease ends as soon as others wait for room and it
has not been repeated for `UNNAMED_SECONDS`.

This module is long because each kind of call is matched with those before it, in one table.
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
"""How long chunks are kept for an unnamed lookup that is not repeated, when others need room."""

ANEW_SECONDS = 2.0
"""After so long an unnamed lookup that lacks a chunk begins anew when it may get that by now."""

LINGER_SECONDS = 30.0
"""How long after its last call a request may still be continued."""

MOST_OPEN = 1024
"""Most open requests; beyond that the oldest are taken as ended."""

MOST_KEYS = 2**17
"""Most keys of all open requests together."""

MOST_ENDS = 8
"""Most requests that one step ends."""

MOST_LAPSES = 64
"""Most unnamed lookups that one step looks at."""

Record = Callable[[Sequence[Sequence[bytes]], float], None]


class Stage(enum.IntEnum):
    """The last call made for a request."""

    ASKED = 0
    HAD = 1
    STORED = 2


class Prompt:
    """A request of the server.

    Attributes:
        id: its id in the core.
        keys: the longest known part of its prompt.
        stage: see `Stage`.
        told: the answer to its last lookup; None while there is none.
        reach: number of leading keys that it has got or stored.
        since: time of its first call.
        used: time of its last call.
        busy: number of calls under way for it.
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
    """The open requests: see the module's text. Belongs to the loop that owns the core.

    Args:
        lease: seconds for which chunks are kept for a named lookup.
        record: told the keys of each request that has ended, by group, and when it began.
    """

    def __init__(self, core: Core, lease: float, record: Record | None = None) -> None:
        self._core = core
        self._record = record
        self._ending: Prompt | None = None
        self._now = 0.0
        if record is not None:
            core.on_prompt_end(self._over)
        self._lease = lease
        self._linger = max(LINGER_SECONDS, lease)
        self._numbers = itertools.count()
        self._open: OrderedDict[str, Prompt] = OrderedDict()
        """Open requests by id, in the order of their last calls."""
        self._keys = 0
        self._asked: dict[tuple[int, bytes], Prompt] = {}
        """Unnamed lookups whose chunks were not got yet, by number of keys and last key."""
        self._heads: dict[bytes, dict[str, Prompt]] = {}
        """Unnamed requests, by the first key of their prompts."""
        self._rests: dict[bytes, dict[str, Prompt]] = {}
        """Unnamed requests that have got or stored a part, by the first key after it."""
        self._leasing: OrderedDict[str, Prompt] = OrderedDict()
        """Unnamed lookups for which chunks are or may be kept, roughly by last use."""

    # -- calls -------------------------------------------------------------------------

    def waiting(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt | None:
        """Return the deferred request that looks up `keys`, if there is one.

        The cost does not depend on the number of keys, which are not checked again.
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
        """Return the request that looks up `keys`."""
        if request is not None:
            return self._named(request, keys, now)
        prompt = self._asked.get(place := (len(keys), keys[-1]))
        if prompt is not None and self._is_over(prompt, keys, now, polls=True):
            self.end(prompt)
            prompt = None
        if prompt is None:
            prompt = self._asked[place] = self._begin(keys, now)
        self._heard(prompt, now)
        return prompt

    def forget_lapsed(self, keys: Sequence[bytes], now: float) -> None:
        """End an unnamed lookup of `keys` whose chunks nobody has got, if they have left."""
        prompt = self._asked.get((len(keys), keys[-1]))
        if prompt is not None and self._is_over(prompt, keys, now, polls=False):
            self.end(prompt)

    def told(self, prompt: Prompt, answer: int | None) -> None:
        """Note that a lookup was answered, or deferred: its caller may not come back for it."""
        prompt.told = answer
        if not prompt.named and self._is_open(prompt):
            self._leasing[prompt.id] = prompt
            self._leasing.move_to_end(prompt.id)

    def getting(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt:
        """Return the request that gets `keys`."""
        if request is not None:
            return self._named(request, keys, now)
        prompt = self._asked.get((len(keys), keys[-1])) or self._answered(keys)
        if prompt is not None and self._is_over(prompt, keys, now, polls=False):
            self.end(prompt)
            prompt = None
        if prompt is None:
            prompt = self._begin(keys, now)
        self._no_lookup(prompt)
        self._show(prompt, 0, keys)
        prompt.stage = Stage.HAD
        self._heard(prompt, now)
        return prompt

    def had(self, prompt: Prompt, count: int) -> None:
        """Note that the request has got, or stored, its first `count` keys."""
        self._no_rest(prompt)
        prompt.reach = count
        # One that has ended is found by nobody.
        if not prompt.named and self._is_open(prompt) and count < len(prompt.keys):
            self._rests.setdefault(prompt.keys[count], {})[prompt.id] = prompt

    def storing(self, keys: Sequence[bytes], request: str | None, now: float) -> Prompt:
        """Return the request that puts `keys`."""
        if request is not None:
            return self._named(request, keys, now)
        prompt = self._continued(keys) or self._same(keys)
        if prompt is None:
            prompt = self._begin(keys, now)
        self._no_lookup(prompt)
        before = 0 if keys[0] == prompt.keys[0] else prompt.reach
        self._show(prompt, before, keys)
        prompt.stage = Stage.STORED
        self.had(prompt, max(prompt.reach, before + len(keys)))
        self._heard(prompt, now)
        return prompt

    # -- ends --------------------------------------------------------------------------

    def end(self, prompt: Prompt) -> None:
        """End a request, or one whose call was cancelled: chunks fetched for it may leave."""
        if self._is_open(prompt):
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

    def give_up(self, prompt: Prompt) -> None:
        """End a request of which a call was cancelled, unless another call of it is under way."""
        if prompt.named or prompt.busy <= 1:
            self.end(prompt)

    def release(self, request: str) -> None:
        """End the request of this name."""
        if (prompt := self._open.get(request)) is not None:
            self.end(prompt)
        else:
            self._core.on_request_finished(request)

    def returned(self, prompt: Prompt) -> None:
        """Note that a call that made the request `busy` has ended."""
        prompt.busy -= 1
        if prompt.busy:
            return
        if not self._is_open(prompt):
            # It had ended before.
            self.end(prompt)
        elif not prompt.named and prompt.reach >= len(prompt.keys):
            if self._record is None:
                self.end(prompt)
            else:
                self._finish(prompt)

    def given_up(self, prompt: Prompt) -> None:
        """Note that a wait of the request was cancelled: an unnamed one will not ask again."""
        prompt.busy -= 1
        if not prompt.busy and not prompt.named and prompt.stage is Stage.ASKED:
            self.end(prompt)

    def end_all(self) -> None:
        """End all requests."""
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
        """End the leases of lookups whose last call was at `silent` or before."""
        leasing = self._leasing
        for _ in range(min(MOST_LAPSES, len(leasing))):
            prompt = next(iter(leasing.values()))
            if prompt.used > silent:
                break
            if prompt.busy or self._core.is_waiting(prompt.id):
                # It has a place in the queue, and will be answered.
                leasing.move_to_end(prompt.id)
            else:
                del leasing[prompt.id]
                self._core.lapse(prompt.id)

    def _end_oldest(self, now: float) -> bool:
        """End the least recently used request if it is time; returns whether to look further."""
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
            # A request that waits or has a name is not ended because there are many.
            self._open.move_to_end(prompt.id)
        return True

    # -- inside ------------------------------------------------------------------------

    def _is_over(self, prompt: Prompt, keys: Sequence[bytes], now: float, *, polls: bool) -> bool:
        """Whether an unnamed lookup that has waited has to begin anew, to get a chunk it lacks.

        Args:
            polls: whether the call comes again and again, and has to get an answer in the end.
        """
        if prompt.busy or self._core.is_waiting(prompt.id):
            return False
        chunks, told = self._core.chunks, prompt.told
        lacking = next((n for n, key in enumerate(keys) if key not in chunks), len(keys))
        if lacking == len(keys):
            return False
        if told is None:
            lapsed = prompt.id not in self._leasing or now - prompt.used >= self._lease
            over = lapsed and not polls
        else:
            # What was found has left since, or more may be there by now.
            over = lacking < told or (polls and now - prompt.since >= ANEW_SECONDS)
        return over and self._core.may_come(keys[lacking])

    def _named(self, request: str, keys: Sequence[bytes], now: float) -> Prompt:
        prompt = self._open.get(request)
        if prompt is None:
            # Its calls need not be found by their keys.
            prompt = self._open[request] = Prompt(request, (), now, named=True)
        self._heard(prompt, now)
        return prompt

    def _begin(self, keys: Sequence[bytes], now: float) -> Prompt:
        # An id that no caller would choose.
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
        """Return the answered lookup of the prompt whose keys are got."""
        found = [
            prompt
            for prompt in self._heads.get(keys[0], {}).values()
            if prompt.stage is Stage.ASKED and prompt.told is not None and _agree(prompt.keys, keys)
        ]
        return max(found, key=lambda prompt: prompt.told == len(keys), default=None)

    def _continued(self, keys: Sequence[bytes]) -> Prompt | None:
        """Return the request whose get or put ended where `keys` begin."""
        for prompt in self._rests.get(keys[0], {}).values():
            if _agree(prompt.keys, keys, prompt.reach):
                return prompt
        return None

    def _same(self, keys: Sequence[bytes]) -> Prompt | None:
        """Return the request of the same prompt that has stored less of it."""
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

    def _is_open(self, prompt: Prompt) -> bool:
        return self._open.get(prompt.id) is prompt

    def _finish(self, prompt: Prompt) -> None:
        self._ending = prompt
        self._core.on_request_finished(prompt.id)
        self._ending = None

    def _over(self, chains: Sequence[Sequence[bytes]]) -> None:
        """Take the keys of a request that the core has ended."""
        prompt = self._ending
        if prompt is None:
            # The core ended it by itself, as it had too many requests.
            assert self._record is not None
            self._record(chains, self._now)
            return
        for chain in chains:
            whole = prompt.chains.setdefault(group_of(chain[0]), [])
            known = set(whole)
            whole += [key for key in chain if key not in known]

    def _show(self, prompt: Prompt, start: int, keys: Sequence[bytes]) -> None:
        """Note that `keys` are the keys of its prompt from `start` on."""
        more = start + len(keys) - len(prompt.keys)
        if more > 0:
            self._no_rest(prompt)
            prompt.keys = [*prompt.keys[:start], *keys]
            if self._is_open(prompt):
                self._keys += more

    def _no_rest(self, prompt: Prompt) -> None:
        if prompt.reach < len(prompt.keys):
            _take_out(self._rests, prompt.keys[prompt.reach], prompt)


def _agree(one: Sequence[bytes], other: Sequence[bytes], start: int = 0) -> bool:
    """Whether `one` from `start` on and `other` begin alike; a key implies all keys before it."""
    last = min(len(one) - start, len(other)) - 1
    return last >= 0 and one[start + last] == other[last]


def _take_out(table: dict[bytes, dict[str, Prompt]], key: bytes, prompt: Prompt) -> None:
    if (found := table.get(key)) is not None:
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
        """Note that `prompt` has prepared `keys`."""
        for key in keys:
            self._shares.setdefault(key, []).append((prompt, era))
            prompt.busy += 1

    def take(self, keys: Iterable[bytes]) -> tuple[list[Share], list[bytes]]:
        """Take `keys`, grouped by the prompts that prepared them; also returns unknown keys."""
        found: dict[tuple[str, int], Share] = {}
        stray: list[bytes] = []
        for key in keys:
            if (shares := self._shares.get(key)) is None:
                stray.append(key)
                continue
            prompt, era = shares.pop(0)
            if not shares:
                del self._shares[key]
            found.setdefault((prompt.id, era), Share(prompt, era)).keys.append(key)
        return list(found.values()), stray
