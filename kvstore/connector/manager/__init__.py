"""Managers: what is offloaded, where it lies, and what leaves when room is needed."""

from kvstore.connector.manager.base import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestContext,
)
from kvstore.connector.manager.policy import PolicyManager
from kvstore.connector.manager.tiered import KVStoreManager
from kvstore.connector.mediums import LoadStoreSpec

__all__ = [
    "KVStoreManager",
    "LoadStoreSpec",
    "OffloadingEvent",
    "OffloadingManager",
    "PolicyManager",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestContext",
]
