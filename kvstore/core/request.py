"""What the core remembers of one request of the server.

    SCANNING --a key is not ready yet--> WAITING --all there, or time is up--> ANSWERED
       ^                                                                          |
       +------------------ its load begins, or its lease runs out ----------------+

While SCANNING, lookups see the tiers as they are. While WAITING, every lookup
is "ask again" at no cost. Once ANSWERED, what is in host memory is a hit and
all else a miss; keys that the request had not asked before may send it back to
WAITING, under the deadline that is already running, so this ends.
"""

from __future__ import annotations

import enum

__all__ = ["Request", "RequestState"]


class RequestState(enum.IntEnum):
    """See the module's text."""

    SCANNING = 0
    WAITING = 1
    ANSWERED = 2


class Request:
    """Keys asked for, leases held, loads running, clocks.

    Attributes:
        keys: keys that answered "hit" or "ask again" in this round, in the order asked; a
            new round has a new list.
        tried: keys of earlier rounds of the same wait.
        granted: how many of `keys` were leased, fetched or given up so far.
        leases: keys of chunks that stay for this request; filling ones count in `pending`.
        pending: leased chunks that are still filling.
        loading: pins of loads that were prepared and are not complete.
        since: when this wait began, or None when there is none.
        moved: when something last moved for this request.
        newest: highest `order` of the chunks it waited for.
        asked: when it last asked.
        put_off: whether its last store was put off to be offered again.
        waits_for: the tier from which no more may be under way for now, or -1.
        short_of_rows: what is not granted waits for rows.
        stuck: the last step in which only its own leases stood in its way.
    """

    __slots__ = (
        "asked",
        "asked_step",
        "deferring",
        "granted",
        "id",
        "keys",
        "leases",
        "loading",
        "moved",
        "needs_rows",
        "newest",
        "pending",
        "put_off",
        "short_of_rows",
        "since",
        "state",
        "stuck",
        "tried",
        "waits_for",
    )

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.state = RequestState.SCANNING
        self.keys: list[bytes] = []
        self.tried: set[bytes] = set()
        self.granted = 0
        self.needs_rows = True
        self.leases: dict[bytes, None] = {}
        self.pending = 0
        self.loading: dict[bytes, int] = {}
        self.since: float | None = None
        self.moved = 0.0
        self.newest = -1
        self.asked = 0.0
        self.asked_step = -1
        self.deferring = False
        self.put_off = False
        self.waits_for = -1
        self.short_of_rows = False
        self.stuck = -1

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.name}, {self.granted}/{len(self.keys)} granted)"
