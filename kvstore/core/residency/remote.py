"""Remote tier: a store that has to be asked whether it has a key, and that others write to as well.

This process does not assign its slots: the store decides where a chunk lies and what it evicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from kvstore.core.residency.base import CopyTarget, Unordered
from kvstore.core.residency.index import Index
from kvstore.core.residency.remote_answers import Answers, Patience
from kvstore.core.statistics import TierStats
from kvstore.policies.admission import AdmissionFilter
from kvstore.types import Completion, Flow, LogLine, Move, Op, RecoveredTier

__all__ = ["NOWHERE", "AskedTier"]

NOWHERE = 0
"""The slot of each of its chunks, as only the store knows where they lie."""

_NO_DEVICE = (0,)


class AskedTier(CopyTarget):
    """A store as a tier; `entries` are the keys that it is known to have.

    An answer may be out of date: then the promotion fails, which is a miss. Clearing the
    store means to ignore everything stored so far: other hosts go on using it.

    Attributes:
        answers: its answers, and the questions under way.
        patience: how long an answer is worth waiting for.
    """

    def __init__(
        self,
        number: int,
        recovered: RecoveredTier,
        max_rows_in_flight: int,
        admission: AdmissionFilter | None = None,
        flow: Flow = Flow.WRITE_THROUGH,
        answers: Answers | None = None,
    ) -> None:
        index = Index((), Unordered(1))
        super().__init__(
            number, recovered, index, max_rows_in_flight, admission=admission, flow=flow
        )
        self.answers = Answers() if answers is None else answers
        self.patience = Patience()
        # Time of the step, for calls that do not pass it.
        self._now = 0.0
        self._failed: list[bytes] = []  # a key of the last call that failed

    @property
    def store(self) -> AskedTier:
        return self

    # -- questions -----------------------------------------------------------------------

    @property
    def worth_asking(self) -> bool:
        """Whether to ask it and to wait for its answers."""
        return self.health.readable and not self.clearing

    def unknown(self, key: bytes) -> bool:
        """Whether it is not known if it has the chunk."""
        return key not in self.entries and not self.answers.is_absent(key, self._now)

    def ask(self, keys: Sequence[bytes], now: float) -> Move:
        """Return the move that asks whether it has these, without its number."""
        self.answers.ask(keys, now)
        self.count("asked", len(keys))
        return Move(-1, Op.ASK, self.number, list(keys))

    def ended(self, move: Move, completion: Completion, now: float) -> LogLine | None:
        """Take in the end of a question or promotion; returns a log line, if there is one."""
        self._now = now
        if move.op is Op.ASK:
            self._answered(move.keys, completion, now)
        unread = completion.unread
        # A question ends with the first wave that is not answered.
        if len(unread) == len(move.keys) > 0 or (unread and move.op is Op.ASK):
            self._failed = [move.keys[unread[0]]]
            return self.health.failed(move.op, now, completion.error)
        return self.health.went_well(move.op)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Let answers that the store has these count as long as new ones."""
        known = [key for key in keys if key in self.entries]
        self.index.disappear(self.answers.has(known, self._now))

    def _answered(self, keys: Sequence[bytes], completion: Completion, now: float) -> None:
        answers = self.answers
        since = answers.asked.get(keys[0])
        # Answers to questions that were given up as overdue still count.
        answers.end(keys)
        unread = set(completion.unread)
        ends = list(zip(keys, completion.ok, strict=True))
        found = [key for key, ok in ends if ok]
        lacking = [key for n, (key, ok) in enumerate(ends) if not ok and n not in unread]
        if since is not None and len(unread) < len(keys):
            asked, seconds = len(keys) - len(unread), completion.ended_by(now) - since
            self.patience.answered(asked, len(found), max(0.0, seconds))
        self.count("found", len(found))
        self.count("unanswered", len(unread))
        # For chunks that were copied to it meanwhile, the answer is out of date.
        writing, entries = self.index.writing, self.entries
        answers.lacks([key for key in lacking if key not in entries and key not in writing], now)
        found = [key for key in found if key not in writing]
        self.index.appear((key, NOWHERE) for key in found)
        self.index.disappear(answers.has(found, now))

    # -- copies to it ------------------------------------------------------------------

    @property
    def most(self) -> int:
        """No limit: the store itself decides what it has room for."""
        return sys.maxsize

    def accepts(self, now: float) -> bool:
        return not self.clearing and self.health.accepts(now)

    def take_slots(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Assign as many as are wanted: the store refuses what it has no room for."""
        return [NOWHERE] * count

    def copied(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        self.index.written(keys)
        self.index.disappear(self.answers.has(keys[::-1], self._now))
        self.health.stored(_NO_DEVICE)
        self.count("written", len(keys))

    def not_copied(
        self, entries: Sequence[tuple[bytes, int]], copied: Sequence[int], now: float
    ) -> bool:
        """Note that copies of these chunks failed; the store as a whole is at fault."""
        for key, _ in entries:
            self.index.not_written(key)
        self.health.refused(_NO_DEVICE, now)
        self.count("failed_writes", len(entries))
        return True

    # -- promotions from it --------------------------------------------------------------

    def promoted(self, keys: Sequence[bytes]) -> None:
        super().promoted(keys)
        self.keep(keys)

    def not_promoted(self, key: bytes, *, perhaps_whole: bool) -> None:
        super().not_promoted(key, perhaps_whole=perhaps_whole)
        if not perhaps_whole:
            self.answers.lacks((key,), self._now)
        self.count("failed_reads")

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget whether the store has these."""
        self.index.disappear(keys)
        self.answers.forget(keys)

    # -- upkeep --------------------------------------------------------------------------

    def due(self, now: float, *, after_owned: bool) -> Move | None:
        """Return a move that clears it, if it has to be cleared, or tests whether it is back."""
        if not self.clearing:
            tries = not self.health.closed and self.health.calls.probe(now)
            return self.ask(self._failed, now) if tries else None
        return self._clear(now)

    def watch(
        self, now: float, elapsed: float, deadline: float, max_wait: float, compute: float
    ) -> tuple[list[LogLine], bool]:
        """Update its health and forget old answers, once a step: see `Health.watch`."""
        self._now = now
        answers = self.answers
        if answers.asked:
            # No request waits for these any longer.
            overdue = len(answers.overdue(now - deadline))
            if overdue:
                self.count("unanswered", overdue)
                self.patience.took(deadline)
        self.index.disappear(answers.expire(now))
        return super().watch(now, elapsed, deadline, max_wait, compute)

    def reset(self) -> None:
        super().reset()
        self.health.calls.cancel_probe()
        self.answers.reset()

    def close(self) -> None:
        super().close()
        self.answers.reset()

    def stats(self) -> TierStats:
        return self._stats(
            owned=False,
            store=True,
            queued=self.queued,
            asking=len(self.answers.asked),
            asks=self.in_flight.asks.copy(),
        )
