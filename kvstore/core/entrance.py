"""Admit the chunks of a store to host memory, evicting one chunk for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore.core.chunk import READY, Chunk
from kvstore.core.eviction import Victims
from kvstore.core.host import HostPool

__all__ = ["Entrance"]


class Entrance:
    """Gives chunks of stores their rows."""

    def __init__(self, pool: HostPool, victims: Victims) -> None:
        self._pool = pool
        self._victims = victims

    def reach(self, keys: Sequence[bytes], room: int, unwanted: Collection[bytes] = ()) -> int:
        """How many leading `keys` can be here together, `unwanted` ones left out.

        Args:
            room: rows that are free or surely will be.
        """
        chunks, step = self._pool.chunks, self._pool.step
        for position, key in enumerate(keys):
            if key in unwanted:
                continue
            chunk = chunks.get(key)
            # Who is here and could leave must stay, too.
            if chunk is None or _may_leave(chunk, step):
                room -= 1
                if room < 0:
                    return position
        return len(keys)

    def enter(
        self,
        keys: Sequence[bytes],
        new: Sequence[bytes],
        unwanted: Collection[bytes],
        request_id: str,
        *,
        from_head: bool = False,
    ) -> tuple[list[Chunk], bool]:
        """Give `new`, those of `keys` that are neither here nor `unwanted`, rows and chunks.

        They go to the policy tail first, each right after the eviction that
        makes room for it, and may be evicted for those that follow. So the
        policy decides which chunks of a store are worth a row; with LRU it is
        the head that fits. A chunk of `keys` that is given up before its turn
        has come enters the policy again in its turn, and keeps its row.

        Args:
            request_id: who stores them.
            from_head: no chunk enters behind one that does not. The policy decides how
                many enter, and the prompt which ones: for when chunks that may not
                leave have narrowed the policy's choice.

        Returns:
            The chunks, head first; and whether all had their turn: otherwise those
            that are missing found no room.
        """
        pool = self._pool
        self._victims.let_loose()
        if pool.policy.spares_latest:
            entered = self._enter_together(keys, new, request_id)
            if entered is not None:
                return entered, True
        return self._enter_one_by_one(keys, unwanted, request_id, from_head)

    def _enter_together(
        self, keys: Sequence[bytes], new: Sequence[bytes], request_id: str
    ) -> list[Chunk] | None:
        """All at once, where none of them would be evicted for another; None if that cannot be."""
        pool = self._pool
        short = max(0, len(new) - pool.free)
        protected = self._victims.protection(
            shed_unsaved=False, bounded=False, staying=frozenset(keys)
        )
        victims = pool.policy.evict(short, protected, new[::-1])
        if victims is None:
            return None
        self._victims.given_up(victims)
        pool.leave(victims)
        return pool.reserve(new, -1, request_id)

    def _enter_one_by_one(
        self, keys: Sequence[bytes], unwanted: Collection[bytes], request_id: str, from_head: bool
    ) -> tuple[list[Chunk], bool]:
        pool, chunks = self._pool, self._pool.chunks
        insert, evict = pool.policy.insert, pool.policy.evict
        may_not_leave = self._victims.protection(shed_unsaved=False, bounded=False)
        # Tail first: those that enter, those of the prompt that were here and were given up.
        entering: dict[bytes, None] = {}
        given_up: dict[bytes, Chunk] = {}
        gone: list[bytes] = []

        def whole(key: bytes) -> int:
            return key in entering or may_not_leave(key)

        protected = may_not_leave if pool.policy.declines else whole
        own: Collection[bytes] = ()
        free = pool.free
        all_asked = True
        for key in reversed(keys):
            if key in chunks or key in unwanted:
                continue
            if free:
                free -= 1
            else:
                victims = evict(1, protected, (key,))
                if victims is None:
                    all_asked = False
                    break
                (victim,) = victims
                own = own or frozenset(keys)
                if victim in entering:
                    del entering[victim]
                else:
                    self._victims.given_up(victims)
                    if victim in own:
                        given_up[victim] = pool.take_out(victim)
                    else:
                        gone.append(victim)
            insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                pool.put_back(back)
            else:
                entering[key] = None
        # One by recency alone does not say which end of a prompt is worth more.
        by_recency = pool.policy.spares_latest and bool(given_up)
        fills = by_recency and _fills_a_hole(keys, entering, given_up)
        if not all_asked or fills or (own and from_head):
            entering = self._from_the_head(keys, unwanted, entering, given_up)
        for chunk in given_up.values():
            pool.put_back(chunk)
        pool.leave([*gone, *given_up])
        return pool.assign_rows([*reversed(entering)], -1, request_id), all_asked

    def _from_the_head(
        self,
        keys: Sequence[bytes],
        unwanted: Collection[bytes],
        entering: dict[bytes, None],
        given_up: dict[bytes, Chunk],
    ) -> dict[bytes, None]:
        """Who is to enter, tail first, when those in front take the places of those behind."""
        pool, chunks, policy = self._pool, self._pool.chunks, self._pool.policy
        missing = [
            (position, key)
            for position, key in enumerate(keys)
            if key not in entering and key not in chunks and key not in unwanted
        ]
        if not missing or not entering:
            return entering
        position_of = {key: position for position, key in enumerate(keys)}
        behind = list(entering)
        if given_up:
            # The policy has cut the prompt: then what is here of it is cut from its end.
            here = (key for key in reversed(position_of) if key in chunks)
            behind += [key for key in here if _may_leave(chunks[key], pool.step)]
            behind.sort(key=position_of.__getitem__, reverse=True)
        moving_up: list[bytes] = []
        for (position, key), last in zip(missing, behind, strict=False):
            if position_of[last] < position:
                break
            policy.remove(last)
            if last in entering:
                del entering[last]
            else:
                given_up[last] = pool.take_out(last)
            moving_up.append(key)
        for key in reversed(moving_up):
            policy.insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                pool.put_back(back)
            else:
                entering[key] = None
        return dict.fromkeys(sorted(entering, key=position_of.__getitem__, reverse=True))


def _fills_a_hole(
    keys: Sequence[bytes], entering: Collection[bytes], given_up: Collection[bytes]
) -> bool:
    """Whether the first of `keys` that enters stands before one that was here and is given up."""
    first = next((key for key in keys if key in entering or key in given_up), None)
    return first in entering


def _may_leave(chunk: Chunk, step: int) -> bool:
    return chunk.state == READY and chunk.step != step and not chunk.unsaved
