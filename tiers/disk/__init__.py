"""The disk tier: segments, slots, records, recovery, and the lanes of others."""

from tiers.disk.peers import PeerLanes
from tiers.disk.tier import DiskTier

__all__ = ["DiskTier", "PeerLanes"]
