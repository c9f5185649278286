"""Eviction policies by name.

A policy is found by its name in the configuration. Built-in policies are
registered here; a package adds its own by decorator, or without being
imported first, by an entry point in the group ``kvstore.policies`` whose name
is the policy's name and whose value is the class.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TypeVar

from policies.base import EvictionPolicy
from policies.lru import LRU

__all__ = ["create_policy", "find_policy", "policy_names", "register_policy"]

ENTRY_POINT_GROUP = "kvstore.policies"

_P = TypeVar("_P", bound=type[EvictionPolicy])

_registry: dict[str, type[EvictionPolicy]] = {}


def register_policy(cls: _P) -> _P:
    """Class decorator: make a policy known under its `name`.

    Raises:
        ValueError: if the class has no name, or another class has taken it.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"policy {cls.__qualname__} needs a class attribute `name`")
    taken = _registry.get(name)
    if taken is not None and taken is not cls:
        raise ValueError(f"policy name {name!r} is already taken by {taken.__qualname__}")
    _registry[name] = cls
    return cls


def policy_names() -> list[str]:
    """Every name that is registered or offered by an installed package, sorted."""
    found = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(found | _registry.keys())


def create_policy(name: str, capacity: int) -> EvictionPolicy:
    """Build the policy called `name` for a tier of `capacity` chunks.

    Raises:
        ValueError: as `find_policy`.
    """
    return find_policy(name)(capacity)


def find_policy(name: str) -> type[EvictionPolicy]:
    """The policy called `name`.

    Raises:
        ValueError: if no policy has that name; the message lists those that
            exist. Or if the package that offers it cannot be loaded.
    """
    cls: object = _registry.get(name)
    if cls is None:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if point.name == name:
                try:
                    cls = point.load()
                except Exception as error:
                    raise ValueError(
                        f"policy {name!r} ({point.value}) cannot be loaded: {error!r}"
                    ) from error
                break
    if cls is None:
        raise ValueError(f"unknown policy {name!r}; known are: {', '.join(policy_names())}")
    if not (isinstance(cls, type) and issubclass(cls, EvictionPolicy)):
        raise ValueError(f"policy {name!r} is not a subclass of EvictionPolicy: {cls!r}")
    return cls


register_policy(LRU)
