"""What is compared: how much room, how many clients, which prompts, which disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.serving.clients import Talk
from benchmarks.serving.servers import BLOCK

__all__ = ["Setting", "quick", "smallest", "sweep"]

SLOW = 20 * 10**6
"""Bytes per second: a prefix takes longer from disk than to compute on two cores."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the comparison.

    Attributes:
        host: tokens that host memory has room for.
        talk: what clients ask for in each round.
        disk_limit: bytes per second that the disk reads, and writes; 0 if it is not throttled.
    """

    name: str
    host: int
    talk: Talk
    disk_limit: int = 0


def room(talk: Talk, conversations: int) -> int:
    """Tokens of so many conversations in whole chunks."""
    return conversations * -(-(talk.longest + talk.reply) // BLOCK) * BLOCK


def sweep() -> list[Setting]:
    """All settings; those with the same host memory share their servers."""
    talk = Talk(4, conversations=16, turns=3, first=384, grows=256)
    one, four, every = (room(talk, count) for count in (1, 4, talk.conversations))
    settings = [
        Setting(f"room for {word}, {clients} at once", host, replace(talk, clients=clients))
        for word, host in (("1", one), ("4", four), ("all", every))
        for clients in (1, 4, 16)
    ]
    large = Talk(2, conversations=4, turns=2, first=2048, grows=256)
    fresh = Talk(4, conversations=24, turns=1, first=1024, grows=0)
    settings += [
        Setting("prompts larger than host memory", one, large),
        Setting("every prompt is new", four, fresh),
        Setting("room for 4, slow disk", four, talk, SLOW),
    ]
    return sorted(settings, key=lambda setting: setting.host)


def quick() -> list[Setting]:
    """A few settings of one start."""
    talk = Talk(4, conversations=8, turns=2, first=512, grows=512)
    host = room(talk, 2)
    return [
        Setting("room for 2 of 8, 1 at once", host, replace(talk, clients=1)),
        Setting("room for 2 of 8, 8 at once", host, replace(talk, clients=8)),
        Setting("every prompt is new", host, replace(talk, turns=1, first=1024)),
    ]


def smallest() -> list[Setting]:
    """Two conversations, of which host memory holds one: what `--dry` runs."""
    talk = Talk(1, conversations=2, turns=2, first=128, grows=128)
    return [Setting("room for 1 of 2, 1 at once", room(talk, 1), talk)]
