"""How much one step does at most, so that no caller waits long for the end of its step.

What is over is done in the steps that follow: nothing is refused for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["UNBOUNDED", "Pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """The work of one step, in chunks.

    Attributes:
        asked: keys that are looked up; when there were as many, further requests are
            answered "ask again" unseen, unless their first key is a miss. Who waits in line
            costs nothing and does not count.
        told: keys of loads of which the policies hear; more when many have not been told.
        granted: chunks that are leased or fetched for requests in line.
        absorbed: chunks of completed moves that are taken in, and at most one move more.
        copied: chunks whose copy to one slower tier is begun, or that are given up for it.
        questions: keys about which an eviction policy may ask in vain, before it
            has to go on in a later step.
    """

    asked: int = 500
    told: int = 256
    granted: int = 128
    absorbed: int = 256
    copied: int = 128
    questions: int = 1000


UNBOUNDED = Pace(*[sys.maxsize] * 6)
"""For simulations, where nobody waits."""
