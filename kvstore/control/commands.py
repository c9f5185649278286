"""Commands: what can be asked of a store while it serves, as JSON in and JSON out.

A command on chunks names them by ``keys`` (hexadecimal) or, where the server knows how, by
``tokens`` of a prompt. Every command that changes something takes ``dry_run``, and begins a job.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kvstore.config import Config, DiskConfig, check_size
from kvstore.control.jobs import ACTIONS, Act, Action, Changing, Job, Reencrypt, Reset, places
from kvstore.core import Core
from kvstore.core.residency.base import TierView
from kvstore.errors import ConfigError, KVStoreError
from kvstore.plugins import Choice, build_policy, check_policy
from kvstore.policies.parameters import shown
from kvstore.tiers import Tier
from kvstore.tiers.pinned import round_to_page
from kvstore.types import MAX_KEY_BYTES, about

__all__ = ["FORMAT", "Commands", "KeysOf", "check_command"]

logger = logging.getLogger("kvstore")

FORMAT = 1
"""The version of the JSON. A field may be added without a change of it."""

MOST_KEYS, MOST_TOKENS = 2**16, 2**18
"""Most keys, and most tokens, of one command: to read them must not hold the server up."""

MOST_SECONDS = 366 * 24 * 3600
"""Longest time for which chunks are retained."""

MOST_RUNNING, MOST_ENDED = 16, 64
"""Most jobs that run at once, and most ended ones that are remembered."""

Change = tuple[str, Callable[[Core], Callable[[], None]]]
"""A text, and what prepares the change: it may fail, and returns what makes the change."""

KeysOf = Callable[[Sequence[int], Mapping[str, Any]], list[bytes]]
"""Returns the keys of the chunks of a prompt, by its tokens and the other fields of the command.

Raises:
    KVStoreError: if a field does not fit.
"""


class Commands:
    """The commands of one store: see the module's text.

    Args:
        config: the configuration that the store was opened with.
        tiers: the open tiers, in the core's order.
        rows, row_bytes: of host memory.
    """

    def __init__(
        self, config: Config, tiers: Sequence[Tier], rows: int, row_bytes: int, description: str
    ) -> None:
        self._tiers = tiers
        self._rows = rows
        self._row_bytes = row_bytes
        self._description = description
        self._shares = config.tenants
        self._host_policy: str | Choice = config.host_policy
        # Of each entry of the configuration the first tier is the one that is written to.
        owned = [n for n, tier in enumerate(tiers) if not (tier.is_peer or tier.is_store)]
        entries = [entry for entry in config.tiers if not entry.is_store]
        those = list(zip(owned, entries, strict=True))
        self._policies: dict[int, str | Choice] = {n: entry.eviction_policy for n, entry in those}
        self._capacities = {n: e.capacity_bytes for n, e in those if isinstance(e, DiskConfig)}
        self._act: Act | None = None
        self._reset: Callable[[], None] | None = None
        self._keys_of: KeysOf | None = None
        self._refused: dict[str, str] = {}
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    def attach(self, act: Act, reset: Callable[[], None]) -> None:
        """Name the ways to call the core, and to forget everything, which is called in a step."""
        self._act, self._reset = act, reset

    def name_keys(self, keys_of: KeysOf) -> None:
        """Let commands name chunks by tokens."""
        self._keys_of = keys_of

    def refuse(self, command: str, reason: str) -> None:
        """Refuse a command from now on.

        Raises:
            ConfigError: if there is no such command.
        """
        check_command(command)
        self._refused[command] = reason

    async def status(self) -> dict[str, Any]:
        """Return settings, statistics and jobs."""
        stats, rates, left = await self._acting(
            lambda core, now: (
                core.stats(),
                {t.number: round(t.compactor.rate * self._slot_bytes(t)) for t in core.owned},
                core.changing,
            )
        )
        tiers = [
            {
                "tier": number,
                "name": told.name,
                "medium": told.medium,
                "eviction_policy": _named(self._policies.get(number)),
                "capacity_bytes": self._capacities.get(number),
                "compaction_rate": rates.get(number, 0),
            }
            for number, told in enumerate(stats.tiers)
        ]
        host = {
            "bytes": stats.rows * self._row_bytes,
            "allocated_bytes": self._rows * self._row_bytes,
            "eviction_policy": _named(self._host_policy),
        }
        return {
            "version": FORMAT,
            "pid": os.getpid(),
            "description": self._description,
            "takes_tokens": self._keys_of is not None,
            "refused": dict(self._refused),
            "host": host,
            "tiers": tiers,
            "changing": left,
            "stats": asdict(stats),
            "jobs": [job.told() for job in self._jobs.values()],
        }

    async def run(self, command: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a command; returns its job, or for a dry run what it would do.

        Raises:
            KVStoreError: if the command, or a field of it, cannot be used. Nothing is done then.
        """
        check_command(command)
        if command in self._refused:
            raise KVStoreError(f"this server takes no {command}: {self._refused[command]}")
        given = dict(body)
        dry = _flag(given, "dry_run")
        if command in ACTIONS:
            keys = self._keys(given)
            _check_fields(command, given)
            action: Action = ACTIONS[command](given)
            if dry:
                found = await places(self._acting, keys)
                return self._dry(command, {"keys": len(keys), "places": found})
            return await self._begin(command, action, keys)
        if command == "reset":
            _check_fields(command, given)
            if dry:
                held = await self._acting(lambda core, now: core.stats())
                chunks = {"host": held.chunks} | {tier.name: tier.chunks for tier in held.tiers}
                return self._dry(command, {"chunks": chunks})
            assert self._reset is not None
            return await self._begin(command, Reset(self._reset), [])
        if command == "reencrypt":
            _check_fields(command, given)
            owned = {number: self._tiers[number] for number in self._policies}
            outdated = {number: await tier.outdated_segments() for number, tier in owned.items()}
            if dry:
                counts = {number: len(segments) for number, segments in outdated.items()}
                return self._dry(command, {"segments": counts})
            return await self._begin(command, Reencrypt(outdated), [])
        changes = self._changes(given)
        if dry:
            return self._dry(command, {"would_change": [text for text, _ in changes]})

        def change(core: Core) -> None:
            # Whatever may fail comes first: all of it is changed, or nothing.
            for commit in [prepare(core) for _, prepare in changes]:
                commit()

        begun = await self._begin(command, Changing(change), [])
        said = "; ".join(text for text, _ in changes)
        logger.info("kvstore: control: %s", said, extra=about("control.settings"))
        return begun

    def job(self, number: int) -> Job | None:
        """Return a job by its number, if it is remembered."""
        return self._jobs.get(number)

    async def end(self) -> None:
        """Cancel the jobs that run, as the store is being closed."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- inside ----------------------------------------------------------------------------

    async def _acting(self, call: Callable[[Core, float], Any]) -> Any:
        if self._act is None:
            raise KVStoreError("the store is being opened: ask again")
        return await self._act(call)

    @staticmethod
    def _dry(command: str, told: dict[str, Any]) -> dict[str, Any]:
        return {"version": FORMAT, "command": command, "dry_run": True, **told}

    async def _begin(self, command: str, action: Action, keys: list[bytes]) -> dict[str, Any]:
        running = [job for job in self._jobs.values() if job.state == "running"]
        if len(running) >= MOST_RUNNING:
            raise KVStoreError(f"{len(running)} jobs run already: wait, or cancel one")
        if command == "reencrypt" and (mine := [j for j in running if j.command == command]):
            raise KVStoreError(f"job {mine[0].number} does that already: wait, or cancel it")
        if self._act is None:
            raise KVStoreError("the store is being opened: ask again")
        self._number += 1
        job = self._jobs[self._number] = Job(self._number, command, len(keys))
        task = asyncio.get_running_loop().create_task(job.run(self._act, action, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ended = [each for each in self._jobs.values() if each.state != "running"]
        for each in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._jobs[each.number]
        return {"version": FORMAT, **job.told()}

    def _keys(self, given: dict[str, Any]) -> list[bytes]:
        """Take the keys out of a command.

        Raises:
            KVStoreError: if there are none, or they cannot be used.
        """
        keys, tokens = given.pop("keys", None), given.pop("tokens", None)
        named: dict[str, Any] = {
            name: given.pop(name) for name in ("model", "cache_salt", "tenant") if name in given
        }
        if (keys is None) == (tokens is None):
            raise ConfigError("name the chunks by keys or by tokens, one of them")
        kind, listed, most = "keys", keys, MOST_KEYS
        if tokens is not None:
            kind, listed, most = "tokens", tokens, MOST_TOKENS
        if not isinstance(listed, list) or len(listed) > most:
            raise ConfigError(
                f"{kind} must be a list of at most {most}: name more in more commands"
            )
        if tokens is None:
            if named:
                raise ConfigError(f"{next(iter(named))} belongs to tokens, not to keys")
            return list(dict.fromkeys(map(_key, listed)))
        if self._keys_of is None:
            raise ConfigError("this server does not say how it names chunks: name them by keys")
        if not all(isinstance(token, int) and 0 <= token < 2**31 for token in listed):
            raise ConfigError("tokens must be whole numbers, the ids of tokens")
        return list(dict.fromkeys(self._keys_of(listed, named)))

    def _changes(self, given: dict[str, Any]) -> list[Change]:
        """Check new settings."""
        changes: list[Change] = []
        host, tiers = given.pop("host", {}), given.pop("tiers", {})
        _check_fields("settings", given)
        for name, table in (("host", host), ("tiers", tiers)):
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: must be a table of keys")
        _check_table("host", host, ("bytes", "eviction_policy"))
        if host:
            changes.append(self._host_change(host))
        named: dict[int, str] = {}
        for name, table in tiers.items():
            number = self._tier(name)
            if number in named:
                raise ConfigError(f"tiers.{named[number]} and tiers.{name} are the same tier")
            named[number] = name
            changes += self._tier_changes(number, f"tiers.{name}", table)
        if not changes:
            raise ConfigError("settings: nothing to change; allowed are: host, tiers")
        return changes

    def _tier(self, name: str) -> int:
        """Return the number of an owned tier, by its number or its name."""
        for number in self._policies:
            if name in (str(number), _name_of(self._tiers[number])):
                return number
        known = ", ".join(f"{n} ({_name_of(self._tiers[n])})" for n in self._policies)
        raise ConfigError(f"tiers.{name}: unknown; tiers that can be changed: {known or 'none'}")

    def _host_change(self, table: Mapping[str, Any]) -> Change:
        parts = []
        rows: int | None = None
        choice = _policy("host.eviction_policy", table)
        if "bytes" in table:
            size = check_size("host.bytes", table["bytes"], self._row_bytes)
            rows = size // self._row_bytes
            if rows > self._rows:
                raise ConfigError(
                    f"host.bytes = {size}: at most {self._rows * self._row_bytes}, which were "
                    "allocated at the start"
                )
            parts.append(f"{rows} chunks")
        if choice is not None:
            parts.append(str(choice))

        def prepare(core: Core) -> Callable[[], None]:
            named = self._host_policy if choice is None else choice
            most = core.policy_capacity(None) if rows is None else rows
            # One for so many: its parts, and those of tenants, follow the size.
            policy = build_policy(named, most, self._shares)

            def commit() -> None:
                core.limit_rows(most)
                core.set_policy(None, policy)
                self._host_policy = named

            return commit

        return f"host memory: {', '.join(parts)}", prepare

    def _slot_bytes(self, tier: TierView) -> int:
        """What a chunk takes there."""
        return round_to_page(tier.payload_bytes) or self._row_bytes

    def _tier_changes(self, number: int, where: str, table: object) -> list[Change]:
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: must be a table of keys")
        _check_table(where, table, ("capacity_bytes", "eviction_policy", "compaction_rate"))
        changes: list[Change] = []
        choice = _policy(f"{where}.eviction_policy", table)
        if "compaction_rate" in table:
            rate = check_size(f"{where}.compaction_rate", table["compaction_rate"])

            def prepare(core: Core) -> Callable[[], None]:
                (tier,) = (tier for tier in core.owned if tier.number == number)
                return partial(tier.compactor.set_rate, rate / self._slot_bytes(tier))

            changes.append((f"{where}: compaction of {rate} bytes per second", prepare))
        capacity: int | None = None
        if "capacity_bytes" in table:
            capacity = check_size(f"{where}.capacity_bytes", table["capacity_bytes"], 1)
            self._tiers[number].segments_in(capacity)
        size = None if capacity is None else f"{capacity} bytes"
        if told := [str(part) for part in (size, choice) if part is not None]:
            text = f"{where}: {', '.join(told)}"
            changes.append((text, partial(self._prepare_tier, number, capacity, choice)))
        return changes

    def _prepare_tier(
        self, number: int, capacity: int | None, choice: str | Choice | None, core: Core
    ) -> Callable[[], None]:
        tier = self._tiers[number]
        # The policy of this moment: another command may have set it since.
        named = self._policies[number] if choice is None else choice
        segments = [] if capacity is None else tier.segments_in(capacity)
        slots = sum(segments) * core.segment_slots(number) or core.policy_capacity(number)
        policy = build_policy(named, slots, self._shares)

        def commit() -> None:
            if capacity is None:
                core.set_policy(number, policy)
            else:
                tier.resize(capacity)
                core.limit_segments(number, segments, policy)
                self._capacities[number] = capacity
            self._policies[number] = named

        return commit


FIELDS: dict[str, tuple[str, ...]] = {
    "retain": ("seconds", "host"),
    "release": ("cold",),
}
"""Fields of commands, beside those that name chunks and ``dry_run``."""


def check_command(command: str) -> None:
    """
    Raises:
        ConfigError: if there is no such command.
    """
    known = [*ACTIONS, "reencrypt", "reset", "settings"]
    if command not in known:
        raise ConfigError(f"unknown command {command!r}; known are: {', '.join(known)}")


def _check_fields(command: str, given: Mapping[str, Any]) -> None:
    allowed = FIELDS.get(command, ())
    _check_table(command, given, allowed)
    if command == "retain":
        seconds = given.get("seconds")
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 < seconds <= MOST_SECONDS:  # type: ignore[operator]
            raise ConfigError(
                f"retain: seconds must be given, a number above 0 and at most {MOST_SECONDS}"
            )
    for name in ("host", "cold"):
        if name in given and not isinstance(given[name], bool):
            raise ConfigError(f"{command}: {name} must be true or false")


def _check_table(where: str, given: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"unknown field {where}.{key}; allowed are: {', '.join(allowed) or 'none'}"
            )


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false")
    return value


def _key(text: object) -> bytes:
    try:
        key = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"keys: {text!r:.80} is not 1 to {MAX_KEY_BYTES} bytes in hexadecimal")
    return key


def _policy(where: str, table: Mapping[str, Any]) -> Choice | None:
    """Return the policy that is to follow, if there is one."""
    if "eviction_policy" not in table:
        return None
    value = table["eviction_policy"]
    try:
        return check_policy(Choice.parse(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise ConfigError(f"{where} = {shown(value)}: {error}") from error


def _named(policy: str | Choice | None) -> str | None:
    return None if policy is None else str(policy)


def _name_of(tier: Tier) -> str:
    name = getattr(tier, "name", "")
    return name if isinstance(name, str) else ""
