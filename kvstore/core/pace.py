"""How much one step does at most, so that no caller waits long for the end of its step.

What is over is done in the steps that follow: nothing is refused for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["KEYS_PER_CHANGE", "NEWS_PER_CHUNK", "STORED", "UNBOUNDED", "Pace"]

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
