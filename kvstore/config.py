"""Configuration: one typed model for Python, TOML and vLLM's extra_config.

Every value is checked when the configuration is built. An invalid one is refused with a message
that names the key, the value and what is allowed.

This module is long because each key stands beside its check and its message.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvstore.errors import ConfigError
from kvstore.plugins import Choice, check_filters, check_policy, check_tier, is_store
from kvstore.policies.parameters import shown
from kvstore.sizes import parse_size
from kvstore.types import Flow

__all__ = ["Config", "DiskConfig", "TierConfig", "check_size"]

_T = TypeVar("_T")
_Check = Callable[[object], Any]

MAX_IO_THREADS = 64

AUTO = "auto"

MAX_THRESHOLD = 1000
"""Highest `store_threshold`."""

MIN_RECORDING = 2**20
"""Lowest `record_trace_bytes`."""

MAX_BYTES = 2**60
"""Largest size that is accepted; a larger one must be a mistake."""

HOST_ALONE = Choice("hit-density", (("whole_stores", True),))
"""The policy of host memory without a slower tier."""


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A disk tier.

    Attributes:
        path: folder of the cache, created if it does not exist; or a list of folders, one on
            each disk, which receive segments in turn.
        capacity_bytes: hard limit for the files of this process's lane, plus lanes on the same
            path that nobody has used for an hour; those are removed to make room. Each process
            has its own limit. Several paths get equal shares of it.
        eviction_policy: name of a policy, or a table of `name` and its parameters.
        segment_bytes: size of one segment file, at most.
        io: I/O backend: auto, aio, direct, mmap, buffered or portable.
        io_threads: threads that do I/O, for each path.
        lane: lane to write to; by default the first free one.
        share: whether the lanes of other processes on the same path are also read.
        share_after_reset: whether processes that have all been reset share again. Only for
            replicas that are all reset exactly once for each change of weights.
        admission: filters that decide what is written; written as one name, as a
            table of `name` and parameters, or as a list of these.
        compaction_rate: bytes per second that may be copied to empty sparse segments while
            serving, so that their files can be removed; 0 to turn compaction off.
        flow: when chunks are written: write-through, demote or exclusive; see `Flow`.
        strict_modes: whether to refuse folders and files that users other than this process's
            user and root own or may write to.
    """

    path: Path | tuple[Path, ...]
    capacity_bytes: int
    eviction_policy: str | Choice = "lru"
    segment_bytes: int = 256 * 2**20
    io: str = "auto"
    io_threads: int = 4
    lane: int | None = None
    share: bool = True
    share_after_reset: bool = False
    compaction_rate: int = 0
    admission: tuple[Choice, ...] = ()
    flow: Flow = Flow.WRITE_THROUGH
    strict_modes: bool = True

    is_store: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self, _DISK)

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], where: str = "", beside: Collection[str] = ()
    ) -> DiskConfig:
        """Check `values` and build the configuration of one disk tier.

        Args:
            where: prefix of keys in messages.
            beside: further keys to list as allowed; the caller handles them.

        Raises:
            ConfigError: for an unknown key or a value that cannot be used.
        """
        return _build(cls, _DISK, values, where, beside)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders, one or more."""
        return self.path if isinstance(self.path, tuple) else (self.path,)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier of another kind than disk: see `kvstore.plugins`.

    Attributes:
        type: the name of the kind.
        parameters: its other keys; the kind decides which are allowed.
        eviction_policy, admission, flow: as for a disk tier.
    """

    type: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    eviction_policy: str | Choice = "lru"
    admission: tuple[Choice, ...] = ()
    flow: Flow = Flow.WRITE_THROUGH

    def __post_init__(self) -> None:
        _check(self, _TIER)
        try:
            check_tier(self.type, self.parameters)
        except ValueError as error:
            raise ConfigError(f"type = {shown(self.type)}: {error}") from error

    @property
    def paths(self) -> tuple[Path, ...]:
        """Always empty: no folder of this machine is known."""
        return ()

    @property
    def is_store(self) -> bool:
        """Whether the tier is a store that other hosts may use, too."""
        return is_store(self.type)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration.

    Attributes:
        cpu_bytes_to_use: host memory for chunks, a hard limit.
        eviction_policy: name of the policy for host memory, or a table of `name`
            and its parameters. By default lru if there are slower tiers, otherwise hit-density
            with `whole_stores`; docs/simulate.md says why.
        admission: filters that decide which chunks enter host memory; written as
            one name, as a table of `name` and parameters, or as a list of these.
        store_threshold: how often a chunk must have been looked up before it is
            stored; n > 1 is short for the filter `reuse` with threshold n.
        tiers: slower tiers, fastest first, stores last.
        chunk_bytes: size of every chunk. vLLM sets it; others must give it.
        identity: what processes and runs must have in common to share chunks: model, dtype,
            layout. vLLM sets it; others must give it if there is a tier. With {}, all that use
            the same paths and sizes share chunks.
        namespace: name of the folder below each tier's path; by default made
            from the model's name and the identity.
        deadline_s: seconds without progress after which a deferred lookup is answered.
        max_wait_s: seconds after which it is answered in any case.
        lease_s: seconds for which promoted chunks are kept for a request that does not ask.
        write_queue_bytes: most bytes on their way to one tier at any time.
        keep_events: whether events are kept for `take_events`; vLLM decides this itself.
        shutdown_timeout_s: seconds that a shutdown waits for copies to slower tiers.
        demote_ahead: largest share of host memory that is kept free or copied ahead of need,
            if a tier's flow copies chunks when host memory evicts them.
        recompute_s: seconds in which the server computes a chunk; a chunk that would take longer
            to read is a miss. auto: as the server reports; 0: never compare.
        pinned_share: share of host memory, and of each tier, that `pin` may hold; 0 for none.
        record_trace: file that records what requests look up, as hashes.
        record_trace_bytes: most bytes of that recording; the older half is replaced.
        fetch_queued: whether chunks are fetched for requests that the server has queued, before it
            asks for them.
        control: socket at which the store is inspected and changed while it serves: a path, or
            ``HOST:PORT`` of a loopback address; by default there is none.
        control_token_file: file with the token that changes over a port must name.
        spans: whether waits and moves become OpenTelemetry spans: see `kvstore.observe.tracing`.
    """

    cpu_bytes_to_use: int
    eviction_policy: str | Choice | None = None
    store_threshold: int = 0
    tiers: tuple[DiskConfig | TierConfig, ...] = ()
    chunk_bytes: int | None = None
    identity: Mapping[str, Any] | None = None
    namespace: str | None = None
    deadline_s: float = 2.0
    max_wait_s: float = 30.0
    lease_s: float = 10.0
    write_queue_bytes: int = 256 * 2**20
    shutdown_timeout_s: float = 30.0
    keep_events: bool = False
    admission: tuple[Choice, ...] = ()
    demote_ahead: float = 0.25
    recompute_s: float | str = AUTO
    pinned_share: float = 0.5
    record_trace: Path | None = None
    record_trace_bytes: int = 2**30
    spans: bool = False
    fetch_queued: bool = True
    control: str | None = None
    control_token_file: Path | None = None

    def __post_init__(self) -> None:
        _check(self, _CONFIG)

    @property
    def given_identity(self) -> Mapping[str, Any]:
        """`identity`, for a caller whose engine does not set it.

        Raises:
            ConfigError: if there is a tier and no identity: it may hold another model's chunks.
        """
        if self.identity is None and self.tiers:
            raise ConfigError(
                "missing key identity: name what all processes that share chunks on a tier must "
                'have in common, such as {"model": "m", "weights": "v1", "dtype": "bfloat16"}; {} '
                "shares them with every process that has the same chunk_bytes"
            )
        return self.identity or {}

    @property
    def given_chunk_bytes(self) -> int:
        """`chunk_bytes`, for a caller whose engine does not set it.

        Raises:
            ConfigError: if it is missing.
        """
        if self.chunk_bytes is None:
            raise ConfigError("missing key chunk_bytes: the size of every chunk, in bytes")
        return self.chunk_bytes

    @property
    def compute_pace(self) -> float | None:
        """`recompute_s`, or None if the server reports it."""
        return None if isinstance(self.recompute_s, str) else self.recompute_s

    @property
    def host_policy(self) -> str | Choice:
        """The policy of host memory, chosen or by default."""
        return self.eviction_policy or ("lru" if self.tiers else HOST_ALONE)

    @property
    def host_filters(self) -> tuple[Choice, ...]:
        """All filters of host memory, including the one that `store_threshold` stands for."""
        if self.store_threshold < 2:
            return self.admission
        return (Choice("reuse", (("threshold", self.store_threshold),)), *self.admission)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], ignore: Collection[str] = ()) -> Config:
        """Check `values` and build the configuration.

        Args:
            values: as read from TOML or JSON; sizes may be text such as ``"64GiB"``. ``host``
                is short for ``cpu_bytes_to_use``, and ``disk`` with ``disk_bytes`` for one disk
                tier.
            ignore: keys that another component reads.

        Raises:
            ConfigError: for an unknown key or a value that cannot be used.
        """
        if isinstance(values, Mapping):
            values = {key: value for key, value in values.items() if key not in ignore}
            values = _spelled_out(values)
        return _build(cls, _CONFIG, values, "")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Config:
        """Read the configuration from a TOML file.

        Raises:
            ConfigError: if the file cannot be read, is not TOML or holds a bad value.
        """
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not TOML ({error})") from error
        return cls.from_mapping(values)


_SHORT = ("host", "disk", "disk_bytes")
"""Keys that are short for `cpu_bytes_to_use` and for one disk tier."""


def _spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the keys of `_SHORT` by what they are short for."""
    given = dict(values)
    host, disk, size = (given.pop(key, None) for key in _SHORT)
    if host is not None:
        if "cpu_bytes_to_use" in given:
            raise ConfigError("host is short for cpu_bytes_to_use: give one of them")
        try:
            given["cpu_bytes_to_use"] = parse_size(host)
        except ValueError as error:
            raise ConfigError(f"host = {shown(host)}: {error}") from error
    if disk is None and size is None:
        return given
    if disk is None or size is None:
        missing = "disk, a path" if disk is None else "disk_bytes, the most bytes to use there"
        raise ConfigError(f"missing key {missing}: disk and disk_bytes describe one tier together")
    if "tiers" in given:
        raise ConfigError("disk is short for a tier of type disk: describe it in tiers instead")
    try:
        size = parse_size(size)
    except ValueError as error:
        raise ConfigError(f"disk_bytes = {shown(size)}: {error}") from error
    given["tiers"] = [{"type": "disk", "path": disk, "capacity_bytes": size}]
    return given


def _build(
    cls: type[_T],
    checks: Mapping[str, _Check],
    values: object,
    where: str,
    beside: Collection[str] = (),
) -> _T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or 'configuration'} = {shown(values)}: must be a table of keys")
    prefix = f"{where}." if where else ""
    unknown = [key for key in values if key not in checks]
    if unknown:
        raise ConfigError(
            f"unknown key {prefix}{unknown[0]} = {shown(values[unknown[0]])}; "
            f"allowed are: {', '.join([*checks, *beside])}"
        )
    missing = [key for key in _REQUIRED[cls] if key not in values]
    if missing:
        raise ConfigError(f"missing key {prefix}{', '.join(missing)}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _check(config: object, checks: Mapping[str, _Check]) -> None:
    """Check each value of a new configuration, and replace it with what the check returns."""
    for key, check in checks.items():
        value = getattr(config, key)
        try:
            object.__setattr__(config, key, check(value))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{key} = {shown(value)}: {error}") from error


def _size(least: int) -> _Check:
    def check(value: object) -> int:
        size = parse_size(value)
        if size < least:
            raise ValueError(f"must be at least {least} byte{'s' if least > 1 else ''}")
        if size > MAX_BYTES:
            raise ValueError(f"must be at most {MAX_BYTES} bytes")
        return size

    return check


def check_size(name: str, value: object, least: int = 0) -> int:
    """Parse `value` as a size in bytes, as in the configuration.

    Raises:
        ConfigError: if it is not a size; the message calls it `name`.
    """
    try:
        return int(_size(least)(value))
    except ValueError as error:
        raise ConfigError(f"{name} = {shown(value)}: {error}") from error


def _whole(least: int, most: int) -> _Check:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return check


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number of seconds")
    try:
        seconds = float(value)
    except OverflowError as error:
        raise ValueError("must be a number of seconds that fits a float") from error
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError("must be a number of seconds above 0")
    return seconds


def _recompute(value: object) -> float | str:
    if value == AUTO:
        return AUTO
    try:
        return 0.0 if value == 0 and not isinstance(value, bool) else _seconds(value)
    except ValueError as error:
        raise ValueError('must be "auto", 0, or a number of seconds') from error


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _socket(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip():
        raise ValueError("must be the path of a socket, or HOST:PORT of a loopback address")
    where = os.fspath(value)
    if not isinstance(where, str) or "\0" in where:
        raise ValueError("must be the path of a socket, or HOST:PORT of a loopback address")
    return where


def _policy(value: object) -> str | Choice:
    choice = check_policy(value)
    return choice if choice.parameters else choice.name


def _path(what: str) -> _Check:
    def check(value: object) -> Path:
        try:
            if not isinstance(value, (str, os.PathLike)) or not str(value):
                raise ValueError("empty, or not a path")
            if b"\0" in os.fsencode(value):
                raise ValueError("a zero byte")
            return Path(os.path.expanduser(value)).absolute()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"must be the path of a {what}") from error

    return check


def _flow(value: object) -> Flow:
    try:
        return Flow(value)
    except ValueError as error:
        allowed = ", ".join(each.value for each in Flow)
        raise ValueError(f"must be one of: {allowed}") from error


def _share(most: float) -> _Check:
    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise ValueError(f"must be a number from 0 to {most:g}")
        return float(value)

    return check


_folder = _path("folder")


def _paths(value: object) -> Path | tuple[Path, ...]:
    if not isinstance(value, (list, tuple)):
        folder: Path = _folder(value)
        return folder
    paths = tuple(_folder(one) for one in value)
    if not paths or len(set(paths)) < len(paths):
        raise ValueError("must be the path of a folder, or a list of different ones")
    return paths if len(paths) > 1 else paths[0]


def _one_of(*allowed: str) -> _Check:
    def check(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of: {', '.join(allowed)}")
        return str(value)

    return check


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be the name of a folder")
    return value


def _identity(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a table of model, dtype, layout and the like")
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"may hold text, numbers, lists and tables only ({error})") from error
    return dict(value)


def _optional(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _tiers(value: object) -> tuple[DiskConfig | TierConfig, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError("must be a list of tiers")
    tiers: list[DiskConfig | TierConfig] = []
    for index, tier in enumerate(value):
        where = f"tiers[{index}]"
        if isinstance(tier, (DiskConfig, TierConfig)):
            tiers.append(tier)
            continue
        if not isinstance(tier, Mapping):
            raise ConfigError(f"{where} = {shown(tier)}: must be a table of keys")
        rest = {key: item for key, item in tier.items() if key != "type"}
        if tier.get("type") == "disk":
            tiers.append(_build(DiskConfig, _DISK, rest, where))
            continue
        common = {key: rest.pop(key) for key in list(rest) if key in _TIER}
        table = {"type": tier.get("type"), "parameters": rest, **common}
        tiers.append(_build(TierConfig, {**_TIER, "type": lambda value: value}, table, where))
    for index, tier in enumerate(tiers):
        taken = {path for other in tiers[:index] for path in other.paths}
        for path in taken.intersection(tier.paths):
            raise ConfigError(
                f"tiers[{index}].path = {str(path)!r}: each tier needs a folder of its own"
            )
    for index, (tier, behind) in enumerate(pairwise(tiers)):
        if tier.is_store and not behind.is_store:
            raise ConfigError(
                f"tiers[{index}] is a store and comes before tiers[{index + 1}], which is not: "
                "list disks first, stores last"
            )
    return tuple(tiers)


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a table of keys")
    return dict(value)


_TIER: Mapping[str, _Check] = {
    "parameters": _table,
    "eviction_policy": _policy,
    "admission": check_filters,
    "flow": _flow,
}

_DISK: Mapping[str, _Check] = {
    "path": _paths,
    "capacity_bytes": _size(1),
    "eviction_policy": _policy,
    "segment_bytes": _size(1),
    "io": _one_of("auto", "aio", "direct", "mmap", "buffered", "portable"),
    "io_threads": _whole(1, MAX_IO_THREADS),
    "lane": _optional(_whole(0, 63)),
    "share": _flag,
    "share_after_reset": _flag,
    "compaction_rate": _size(0),
    "admission": check_filters,
    "flow": _flow,
    "strict_modes": _flag,
}

_CONFIG: Mapping[str, _Check] = {
    "cpu_bytes_to_use": _size(1),
    "eviction_policy": _optional(_policy),
    "admission": check_filters,
    "store_threshold": _whole(0, MAX_THRESHOLD),
    "tiers": _tiers,
    "chunk_bytes": _optional(_size(1)),
    "identity": _optional(_identity),
    "namespace": _optional(_name),
    "deadline_s": _seconds,
    "max_wait_s": _seconds,
    "lease_s": _seconds,
    "write_queue_bytes": _size(1),
    "shutdown_timeout_s": _seconds,
    "keep_events": _flag,
    "demote_ahead": _share(0.5),
    "recompute_s": _recompute,
    "pinned_share": _share(0.9),
    "record_trace": _optional(_path("file")),
    "record_trace_bytes": _size(MIN_RECORDING),
    "spans": _flag,
    "fetch_queued": _flag,
    "control": _optional(_socket),
    "control_token_file": _optional(_path("file")),
}

_REQUIRED: Mapping[type, tuple[str, ...]] = {
    Config: ("cpu_bytes_to_use",),
    DiskConfig: ("path", "capacity_bytes"),
    TierConfig: ("type",),
}
