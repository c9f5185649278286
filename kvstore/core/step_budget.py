"""Step budget: bound the work of one step, so that no caller waits long for its end.

`Pace` is the most that one step does; `Budget` counts what is left of it. The rest is done
in the following steps: nothing is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KEYS_PER_CHANGE", "NEWS_PER_CHUNK", "STORED", "UNBOUNDED", "Budget", "Pace"]

STORED = 3.0
"""The cost of storing a chunk, in keys that are looked up; loading one costs as much as one
key."""

NEWS_PER_CHUNK = 4
"""Changes of another process's tier that cost as much as one chunk of a completed move."""

KEYS_PER_CHANGE = 0.75
"""The cost of taking in a change, in keys that are looked up."""

LEAST_SHARE = 0.15
"""The least share of a step's own work that is done, however much callers want."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The work of one step, in chunks.

    The work that callers want is done at once. The more they want, the less other work is done in
    the same step: only a share of `told`, `granted`, `linked` and `copied`. These, the chunks given
    up ahead and `questions` are also divided by the `effort` of the policy.

    Attributes:
        asked: keys that are looked up; after that many, further requests are answered "ask
            again" without a lookup, except the one that was turned away the longest ago. Requests
            that wait in the queue cost nothing and do not count.
        told: keys of loads that the policies are told of; more when many were not told yet.
        granted: chunks that are leased or fetched for requests in the queue.
        linked: keys of requests that begin to wait whose order the policies learn.
        absorbed: chunks of completed moves that are taken in, and at most one move more. The rest
            is left for changes of other processes' tiers.
        copied: chunks whose copy to one slower tier is begun, or that are given up for it.
        questions: keys an eviction policy may ask about that may not leave, before it
            has to go on in a later step.
        whole: the work of a whole step, in keys that are looked up.
        own: the part of it that `told`, `granted` and `copied` take with LRU.
    """

    asked: int = 500
    told: int = 320
    granted: int = 160
    linked: int = 200
    absorbed: int = 320
    copied: int = 160
    questions: int = 400
    whole: int = 1300
    own: int = 1100

    def share(self, wanted: float) -> float:
        """Return the share of a step's own work that is done when callers `wanted` that much."""
        return max(LEAST_SHARE, min(1.0, (self.whole - wanted) / self.own))


UNBOUNDED = Pace(*[sys.maxsize] * 9)
"""For simulations, where no caller waits."""


class Budget:
    """The part of its pace that a step has left; the parts of the core deduct their work from it.

    The work that callers want is done at once and counted: the more it is, the less other
    work is done in the same step.

    Attributes:
        asked: keys that a step looks up before further requests have to ask again.
        settled: keys of ended requests that policies are told of in a step.
        absorbed, told, granted, linked, given_up, questions: what is left of this step, see `Pace`.
        bounded: whether there are bounds at all.
        cut_short: a search for victims was cut short: more may be found in the next step.
        behind: more could have been granted or copied in this step.

    Args:
        effort: the cost of a call of host memory's policy relative to LRU.
        tier_efforts: the same for the policy of each tier.
    """

    def __init__(
        self, pace: Pace = UNBOUNDED, effort: float = 1.0, tier_efforts: Sequence[float] = ()
    ) -> None:
        self._pace = pace
        self.asked = pace.asked
        self.settled = pace.told
        self.bounded = pace is not UNBOUNDED
        self._wanted = 0.0
        self._share = 1.0
        self.weigh(effort, tier_efforts)
        self.begin_step()
        self._shortened = True

    def weigh(self, effort: float, tier_efforts: Sequence[float]) -> None:
        """Set the costs of the policies' calls, from the next step on."""
        self._effort = effort
        self._tier_efforts = list(tier_efforts)
        pace = self._pace
        # How much callers may want of a step before other work is put off.
        light = {effort, *tier_efforts} == {1.0}
        self._light = pace.whole - pace.own if light else -1
        # These two are the same in every step: they depend on the policy alone.
        given_up, questions = (max(1, int(n / effort)) for n in (pace.copied, pace.questions))
        self._whole = (pace.absorbed, pace.told, pace.granted, pace.linked, given_up, questions)

    def begin_step(self) -> None:
        """Begin a step, which may do as much as its pace allows."""
        self.absorbed, self.told, self.granted, self.linked, self.given_up, self.questions = (
            self._whole
        )
        self._copied = [self._pace.copied] * len(self._tier_efforts)
        self.cut_short = self.behind = self._shortened = False

    def want(self, keys: int, *, stored: bool = False) -> None:
        """Count `keys` chunks that callers had loaded, or stored."""
        self._wanted += STORED * self._effort * keys if stored else keys

    def shorten(self, looked_up: int) -> None:
        """Set the share for the step's own work; callers had `looked_up` keys looked up."""
        if self._shortened:
            return
        self._shortened = True
        wanted, self._wanted = self._wanted + looked_up, 0.0
        if wanted <= self._light:
            self._share = 1.0
            return
        share = self._share = self._pace.share(wanted)
        for tier, effort in enumerate(self._tier_efforts):
            self._copied[tier] = max(1, int(self._copied[tier] * share / effort))
        self.granted = max(1, int(self.granted * share / self._effort))
        self.linked = max(1, int(self.linked * share / self._effort))
        self.told = int(self.told * (share / self._effort))

    def absorb(self, chunks: int) -> None:
        """Count a completed move of `chunks` chunks as taken in."""
        self.absorbed -= 1 + chunks

    @property
    def news(self) -> int:
        """Changes of others' tiers that may still be taken in; few while callers want much."""
        return max(0, int(self.absorbed * self._share * NEWS_PER_CHUNK))

    def learn(self, changes: int) -> None:
        """Count changes of another process's tier as taken in."""
        self.absorbed -= -(-changes // NEWS_PER_CHUNK)
        self._wanted += changes * KEYS_PER_CHANGE

    def tell(self, keys: int) -> None:
        """Count uses that the policies were told of."""
        self.told -= keys

    def grant(self, keys: int) -> None:
        """Count keys that were leased or fetched for requests that wait."""
        self.granted -= keys
        if self.granted <= 0:
            self.behind = True

    def give_up(self, chunks: int) -> None:
        """Count chunks that were given up ahead of need."""
        self.given_up -= chunks

    def ask(self) -> bool:
        """Count a question about a chunk that may not leave; False if the search has to end."""
        if self.questions <= 0:
            self.cut_short = True
            return False
        self.questions -= 1
        return True

    def copies_to(self, tier: int) -> int:
        """Return how many copies to a tier may still begin."""
        return self._copied[tier]

    def copy(self, tier: int, chunks: int) -> None:
        """Count copies to a tier as begun; 0 means that more wait than may begin."""
        self._copied[tier] -= chunks
        if not chunks:
            self.behind = True
