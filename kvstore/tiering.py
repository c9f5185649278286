"""Kinds of tiers by name: those of this package, and those that others add.

A kind is a subclass of `tiers.Tier` with a `name`. Its constructor takes a `TierPlace`
and, by keyword, parameters that are numbers, texts or flags and have defaults: they are what the
configuration may say of it. A package adds its own by `register_tier`, or without being
imported first, by an entry point in the group ``kvstore.tiers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvstore.policies.registry import Registry
from kvstore.tiers.base import Tier
from kvstore.types import TierPlace

__all__ = [
    "TierPlace",
    "check_tier",
    "create_tier",
    "is_store",
    "register_tier",
    "tail_bytes_of",
    "tier_names",
]

_T = TypeVar("_T", bound=type[Tier])


_kinds: Registry[Tier] = Registry("tier", Tier, "kvstore.tiers")  # type: ignore[type-abstract]


def register_tier(cls: _T) -> _T:
    """Class decorator: make a kind of tier known under its `name`.

    Raises:
        ValueError: if the class has no name, another class has taken it, or it is "disk".
    """
    if getattr(cls, "name", None) == "disk":
        raise ValueError("the tier name 'disk' is taken by kvstore's own")
    _kinds.register(cls)
    return cls


def tier_names() -> list[str]:
    """Every kind that there is, sorted."""
    return sorted({"disk", *_kinds.names()})


def check_tier(name: object, parameters: Mapping[str, Any]) -> str:
    """The name of a kind that is no disk, if it takes these parameters.

    Raises:
        ValueError: if there is no such kind, or it does not take one of them.
    """
    if not isinstance(name, str) or name not in tier_names():
        raise ValueError(f"must be one of: {', '.join(tier_names())}")
    _kinds.checked(name, dict(parameters))
    return name


def is_store(name: str) -> bool:
    """`Tier.is_store` of this kind.

    Raises:
        ValueError: if there is no such kind.
    """
    return name != "disk" and _kinds.find(name).is_store


def tail_bytes_of(name: str) -> int:
    """`Tier.tail_bytes` of this kind.

    Raises:
        ValueError: if there is no such kind.
    """
    return 0 if name == "disk" else _kinds.find(name).tail_bytes


def create_tier(name: str, place: TierPlace, parameters: Mapping[str, Any]) -> Tier:
    """A tier of this kind, not opened.

    Raises:
        ValueError: as `check_tier`, and for a value that the kind refuses.
    """
    make: Any = _kinds.checked(name, dict(parameters))
    tier: Tier = make(place, **parameters)
    return tier
