"""Match: count the tokens of a request that can be loaded.

The answer is the largest boundary that every group can supply. A group that attends to all tokens
supplies a boundary if all chunks before it are there; one with a sliding window, if those are
there that the token after it needs. Each group is asked for the largest boundary up to the one that
those before it have left; as a smaller one may lie where a window is not there, groups are
asked anew until all agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.connector.contract import OffloadingManager, RequestContext
from kvstore.connector.tracked_request import Group

__all__ = ["Matcher"]


class Matcher:
    """Looks prompts up, group by group."""

    def __init__(self, manager: OffloadingManager, groups: Sequence[Group]) -> None:
        self._manager = manager
        # The rarest boundaries last: they are the most likely to hold, once the others do.
        self._groups = sorted(
            groups, key=lambda group: (group.window is not None, -(group.window or 0))
        )
        self._least = max(group.tokens_per_chunk for group in groups)

    def match(
        self,
        keys: Sequence[Sequence[bytes]],
        computed: int,
        end: int,
        context: RequestContext,
    ) -> int | None:
        """How many tokens after the first `computed` can be loaded, `end` at most.

        Less than a chunk of any group is 0. None says that it depends on chunks that are being
        fetched.

        Args:
            keys: for each group the keys of the request's whole chunks.
        """
        # Before anybody is asked: what was said for a larger end need not hold for a smaller one.
        end = min(end, *(len(keys[group.index]) * group.tokens_per_chunk for group in self._groups))
        if end - computed < self._least:
            return 0
        if self._manager.is_deferred(context):
            return None
        while True:
            deferred = unsure = again = False
            for group in self._groups:
                its = keys[group.index]
                boundary = self._boundary(group, its, computed, end, context)
                if boundary is None:
                    deferred = unsure = True
                    continue
                if boundary < end:
                    # What was said for a larger end need not hold for this one.
                    again |= unsure
                    end = boundary
                if end - computed < self._least:
                    return 0
                unsure |= group.window is not None
            if not again:
                return None if deferred else end - computed

    def _boundary(
        self,
        group: Group,
        keys: Sequence[bytes],
        computed: int,
        end: int,
        context: RequestContext,
    ) -> int | None:
        """The largest boundary up to `end` that the group can supply, or None."""
        first = computed // group.tokens_per_chunk
        wanted = keys[first : group.chunks_to(end)]
        if group.window is None:
            found = self._manager.lookup_prefix(wanted, context)
        else:
            found = self._last_window(group, wanted, group.window_chunks(end), context)
        return None if found is None else (first + found) * group.tokens_per_chunk

    def _last_window(
        self, group: Group, keys: Sequence[bytes], needed: int, context: RequestContext
    ) -> int | None:
        """Where in `keys` the last run of hits ends that is as long as the window.

        One that begins at the first key may be shorter. The very last needs `needed` chunks, as
        the boundary may lie within its last chunk. None if a key behind its beginning is being
        fetched; keys before that have then been asked for all the same, so that all are fetched
        at once.
        """
        lookup = self._manager.lookup
        run = 0
        deferred = False
        for place in range(len(keys) - 1, -1, -1):
            answer = lookup(keys[place], context)
            if answer:
                run += 1
                if run == needed:
                    return None if deferred else place + run
            else:
                deferred |= answer is None
                run = 0
                needed = group.window_chunks(0)
        return None if deferred else run
