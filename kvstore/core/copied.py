"""The end of a move that has copied chunks to a tier, the same whoever owns their rows."""

from __future__ import annotations

from itertools import compress

from kvstore.core.complaints import Complaints
from kvstore.core.tier import CopyTarget
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
    failed: list[tuple[bytes, int]] = []
    if all(completion.ok):
        target.copied(keys, slots)
    else:
        ok = completion.ok[::-1]
        target.copied(list(compress(keys, ok)), list(compress(slots, ok)))
        ends = zip(keys, slots, ok, strict=True)
        failed = [(key, slot) for key, slot, whole in ends if not whole]
        target.not_copied(failed, now)
    what = f"tier {target.name} cannot store now"
    if failed and target.health.ailing:
        complaints.failed(what, completion.error, now, len(failed), tier=target.name)
        return True
    if failed:
        of_device = f"a device of {what}"
        complaints.failed(of_device, completion.error, now, len(failed), tier=target.name)
    elif target.health.recovered(now):
        again = f"tier {target.name} stores again"
        complaints.went_well(what, again, now, tier=target.name)
    return False
