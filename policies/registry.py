"""Registry of eviction policies and admission filters by name.

Each is found by its name in the configuration. Built-in ones are registered
here; a package adds its own by decorator, or without being imported first, by
an entry point in the group ``kvstore.policies`` or ``kvstore.filters`` whose
name is the policy's or filter's name and whose value is the class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.arc import ARC
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.doorkeeper import DoorkeeperFilter
from kvstore.policies.endurance import EnduranceBudget
from kvstore.policies.fifo import FIFO
from kvstore.policies.hitdensity import HitDensity
from kvstore.policies.lru import LRU
from kvstore.policies.parameters import check_parameters, parameters_of
from kvstore.policies.reuse import ReuseThreshold
from kvstore.policies.s3fifo import S3FIFO
from kvstore.policies.sieve import SIEVE

__all__ = [
    "FILTERS",
    "POLICIES",
    "Registry",
    "create_filter",
    "create_policy",
    "filter_names",
    "find_filter",
    "find_policy",
    "policy_names",
    "register_filter",
    "register_policy",
]

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)
_P = TypeVar("_P", bound=type[EvictionPolicy])
_F = TypeVar("_F", bound=type[AdmissionFilter])


class Registry(Generic[_T]):
    """Classes of one kind, by name.

    Args:
        kind: name of the kind in messages.
        base: base class of all classes.
        group: group of entry points that add more classes.
    """

    def __init__(self, kind: str, base: type[_T], group: str) -> None:
        self.kind = kind
        self.base = base
        self.group = group
        self.classes: dict[str, type[_T]] = {}
        # To find them takes long: the files of all installed packages are read.
        self._provided: dict[str, type[_T]] = {}

    def register(self, cls: _C) -> _C:
        """Class decorator: make a class known under its `name`.

        Raises:
            ValueError: if the class is of another kind, or has no name, or another has taken it.
        """
        self._check(cls.__qualname__, cls)
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{self.kind} {cls.__qualname__} needs a class attribute `name`")
        taken = self.classes.get(name)
        if taken is not None and taken is not cls:
            raise ValueError(f"{self.kind} name {name!r} is already taken by {taken.__qualname__}")
        self.classes[name] = cls
        return cls

    def names(self) -> list[str]:
        """List every name that is registered or provided by an installed package, sorted."""
        found = {point.name for point in entry_points(group=self.group)}
        return sorted(found | self.classes.keys())

    def has(self, name: str) -> bool:
        """Whether `names` includes it. For names known so far this does not scan all packages."""
        return name in self.classes or name in self._provided or name in self.names()

    def find(self, name: str) -> type[_T]:
        """Return the class called `name`.

        Raises:
            ValueError: if there is none (the message lists all names), or if the package
                that provides it cannot be loaded.
        """
        known = self.classes.get(name) or self._provided.get(name)
        if known is not None:
            return known
        for point in entry_points(group=self.group):
            if point.name == name:
                try:
                    cls = point.load()
                except Exception as error:
                    raise ValueError(
                        f"{self.kind} {name!r} ({point.value}) cannot be loaded: {error!r}"
                    ) from error
                self._provided[name] = self._check(name, cls)
                return self._provided[name]
        raise ValueError(f"unknown {self.kind} {name!r}; known are: {', '.join(self.names())}")

    def _check(self, name: str, cls: object) -> type[_T]:
        if isinstance(cls, type) and issubclass(cls, self.base):
            if inspect.isabstract(cls):
                lacks = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
                raise ValueError(f"{self.kind} {name!r} lacks methods: {lacks}")
            try:
                parameters_of(cls)
            except Exception as error:
                raise ValueError(f"{self.kind} {name!r}: {error}") from error
            return cls
        raise ValueError(f"{self.kind} {name!r} is not a subclass of {self.base.__name__}: {cls!r}")

    def checked(self, name: str, parameters: dict[str, Any]) -> type[_T]:
        """Return the class called `name` if it takes these parameters.

        Raises:
            ValueError: as `find`; for a parameter that it does not take, or of another type.
        """
        cls = self.find(name)
        check_parameters(f"{self.kind} {name!r}", cls, parameters)
        return cls

    def built(self, name: str, arguments: tuple[int, ...], parameters: dict[str, Any]) -> _T:
        """Return one of the class called `name`.

        Raises:
            ValueError: as `checked`, and if its constructor raises anything.
        """
        cls = self.checked(name, parameters)
        try:
            return cls(*arguments, **parameters)
        except (ValueError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(f"{self.kind} {name!r}: its constructor raised {error!r}") from error


POLICIES: Registry[EvictionPolicy] = Registry("policy", EvictionPolicy, "kvstore.policies")  # type: ignore[type-abstract]
FILTERS: Registry[AdmissionFilter] = Registry("filter", AdmissionFilter, "kvstore.filters")  # type: ignore[type-abstract]

register_policy: Callable[[_P], _P] = POLICIES.register
register_filter: Callable[[_F], _F] = FILTERS.register
policy_names, find_policy = POLICIES.names, POLICIES.find
filter_names, find_filter = FILTERS.names, FILTERS.find


def create_policy(name: str, capacity: int, **parameters: Any) -> EvictionPolicy:
    """Build the policy called `name` for a tier of `capacity` chunks.

    Raises:
        ValueError: as `find_policy`; for a parameter that the policy does not
            take, of another type or out of range, naming what is allowed.
    """
    return POLICIES.built(name, (capacity,), parameters)


def create_filter(name: str, capacity: int, chunk_bytes: int, **parameters: Any) -> AdmissionFilter:
    """Build the filter called `name` for a tier of `capacity` chunks of `chunk_bytes` each.

    Raises:
        ValueError: as `find_filter`; for a parameter that the filter does not
            take, of another type or out of range, naming what is allowed.
    """
    return FILTERS.built(name, (capacity, chunk_bytes), parameters)


for _policy in (LRU, FIFO, ARC, SIEVE, S3FIFO, HitDensity):
    register_policy(_policy)
for _filter in (ReuseThreshold, DoorkeeperFilter, EnduranceBudget):
    register_filter(_filter)
