"""A tier whose capacity is taken up by other files."""

from __future__ import annotations

from kvstore.core import Core, HostPool, OwnedTier
from kvstore.policies import create_policy
from kvstore.types import RecoveredTier


def test_a_tier_without_room_for_a_segment_does_not_hold_up_host_memory() -> None:
    full = OwnedTier(
        0,
        RecoveredTier("full", "disk", [], 8, [], 0),
        create_policy("lru", 8),
        max_rows_in_flight=4,
    )
    core = Core(HostPool(4, create_policy("lru", 4)), [full])
    for number in range(5):
        core.poll(float(number))
        keys = [b"%d-%d" % (number, index) for index in range(4)]
        grant = core.prepare_store(keys, f"r{number}")
        assert grant is not None
        assert grant.keys == keys
        core.complete_store(keys, f"r{number}")
        core.on_request_finished(f"r{number}")
        assert core.flush(float(number)) == []
        assert core.unsaved == 0
