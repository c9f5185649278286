"""Plugins: policies, filters and tiers, found by name.

A kind of tier is a subclass of `kvstore.tiers.Tier` with a `name`. Its constructor takes a
`TierPlace` and keyword parameters with defaults (numbers, strings or booleans), which the
configuration may set. A package adds its own with `register_tier`, or with an entry point in the
group ``kvstore.tiers``.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvstore.errors import ConfigError, KVStoreError
from kvstore.policies import (
    AdmissionFilter,
    Chain,
    EvictionPolicy,
    create_filter,
    create_policy,
)
from kvstore.policies.admission import TenantFilters
from kvstore.policies.guard import guarded_filter, guarded_policy
from kvstore.policies.parameters import parameters_of, shown
from kvstore.policies.registry import FILTERS, POLICIES, Registry
from kvstore.policies.shares import Shares
from kvstore.policies.tenants import Tenants
from kvstore.sizes import parse_size
from kvstore.tiers.base import Tier
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import RecoveredTier, TierPlace, about

__all__ = [
    "Choice",
    "TierPlace",
    "abandon_tiers",
    "build_filters",
    "build_policy",
    "check_filters",
    "check_policy",
    "check_tier",
    "create_tier",
    "find_tier",
    "open_tier",
    "register_tier",
    "tier_names",
]

logger = logging.getLogger("kvstore")

MOST_TEXT = 1000
"""Most characters of a choice: to read more of them would hold a server up."""

TRIAL_CAPACITY = 1000
"""Capacity, in chunks, with which a choice is tried out when the configuration is checked."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of a plugin, and the parameters that differ from their defaults.

    Example:
        Choice.parse("reuse(threshold=3)") == Choice("reuse", (("threshold", 3),))
    """

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, value: object, registry: Registry[Any]) -> Choice:
        """Build a choice from a configuration value: a name, or a table of `name` and parameters.

        Raises:
            ValueError: if it is neither; the message lists all names of the registry.
        """
        if isinstance(value, Choice):
            return value

        def wrong(what: str) -> ValueError:
            return ValueError(f"{what}; known are: {', '.join(registry.names())}")

        if isinstance(value, str):
            name, parameters = value, {}
        elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            parameters = dict(value)
            name = parameters.pop("name", None)
            if not isinstance(name, str):
                raise wrong("the table needs a name")
        else:
            raise wrong(f"must be a {registry.kind}'s name, or a table of name and parameters")
        if not registry.has(name):
            raise wrong(f"unknown {registry.kind}")
        return cls(name, tuple((key, _size(key, value)) for key, value in parameters.items()))

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse a choice from a command line: ``name`` or ``name(parameter=value, ...)``.

        Raises:
            ValueError: if it is written otherwise.
        """
        if len(text) > MOST_TEXT:
            raise ValueError(f"{text:.40}...: must be at most {MOST_TEXT} characters")
        match = re.fullmatch(r"\s*([\w.+-]+)\s*(?:\((.*)\))?\s*", text)
        if match is None:
            raise ValueError(f"{text!r}: write a name, or name(parameter=value, ...)")
        parameters: dict[str, Any] = {}
        for part in filter(None, (match[2] or "").split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"{text!r}: {part.strip()!r} is not parameter=value")
            if (key := key.strip()) in parameters:
                raise ValueError(f"{text!r}: {key} is given twice")
            parameters[key] = _size(key, _literal(value.strip()))
        return cls(match[1], tuple(parameters.items()))

    def __str__(self) -> str:
        if not self.parameters:
            return self.name
        parameters = ", ".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}({parameters})"


def build_policy(
    choice: str | Choice, capacity: int, shares: Shares | None = None, *, guards: bool = True
) -> EvictionPolicy:
    """Create the policy for a tier of `capacity` chunks.

    Args:
        shares: of tenants; with them each tenant has such a policy of its own.
        guards: whether another one takes the place of a policy of others that fails.

    Raises:
        ConfigError: as `kvstore.policies.create_policy` raises ValueError.
    """
    chosen = Choice(choice) if isinstance(choice, str) else choice

    def make(capacity: int) -> EvictionPolicy:
        try:
            made = create_policy(chosen.name, capacity, **dict(chosen.parameters))
            return guarded_policy(made, _tell_fault) if guards else made
        except MemoryError:
            raise
        except Exception as error:
            # Of the size that its tier has, when the store is opened, for one.
            raise ConfigError(str(error) or repr(error)) from error

    return make(capacity) if shares is None else Tenants(capacity, make, shares)


def build_filters(
    choices: Sequence[Choice],
    capacity: int,
    chunk_bytes: int,
    shares: Shares | None = None,
    *,
    guards: bool = True,
) -> AdmissionFilter | None:
    """Create one filter that admits what all of `choices` admit, or None if there are none.

    Args:
        shares: of tenants; with them each tenant has such filters of its own, but for budgets,
            which belong to all.
        guards: whether everything is admitted where a filter of others fails.

    Raises:
        ConfigError: as `kvstore.policies.create_filter` raises ValueError.
    """

    def made(choice: Choice, capacity: int) -> AdmissionFilter:
        try:
            its = create_filter(choice.name, capacity, chunk_bytes, **dict(choice.parameters))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return guarded_filter(its, _tell_fault) if guards else its

    def of_each(choice: Choice) -> AdmissionFilter:
        whole = made(choice, capacity)
        if shares is None or whole.spends:
            return whole
        return TenantFilters(capacity, chunk_bytes, partial(made, choice), shares)

    filters = [of_each(each) for each in choices]
    if len(filters) > 1:
        return Chain(filters)
    return filters[0] if filters else None


def _tell_fault(what: str) -> None:
    raised = sys.exception() is not None
    logger.error("%s", what, extra=about("plugin.failed", error=what), exc_info=raised)


def check_policy(value: object) -> Choice:
    """Return the policy that the configuration value `value` chooses.

    Raises:
        ValueError: if there is no such policy, or it does not take those parameters.
    """
    choice = Choice.of(value, POLICIES)
    create_policy(choice.name, TRIAL_CAPACITY, **dict(choice.parameters))
    return choice


def check_filters(value: object) -> tuple[Choice, ...]:
    """Return the filters that `value` of a configuration chooses: a name, a table, or a list.

    Raises:
        ValueError: if one is unknown or does not take those parameters.
    """
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    values = list(value) if several else [value]  # type: ignore[call-overload]
    choices = tuple(Choice.of(each, FILTERS) for each in values)
    for each in choices:
        create_filter(each.name, TRIAL_CAPACITY, 2**20, **dict(each.parameters))
    return choices


def _size(parameter: str, value: Any) -> Any:
    """Parse the value as a size if its parameter is one: its name contains "bytes"."""
    return parse_size(value) if "bytes" in parameter and isinstance(value, str) else value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


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
    """List every kind of tier, sorted."""
    return sorted({"disk", *_kinds.names()})


def check_tier(name: object, parameters: Mapping[str, Any]) -> str:
    """Return the name of a kind of tier other than disk, if it takes these parameters.

    Raises:
        ValueError: if there is no such kind, or it does not take one of them.
    """
    if not isinstance(name, str) or not (name == "disk" or _kinds.has(name)):
        raise ValueError(f"must be one of: {', '.join(tier_names())}")
    _kinds.checked(name, _sizes_parsed(name, parameters))
    return name


find_tier = _kinds.find
"""Returns the class of a kind of tier other than disk; a ValueError if there is none."""


def _sizes_parsed(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parse what a kind of tier takes as a number of bytes."""
    found = dict(parameters)
    known = parameters_of(_kinds.find(name)) if parameters else {}
    for key, value in parameters.items():
        if isinstance(value, str) and key in known and known[key].type is int:
            try:
                found[key] = _size(key, value)
            except ValueError as error:
                raise ValueError(f"{key} = {shown(value)}: {error}") from error
    return found


def create_tier(name: str, place: TierPlace, parameters: Mapping[str, Any]) -> Tier:
    """Create a tier of this kind without opening it.

    Raises:
        ValueError: as `check_tier`, for a value that the kind refuses, and where chunks are to be
            encrypted and the kind does not do that.
    """
    given = _sizes_parsed(name, parameters)
    make: Any = _kinds.checked(name, given)
    try:
        tier: Tier = make(place, **given)
    except (ValueError, KVStoreError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"its constructor raised {error!r}") from error
    if place.keys is not None and not tier.encrypts:
        raise ValueError("it does not encrypt chunks: leave it out, or encryption_keys")
    if place.keys is not None:
        tier.key_ring = place.keys
    if place.codec is not None and not tier.encodes:
        raise ValueError("it does not encode chunks: leave it out, or store_codec")
    return tier


def open_tier(tier: Tier, region: PinnedRegion) -> RecoveredTier:
    """Open a tier; one of others may raise, or return, anything.

    Raises:
        KVStoreError: if it cannot be opened.
    """
    ours = type(tier).__module__.startswith("kvstore.tiers.")
    try:
        recovered: Any = tier.open(region)
    except Exception as error:
        if ours or isinstance(error, (KVStoreError, MemoryError)):
            raise
        raise ConfigError(f"{type(tier).__name__}.open raised {error!r}") from error
    if isinstance(recovered, RecoveredTier):
        return recovered
    if inspect.iscoroutine(recovered):
        recovered.close()
    raise ConfigError(f"{type(tier).__name__}.open returned {recovered!r}, not a RecoveredTier")


def abandon_tiers(tiers: Iterable[Tier]) -> None:
    """Release what tiers have begun; what one of others raises stops nobody, and is logged."""
    for tier in tiers:
        try:
            tier.abandon()
        except Exception as error:
            name = type(tier).__name__
            logger.exception(
                "%s cannot be abandoned: %r",
                name,
                error,
                extra=about("tier.not_closed", tier=name),
            )
