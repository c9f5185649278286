"""The end of a move that has copied chunks to a tier, the same whoever owns their rows."""

from __future__ import annotations

from itertools import compress

from kvstore.core.complaints import Complaints
from kvstore.core.residency.base import CopyTarget
from kvstore.types import Completion, Move

__all__ = ["take_in"]


def take_in(
    target: CopyTarget, move: Move, completion: Completion, complaints: Complaints, now: float
) -> bool:
    """Tell the tier which of the chunks it holds, and the log what went wrong.

    Returns:
        Whether copies that have not begun should be given up: the tier cannot store now.
    """
    # Tail first, as everything that reaches a policy.
    keys, slots = move.keys[::-1], move.slots[::-1]
    name, what = target.name, f"tier {target.name} cannot store now"
    if all(completion.ok):
        target.copied(keys, slots)
        if target.health.recovered(now):
            complaints.went_well(what, f"tier {name} stores again", now, tier=name)
        return False
    ok = completion.ok[::-1]
    written = list(compress(slots, ok))
    target.copied(list(compress(keys, ok)), written)
    ends = zip(keys, slots, ok, strict=True)
    failed = [(key, slot) for key, slot, whole in ends if not whole]
    at_fault = target.not_copied(failed, written, now)
    if not at_fault:
        what = f"slots of tier {name} cannot be written and are set aside"
    elif not target.health.ailing:
        what = f"a device of {what}"
    complaints.failed(what, completion.error, now, len(failed), tier=name)
    return at_fault and target.health.ailing
