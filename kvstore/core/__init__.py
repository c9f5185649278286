"""The state machine of kvstore, without I/O: calls in, moves out, completions back."""

from kvstore.core.core import Core
from kvstore.core.host import HostPool
from kvstore.core.residency.owned import OwnedTier
from kvstore.core.residency.peer import PeerTier
from kvstore.core.residency.remote import AskedTier
from kvstore.core.statistics import AGES, BOUNDS, CoreStats, Durations, TenantStats, TierStats
from kvstore.core.step_budget import UNBOUNDED, Pace
from kvstore.core.stores import StoreGrant
from kvstore.types import Flow

__all__ = [
    "AGES",
    "BOUNDS",
    "UNBOUNDED",
    "AskedTier",
    "Core",
    "CoreStats",
    "Durations",
    "Flow",
    "HostPool",
    "OwnedTier",
    "Pace",
    "PeerTier",
    "StoreGrant",
    "TenantStats",
    "TierStats",
]
