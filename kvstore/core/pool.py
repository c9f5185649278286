"""The rows of host memory and the chunks that live in them."""

from __future__ import annotations

import itertools
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvstore.core.chunk import FILLING, READY, Chunk, IllegalTransitionError
from kvstore.core.pace import UNBOUNDED
from policies.admission import AdmissionFilter
from policies.base import HELD, LATER, EvictionPolicy, Protected
from policies.table import OrderedTable

__all__ = ["HostPool"]


class HostPool:
    """Which chunk is in which row, who may leave, and who came and went.

    A row is in exactly one place: free, under a chunk, or held by moves and device
    transfers whose chunk is gone (after `reset`). `rows` is never exceeded.

    A chunk is known to the policy, or it is *leaving*: the policy gave it up and
    `demote` asked for a copy of it first. A leaving chunk can still be read; a
    use brings it back to the policy. Its row can be had once it is copied.

    Args:
        admission: decides which chunks of stores may enter; all, without one.
        reserve: rows that are to be free or soon free ahead of need.
    """

    def __init__(
        self,
        rows: int,
        policy: EvictionPolicy,
        admission: AdmissionFilter | None = None,
        reserve: int = 0,
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.admission = admission
        self.demote: Callable[[Chunk], bool] | None = None
        """Asks for a copy of a chunk that the policy gave up; False if it needs none."""
        self.ahead = reserve
        self.leaving = 0
        """Chunks that the policy has given up."""
        self.pace = UNBOUNDED
        """What one step may cost; the core sets it."""
        self.cut_short = False
        """A search for victims was broken off in this step: more may be found in the next."""
        self._questions = self.pace.questions
        self._ready_left = self.pace.copied
        self._sets_aside = type(policy).release is not EvictionPolicy.release
        # Chunks that the policy has set aside: those that may have become free to leave, those
        # that will when the step ends, and those that only wait for a copy, coldest first.
        self._loose: list[Chunk] = []
        self._until_next_step: list[Chunk] = []
        self._parked: OrderedDict[bytes, Chunk] = OrderedDict()
        self._waiting: dict[bytes, Chunk] = {}
        self._copied: dict[bytes, Chunk] = {}
        self.chunks: OrderedTable[bytes, Chunk] = OrderedTable()
        self.busy = 0
        """Chunks that are filling or pinned."""
        self.unsaved = 0
        """Chunks that are ready and wait for a copy to a slower tier."""
        self.marked = 0
        """Chunks that could leave, had they not answered "hit" in this step, as far as told."""
        self._held: Counter[int] = Counter()
        self.step = 0
        self.evicted = 0
        """Chunks that left for others."""
        self.shed = 0
        """Chunks evicted before they had reached a tier that was to keep them."""
        # Keys that became ready or (True) left since the history was taken, in order.
        self._keeps_history = True
        self._history: list[tuple[bytes, bool]] = []
        self.left: list[bytes] = []
        """Keys that have left in this step."""
        self._free = list(range(rows - 1, -1, -1))
        self._of_row = [Chunk(row) for row in range(rows)]
        """What stands for the chunk in each row, whether there is one or not. Where there is
        none, nothing is left of the last but its key, its order and the steps in which it was used.
        """
        self._reserved = 0
        # Counts every change that could make a chunk evictable, so that a vain
        # search for victims is not repeated until there is a reason to.
        self._changes = 0
        self._vain: tuple[int, bool] = (-1, False)

    @property
    def free(self) -> int:
        """Rows that hold nothing."""
        return len(self._free)

    @property
    def obtainable(self) -> int:
        """Rows that could be free if everybody left who is neither filling nor pinned."""
        return len(self._free) + len(self.chunks) - self.busy

    @property
    def held(self) -> int:
        """Rows that belong to moves and device transfers whose chunks are gone."""
        return len(self._held)

    def keep_history(self, wanted: bool) -> None:
        """Whether `take_history` will be called."""
        self._keeps_history = wanted

    def take_history(self) -> list[tuple[bytes, bool]]:
        """Keys that became ready or (True) left since the last call, in order."""
        history, self._history = self._history, []
        return history

    def begin_step(self) -> None:
        """Chunks that answered "hit" in the step before may leave from now on."""
        self.step += 1
        self.marked = 0
        self.left.clear()
        self._changes += 1
        self.cut_short = False
        self._questions = self.pace.questions
        self._ready_left = self.pace.copied
        if self._until_next_step:
            self._loose += self._until_next_step
            self._until_next_step.clear()

    def mark(self, keys: Iterable[bytes]) -> None:
        """Count those of `keys` that have answered "hit" in this step, each once."""
        chunks, step = self.chunks, self.step
        for key in keys:
            chunk = chunks.get(key)
            if chunk is not None and chunk.step == step != chunk.counted:
                chunk.counted = step
                self.marked += chunk.status == READY and not chunk.unsaved

    def keep(self, keys: Iterable[bytes]) -> None:
        """Those of `keys` that are here stay until the step ends, as if they had answered "hit"."""
        chunks, step = self.chunks, self.step
        for key in keys:
            chunk = chunks.get(key)
            if chunk is not None:
                chunk.step = step
        self.mark(keys)

    def make_room(self, count: int, *, shed_unsaved: bool, incoming: Sequence[bytes] = ()) -> int:
        """Evict until `count` rows are free, as far as possible.

        Filling and pinned chunks never leave, nor do those that answered "hit"
        in this step. Chunks still waiting to be copied to a slower tier leave
        only when `shed_unsaved`, and only after all others.

        Args:
            incoming: the keys that the rows are for, tail first.

        Returns:
            How many of the `count` rows are free now.
        """
        if len(self._free) < count and self._copied:
            self._reclaim(count)
        if len(self._free) < count:
            # What is leaving is on its way to be free.
            self._evict(
                count - len(self._free) - self.leaving, shed_unsaved=False, incoming=incoming
            )
            if shed_unsaved and len(self._free) < count:
                self._shed_waiting(count)
                self._evict(
                    count - len(self._free) - self.leaving, shed_unsaved=True, incoming=incoming
                )
        return min(count, len(self._free))

    def make_ready(self) -> None:
        """Let the policy give up chunks until `ahead` rows are free or soon free."""
        short = min(self._ready_left, self.ahead - len(self._free) - self.leaving)
        if short > 0:
            self._ready_left -= short
            self._evict(short, shed_unsaved=False, keep=True)

    @property
    def room(self) -> int:
        """Rows for which chunks can surely be made to leave one by one, and those that are free.

        Exact when `mark` was told of every hit of this step.
        """
        if self.demote is not None:
            return len(self._free)
        return len(self._free) + len(self.chunks) - self.busy - self.unsaved - self.marked

    def reach(self, keys: Sequence[bytes], unwanted: Collection[bytes] = ()) -> int:
        """How many leading `keys` can be here together, `unwanted` ones left out."""
        chunks, step, room = self.chunks, self.step, self.room
        for place, key in enumerate(keys):
            if key in unwanted:
                continue
            chunk = chunks.get(key)
            # Who is here and could leave must stay, too.
            if chunk is None or (
                chunk.status == READY and chunk.step != step and not chunk.unsaved
            ):
                room -= 1
                if room < 0:
                    return place
        return len(keys)

    def find_one(self) -> bool:
        """Look for one who may leave for a store; False if the search goes on in the next step.

        Nobody leaves here. Those who are in use and come first are met, so that
        `enter`, which may not be broken off, does not meet them.
        """
        if self._free or self.pace is UNBOUNDED or not self._sets_aside:
            return True
        self._let_loose()
        protected = self._protection(shed_unsaved=False, bounded=True)
        found = False

        def first(key: bytes) -> int:
            nonlocal found
            answer = protected(key)
            found = not answer
            return answer or LATER

        self.policy.evict(1, first)
        return found or not self.cut_short

    def enter(
        self,
        keys: Sequence[bytes],
        unwanted: Collection[bytes] = (),
        *,
        from_head: bool = False,
    ) -> tuple[list[Chunk], bool]:
        """Give those of `keys` that are not here, and are not `unwanted`, rows and filling chunks.

        They go to the policy tail first, each right after the eviction that
        makes room for it, and may be evicted for those that follow: so it is
        the policy that says which of a store are worth a row, and with LRU it is
        the head that fits. A chunk of `keys` that is given up and whose turn is still
        to come takes its place in the policy anew, and has never been away.

        Args:
            from_head: nobody enters behind one who does not. The policy says how many
                enter and the prompt says which: for when those who may not leave have
                narrowed the policy's choice.

        Returns:
            The chunks, head first; and whether all had their turn: otherwise those
            that are missing found no room.
        """
        policy, chunks = self.policy, self.chunks
        insert, evict = policy.insert, policy.evict
        self._let_loose()
        may_not_leave = self._protection(shed_unsaved=False, bounded=False)
        free = len(self._free)
        if policy.spares_latest:
            new = [key for key in keys if key not in chunks and key not in unwanted]
            mine = frozenset(keys)
            victims = evict(
                max(0, len(new) - free), lambda key: key in mine or may_not_leave(key), new[::-1]
            )
            if victims is not None:
                self._leave_all(victims)
                return self.reserve(new, -1), True
        entering: dict[bytes, None] = {}

        def whole(key: bytes) -> int:
            return key in entering or may_not_leave(key)

        protected = may_not_leave if policy.declines else whole
        given_up: dict[bytes, Chunk] = {}
        own: Collection[bytes] = ()
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
                    chunk = chunks[victim]
                    if chunk.aside:
                        self._given_up(chunk)
                    if victim in own:
                        given_up[victim] = chunks.pop(victim)
                    else:
                        self._leave(chunk)
            insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                chunks[key] = back
            else:
                entering[key] = None
        if not all_asked or (own and from_head):
            entering = self._from_the_head(keys, unwanted, entering, given_up)
        for chunk in given_up.values():
            chunks[chunk.key] = chunk
            self._leave(chunk)
        first = self._reserved
        self._reserved += len(entering)
        entered: list[Chunk] = []
        for index, key in enumerate(reversed(entering), first):
            chunk = self._of_row[self._free.pop()]
            chunk.begin(key, -1, index)
            entered.append(chunk)
        for chunk in reversed(entered):
            chunks[chunk.key] = chunk
        self.busy += len(entered)
        return entered, all_asked

    def _from_the_head(
        self,
        keys: Sequence[bytes],
        unwanted: Collection[bytes],
        entering: dict[bytes, None],
        given_up: dict[bytes, Chunk],
    ) -> dict[bytes, None]:
        """Who is to enter, tail first, when those in front take the places of those behind."""
        chunks, policy = self.chunks, self.policy
        missing = [
            (place, key)
            for place, key in enumerate(keys)
            if key not in entering and key not in chunks and key not in unwanted
        ]
        if not missing or not entering:
            return entering
        place_of = {key: place for place, key in enumerate(keys)}
        behind = list(entering)
        if given_up:
            # The policy has cut the prompt: then what is here of it is cut from its end.
            step = self.step
            here = (key for key in reversed(place_of) if key in chunks)
            behind += [
                key
                for key in here
                if chunks[key].status == READY
                and chunks[key].step != step
                and not chunks[key].unsaved
            ]
            behind.sort(key=place_of.__getitem__, reverse=True)
        moving_up: list[bytes] = []
        for (place, key), last in zip(missing, behind, strict=False):
            if place_of[last] < place:
                break
            policy.remove(last)
            if last in entering:
                del entering[last]
            else:
                given_up[last] = chunks.pop(last)
            moving_up.append(key)
        for key in reversed(moving_up):
            policy.insert(key)
            back = given_up.pop(key, None)
            if back is not None:
                chunks[key] = back
            else:
                entering[key] = None
        return dict.fromkeys(sorted(entering, key=place_of.__getitem__, reverse=True))

    def reserve(self, keys: Sequence[bytes], origin: int) -> list[Chunk]:
        """Give each of `keys` a row and a filling chunk. There must be room for all."""
        first = self._reserved
        self._reserved += len(keys)
        of_row, free = self._of_row, self._free
        chunks: list[Chunk] = []
        for index, key in enumerate(keys, first):
            chunk = of_row[free.pop()]
            chunk.begin(key, origin, index)
            chunks.append(chunk)
        here, insert = self.chunks, self.policy.insert
        for chunk in reversed(chunks):
            key = chunk.key
            here[key] = chunk
            insert(key)
        self.busy += len(chunks)
        return chunks

    def fill(self, chunk: Chunk) -> None:
        """filling -> ready: the bytes of the chunk are whole."""
        self.fill_all((chunk,))

    def fill_all(self, chunks: Sequence[Chunk]) -> None:
        """`fill` of each."""
        step = self.step
        for chunk in chunks:
            if chunk.status != FILLING:
                raise IllegalTransitionError(f"fill of {chunk!r}")
            chunk.status = READY
            if chunk.counted == step and not chunk.unsaved:
                self.marked += 1
            if chunk.aside:
                self._loose.append(chunk)
        self.busy -= len(chunks)
        self._changes += 1
        if self._keeps_history:
            self._history += [(chunk.key, False) for chunk in chunks]

    def fill_pinned(self, chunks: Collection[Chunk]) -> None:
        """filling -> pinned once: `fill` and then `pin` each, for somebody who has waited."""
        for chunk in chunks:
            if chunk.status != FILLING:
                raise IllegalTransitionError(f"fill of {chunk!r}")
            chunk.status = 1
        if self._keeps_history:
            self._history += [(chunk.key, False) for chunk in chunks]

    def discard(self, chunk: Chunk) -> None:
        """filling -> absent: the bytes never came. The row is free again."""
        if chunk.status != FILLING:
            raise IllegalTransitionError(f"discard of {chunk!r}")
        del self.chunks[chunk.key]
        self.policy.remove(chunk.key)
        chunk.end()
        self.busy -= 1
        self._changes += 1
        self._free.append(chunk.row)

    def pin(self, chunk: Chunk) -> None:
        """ready or pinned -> pinned once more."""
        if chunk.status < READY:
            raise IllegalTransitionError(f"pin of {chunk!r}")
        if chunk.status == READY:
            self.busy += 1
            self.unsaved -= chunk.unsaved != 0
            self.marked -= chunk.counted == self.step and not chunk.unsaved
            if chunk.leaving:
                self._copied.pop(chunk.key, None)
                self._waiting.pop(chunk.key, None)
        chunk.status += 1

    def unpin(self, chunk: Chunk) -> None:
        """Take one pin back."""
        if chunk.status <= READY:
            raise IllegalTransitionError(f"unpin of {chunk!r}")
        chunk.status -= 1
        if chunk.status == READY:
            self.busy -= 1
            self.unsaved += chunk.unsaved != 0
            self.marked += chunk.counted == self.step and not chunk.unsaved
            self._changes += 1
            if chunk.aside:
                self._loose.append(chunk)
            if chunk.leaving:
                (self._waiting if chunk.unsaved else self._copied)[chunk.key] = chunk

    def unpin_all(self, chunks: Sequence[Chunk]) -> None:
        """`unpin` of each."""
        step, free = self.step, 0
        for chunk in chunks:
            status = chunk.status - 1
            if status or chunk.leaving or chunk.aside or chunk.unsaved or chunk.counted == step:
                self.unpin(chunk)
            else:
                chunk.status = READY
                free += 1
        self.busy -= free
        self._changes += 1

    def begin_copies(self, chunks: Sequence[Chunk], tier: int) -> None:
        """`dequeued` from the queue for `tier`, and then `pin`, of each."""
        step, bit, simple = self.step, 1 << tier, 0
        for chunk in chunks:
            if (
                chunk.status != READY
                or chunk.unsaved != bit
                or chunk.leaving
                or chunk.aside
                or chunk.counted == step
            ):
                self.dequeued(chunk, tier)
                self.pin(chunk)
            else:
                chunk.unsaved = 0
                chunk.status = 1
                simple += 1
        self.unsaved -= simple
        self.busy += simple
        self._changes += 1

    def all_queued(self, chunks: Sequence[Chunk], tier: int) -> None:
        """`queued` of each."""
        step, bit, simple = self.step, 1 << tier, 0
        for chunk in chunks:
            if chunk.status != READY or chunk.unsaved or chunk.leaving or chunk.counted == step:
                self.queued(chunk, tier)
            else:
                chunk.unsaved = bit
                simple += 1
        self.unsaved += simple

    def queued(self, chunk: Chunk, tier: int) -> None:
        """The chunk stands in the queue for `tier`."""
        if chunk.status == READY and not chunk.unsaved:
            self.unsaved += 1
            self.marked -= chunk.counted == self.step
        chunk.unsaved |= 1 << tier
        if chunk.leaving and self._copied.pop(chunk.key, None) is not None:
            self._waiting[chunk.key] = chunk

    def dequeued(self, chunk: Chunk, tier: int) -> None:
        """The chunk stands no longer in the queue for `tier`."""
        chunk.unsaved &= ~(1 << tier)
        if chunk.status == READY and not chunk.unsaved:
            self.unsaved -= 1
            self.marked += chunk.counted == self.step
        self._changes += 1
        if chunk.aside and not chunk.unsaved:
            self._parked.pop(chunk.key, None)
            self._loose.append(chunk)
        if chunk.leaving and not chunk.unsaved and self._waiting.pop(chunk.key, None) is not None:
            self._copied[chunk.key] = chunk

    def touch(self, keys: Iterable[bytes]) -> None:
        """Tell the policy that resident `keys` (tail first) were used."""
        # Whoever is used now is hotter than whoever may leave by now.
        self._let_loose()
        chunks, touch = self.chunks, self.policy.touch
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                continue
            if chunk.leaving:
                self.stay(chunk)
            else:
                touch(key)

    def stay(self, chunk: Chunk) -> None:
        """A chunk that was leaving was used: it is the policy's again."""
        chunk.leaving = False
        self.leaving -= 1
        self._waiting.pop(chunk.key, None)
        self._copied.pop(chunk.key, None)
        self.policy.insert(chunk.key)

    def release_held(self, rows: Sequence[int]) -> None:
        """A move or a transfer whose chunks are gone has ended: its rows are free."""
        for row in rows:
            self._held[row] -= 1
            if not self._held[row]:
                del self._held[row]
                self._free.append(row)
        self._changes += 1

    def reset(self, rows_in_flight: Iterable[int]) -> None:
        """Forget every chunk; rows in flight stay held until `release_held`.

        A row that several of them touch is given once for each.
        """
        if self._keeps_history:
            self._history.extend(
                (key, True) for key, chunk in self.chunks.items() if chunk.status != FILLING
            )
        for chunk in self.chunks.values():
            chunk.end()
        self.chunks.clear()
        self.policy.clear()
        self._waiting.clear()
        self._copied.clear()
        self._loose.clear()
        self._until_next_step.clear()
        self._parked.clear()
        self.busy = self.unsaved = self.leaving = self.marked = 0
        self._held.update(rows_in_flight)
        self._free = [row for row in range(self.rows - 1, -1, -1) if row not in self._held]
        self._changes += 1

    def _protection(self, *, shed_unsaved: bool, bounded: bool) -> Protected:
        """What the policy may ask; when `bounded`, not more often than the step allows."""
        chunks, step = self.chunks, self.step

        def protected(key: bytes) -> int:
            chunk = chunks.get(key)
            # Without one it is about to enter; it may be refused.
            if chunk is None or (
                chunk.status == READY and chunk.step != step and (shed_unsaved or not chunk.unsaved)
            ):
                return False
            if bounded:
                if self._questions <= 0:
                    self.cut_short = True
                    return LATER
                self._questions -= 1
            if chunk.status != READY:
                chunk.aside = True
            elif chunk.unsaved and not shed_unsaved:
                chunk.aside = True
                self._parked[key] = chunk
            else:
                chunk.aside = True
                self._until_next_step.append(chunk)
            return HELD

        return protected

    def _let_loose(self) -> None:
        """Tell the policy who may leave again of those that it has set aside."""
        if not self._loose:
            return
        loose, self._loose = self._loose, []
        # Tail first, whatever the order in which loads and copies have ended.
        loose.sort(key=operator.attrgetter("order"), reverse=True)
        free: list[bytes] = []
        for chunk in loose:
            if not chunk.aside or chunk.status != READY:
                continue
            if self.chunks.get(chunk.key) is not chunk:
                continue
            if chunk.unsaved:
                self._parked[chunk.key] = chunk
            else:
                chunk.aside = False
                free.append(chunk.key)
        self.policy.release(free)

    def _unpark(self, count: int) -> None:
        """Up to `count` chunks that wait for a copy may leave without it."""
        free: list[bytes] = []
        while self._parked and len(free) < count:
            key, chunk = self._parked.popitem(last=False)
            if chunk.status == READY:
                chunk.aside = False
                free.append(key)
        self.policy.release(free)

    def _given_up(self, chunk: Chunk) -> None:
        """The policy has forgotten it."""
        chunk.aside = False
        self._parked.pop(chunk.key, None)

    def _evict(
        self,
        count: int,
        *,
        shed_unsaved: bool,
        incoming: Sequence[bytes] = (),
        keep: bool = False,
    ) -> None:
        """Let the policy give up `count` chunks; those that need no copy go at once, or `keep`."""
        may_leave = len(self.chunks) - self.busy - (0 if shed_unsaved else self.unsaved)
        count = min(count, may_leave, len(self.chunks) - self.leaving)
        if count <= 0 or self._vain == (self._changes, shed_unsaved):
            return
        self._let_loose()
        if shed_unsaved:
            self._unpark(count)
        bounded = self.pace is not UNBOUNDED
        protected = self._protection(shed_unsaved=shed_unsaved, bounded=bounded)
        victims = self.policy.evict(count, protected, incoming)
        if victims is None:
            victims = []
            while len(victims) < count:
                one = self.policy.evict(1, protected, incoming)
                if one is None:
                    self._vain = (self._changes, shed_unsaved)
                    break
                victims += one
        demote = self.demote
        if demote is None and not keep:
            self._leave_all(victims)
            return
        for key in victims:
            chunk = self.chunks[key]
            if chunk.aside:
                self._given_up(chunk)
            wanted = demote is not None and not chunk.unsaved and demote(chunk)
            if not wanted and not keep:
                self._leave(chunk)
                continue
            chunk.leaving = True
            chunk.left_step = self.step
            self.leaving += 1
            (self._waiting if chunk.unsaved else self._copied)[key] = chunk

    def _leave(self, chunk: Chunk) -> None:
        """ready -> absent."""
        del self.chunks[chunk.key]
        self.evicted += 1
        if chunk.unsaved:
            chunk.unsaved = 0
            self.shed += 1
            self.unsaved -= 1
        chunk.leaving = False
        self._free.append(chunk.row)
        self.left.append(chunk.key)
        if self._keeps_history:
            self._history.append((chunk.key, True))

    def _leave_all(self, keys: Sequence[bytes]) -> None:
        """`_leave` of each of the chunks that the policy has forgotten."""
        chunks, free = self.chunks, self._free
        for key in keys:
            chunk = chunks.pop(key)
            if chunk.aside:
                self._given_up(chunk)
            if chunk.unsaved:
                chunk.unsaved = 0
                self.shed += 1
                self.unsaved -= 1
            free.append(chunk.row)
        self.evicted += len(keys)
        self.left += keys
        if self._keeps_history:
            self._history += [(key, True) for key in keys]

    def _reclaim(self, count: int) -> None:
        """Let go of chunks that were leaving and are copied, until `count` rows are free."""
        step = self.step
        free = (chunk for chunk in self._copied.values() if chunk.step != step)
        for chunk in list(itertools.islice(free, max(0, count - len(self._free)))):
            del self._copied[chunk.key]
            self.leaving -= 1
            self._leave(chunk)

    def _shed_waiting(self, count: int) -> None:
        """Let go of chunks that have waited since an earlier step for their copy to begin."""
        step = self.step
        free = (
            chunk
            for chunk in self._waiting.values()
            if chunk.step != step and chunk.left_step != step
        )
        for chunk in list(itertools.islice(free, max(0, count - len(self._free)))):
            del self._waiting[chunk.key]
            self.leaving -= 1
            self._leave(chunk)
