"""The disk tier: segments, slots, records, recovery, and the lanes of others."""

from kvstore.tiers.disk.peers import PeerLanes
from kvstore.tiers.disk.tier import DiskTier

__all__ = ["DiskTier", "PeerLanes"]
