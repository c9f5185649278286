"""Who stays: eviction policies, by name, for host memory and disk alike."""

from policies.base import EvictionPolicy, Protected
from policies.registry import create_policy, find_policy, policy_names, register_policy

__all__ = [
    "EvictionPolicy",
    "Protected",
    "create_policy",
    "find_policy",
    "policy_names",
    "register_policy",
]
