"""Eviction policies and admission filters, by name, for all tiers."""

# Imported under two names, the package would have two registries.
if __name__ != "kvstore.policies":
    raise ImportError(f"import kvstore.policies, not {__name__}")

from kvstore.policies.admission import AdmissionFilter, Chain
from kvstore.policies.base import HELD, LATER, EvictionPolicy, Protected
from kvstore.policies.parameters import Parameter, parameters_of
from kvstore.policies.registry import (
    create_filter,
    create_policy,
    filter_names,
    find_filter,
    find_policy,
    policy_names,
    register_filter,
    register_policy,
)

__all__ = [
    "HELD",
    "LATER",
    "AdmissionFilter",
    "Chain",
    "EvictionPolicy",
    "Parameter",
    "Protected",
    "create_filter",
    "create_policy",
    "filter_names",
    "find_filter",
    "find_policy",
    "parameters_of",
    "policy_names",
    "register_filter",
    "register_policy",
]
