"""Step budget: bound the work of one step, so that no caller waits long for its end.

`Pace` says how much one step does at most; `Budget` counts what is left of it. The rest is done
in the steps that follow: nothing is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KEYS_PER_CHANGE", "NEWS_PER_CHUNK", "STORED", "UNBOUNDED", "Budget", "Pace"]

STORED = 3.0
"""What storing a chunk costs, in keys that are looked up; loading one costs as much as one
key."""

NEWS_PER_CHUNK = 4
"""Changes of a tier of others that are taken in for the price of one chunk of a move."""

KEYS_PER_CHANGE = 0.75
"""What taking in a change costs, in keys that are looked up."""

LEAST_SHARE = 0.15
"""The part of a step's own work that is done whatever callers want."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The work of one step, in chunks.

    What callers want is done at once. The more they want, the less else is done in the same
    step: only a share of `told`, `granted`, `linked` and `copied`. All of them, what is given up
    and `questions` are divided again by the `effort` of the policy.

    Attributes:
        asked: keys that are looked up; after that many, further requests are answered "ask
            again" unseen, but for the one that has asked in vain for longest. Requests that
            wait in the queue cost nothing and do not count.
        told: keys of loads of which the policies hear; more when many have not been told.
        granted: chunks that are leased or fetched for requests in the queue.
        linked: keys of requests that begin to wait of which policies learn what follows what.
        absorbed: chunks of completed moves that are taken in, and at most one move more. What they
            leave of it is for changes of tiers of others.
        copied: chunks whose copy to one slower tier is begun, or that are given up for it.
        questions: keys about which an eviction policy may ask in vain, before it
            has to go on in a later step.
        whole: the work of a whole step, in keys that are looked up, and `own`, the part of it
            that `told`, `granted` and `copied` take with LRU.
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
        """The part of a step's own work that is done where callers have `wanted` so much."""
        return max(LEAST_SHARE, min(1.0, (self.whole - wanted) / self.own))


UNBOUNDED = Pace(*[sys.maxsize] * 9)
"""For simulations, where nobody waits."""


class Budget:
    """How much of its pace a step has left; rooms take from it what they do.

    What callers want is done at once and counted: the more it is, the less else is
    done in the same step.

    Attributes:
        asked: keys that a step looks up before further requests have to ask again.
        settled: keys of ended requests of which policies hear in a step.
        absorbed, told, granted, linked, given_up, questions: what is left of this step, see `Pace`.
        bounded: whether there are bounds at all.
        cut_short: a search for victims was broken off: more may be found in the next step.
        behind: more could have been granted or copied in this step.

    Args:
        effort: what a call of host memory's policy costs beside one of LRU's.
        tier_efforts: the same of each tier's.
    """

    def __init__(
        self, pace: Pace = UNBOUNDED, effort: float = 1.0, tier_efforts: Sequence[float] = ()
    ) -> None:
        self._pace = pace
        self._effort = effort
        self._tier_efforts = list(tier_efforts)
        self.asked = pace.asked
        self.settled = pace.told
        self.bounded = pace is not UNBOUNDED
        # What callers may want of a step before anything else is left for later.
        light = {effort, *tier_efforts} == {1.0}
        self._light = pace.whole - pace.own if light else -1
        self._wanted = 0.0
        self._share = 1.0
        # These two are the same in every step: they depend on the policy alone.
        given_up, questions = (max(1, int(n / effort)) for n in (pace.copied, pace.questions))
        self._whole = (pace.absorbed, pace.told, pace.granted, pace.linked, given_up, questions)
        self.begin_step()
        self._shortened = True

    def begin_step(self) -> None:
        """A step may do as much as its pace allows."""
        self.absorbed, self.told, self.granted, self.linked, self.given_up, self.questions = (
            self._whole
        )
        self._copied = [self._pace.copied] * len(self._tier_efforts)
        self.cut_short = self.behind = self._shortened = False

    def want(self, keys: int, *, stored: bool = False) -> None:
        """Callers had so many chunks loaded, or stored."""
        self._wanted += STORED * self._effort * keys if stored else keys

    def shorten(self, looked_up: int) -> None:
        """The step's own work begins. Its callers had so many keys looked up."""
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
        """A completed move of so many chunks was taken in."""
        self.absorbed -= 1 + chunks

    @property
    def news(self) -> int:
        """Changes of tiers of others that may still be taken in: few while callers want much."""
        return max(0, int(self.absorbed * self._share * NEWS_PER_CHUNK))

    def learn(self, changes: int) -> None:
        """So many changes of a tier of others were taken in."""
        self.absorbed -= -(-changes // NEWS_PER_CHUNK)
        self._wanted += changes * KEYS_PER_CHANGE

    def tell(self, keys: int) -> None:
        """The policies have heard of so many uses."""
        self.told -= keys

    def grant(self, keys: int) -> None:
        """So many keys were leased or fetched for requests that wait."""
        self.granted -= keys
        if self.granted <= 0:
            self.behind = True

    def give_up(self, chunks: int) -> None:
        """So many chunks were given up ahead of need."""
        self.given_up -= chunks

    def ask(self) -> bool:
        """A policy asks about a chunk that may not leave; False if the search has to end here."""
        if self.questions <= 0:
            self.cut_short = True
            return False
        self.questions -= 1
        return True

    def copies_to(self, tier: int) -> int:
        """How many copies to a tier may still begin."""
        return self._copied[tier]

    def copy(self, tier: int, chunks: int) -> None:
        """So many copies to a tier were begun; 0 says that more wait than may begin."""
        self._copied[tier] -= chunks
        if not chunks:
            self.behind = True
