"""Match: count the tokens of a request that can be loaded.

The result is the largest boundary that every group can supply. A group that attends to all tokens
supplies a boundary if all chunks before it can be loaded; a group with a sliding window, if the
chunks that the next token needs can be loaded. Each group is asked for its largest boundary up to
the one that the groups before it can supply. At a smaller boundary a window may be incomplete, so
the groups are asked again until all agree.
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
        # Groups with the smallest windows last: they lower the boundary least often.
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
        """Count the tokens after the first `computed` that can be loaded, up to position `end`.

        Less than a chunk of any group counts as 0. None means that the answer depends on chunks
        that are being fetched.

        Args:
            keys: for each group the keys of the request's whole chunks.
        """
        # Limit the end first: answers for a larger end need not hold for a smaller one.
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
                    # Answers for a larger end need not hold for this one.
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
        """Return the largest boundary up to `end` that the group can supply; None: ask again."""
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
        """Return where in `keys` the last run of hits ends that fills the window.

        A run that begins at the first key may be shorter. One at the end of `keys` takes `needed`
        chunks, because the boundary may lie within its last chunk. None if a key after the run's
        beginning is being fetched. A key that may turn out to be a miss does not count: earlier
        ones have been looked up, too, so that all are fetched at once.
        """
        lookup, is_coming = self._manager.lookup, self._manager.is_coming
        run = 0
        deferred = False
        for place in range(len(keys) - 1, -1, -1):
            answer = lookup(keys[place], context)
            deferred |= answer is None
            if answer or (answer is None and is_coming(keys[place])):
                run += 1
                if run == needed:
                    return None if deferred else place + run
            else:
                run = 0
                needed = group.window_chunks(0)
        return None if deferred else run
