"""The model of the configuration: its keys, their defaults and how they are checked.

Every value is checked when a configuration is built. An invalid one is refused with a message
that names the key, the value and what is allowed.

This module is long because each key stands beside its meaning and its check.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import attrs
from attrs import field
from attrs.converters import optional

from kvstore.config import values as check
from kvstore.errors import NOT_PARSED, ConfigError
from kvstore.plugins import Choice, check_tier, find_tier, tier_names
from kvstore.policies.parameters import shown
from kvstore.policies.shares import Shares
from kvstore.types import Flow

__all__ = ["Config", "DiskConfig", "TierConfig", "read_environment", "read_toml"]

_T = TypeVar("_T", bound=attrs.AttrsInstance)

PREFIX = "KVSTORE_CONFIG"
"""The variable that names a configuration file, and how variables begin that set one key."""

HOST_ALONE = Choice("hit-density", (("whole_stores", True),))
"""The policy of host memory without a slower tier."""

_SHORT = ("host", "disk", "disk_bytes")
"""Keys that are short for `cpu_bytes_to_use` and for one disk tier."""

_SAME = {
    "host": ("cpu_bytes_to_use",),
    "cpu_bytes_to_use": ("host",),
    "disk": ("tiers",),
    "disk_bytes": ("tiers",),
    "tiers": ("disk", "disk_bytes"),
}
"""Keys that a variable takes the place of, beside its own."""


def _named(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Let what the converters raise name the key and the value."""
    return [
        each.evolve(converter=_naming(each.name, each.converter)) if each.converter else each
        for each in fields
    ]


def _naming(key: str, convert: Any) -> Callable[[object], Any]:
    @functools.wraps(convert)
    def converted(value: object) -> Any:
        try:
            return convert(value)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{key} = {shown(value)}: {error}") from error

    return converted


@attrs.frozen(field_transformer=_named)
class DiskConfig:
    """A disk tier.

    Attributes:
        path: folder of the cache, created if it does not exist; or a list of folders, one on
            each disk, which receive segments in turn.
        capacity_bytes: hard limit for the files of this process's lane, plus lanes on the same
            path that nobody has used for an hour; those are removed to make room. Each process
            has its own limit. Several paths get equal shares of it.
        eviction_policy: name of a policy, or a table of `name` and its parameters.
        segment_bytes: size of one segment file, at most; without it 256 MiB, or an eighth of the
            capacity of a path where that is less.
        io: I/O backend: auto, aio, direct, mmap, buffered or portable; see operators.md.
        io_threads: threads that do I/O, for each path; one of them only loads.
        lane: lane to write to; by default the largest free one that fits the capacity, else a
            larger free one, which is trimmed, else a new one.
        share: whether the lanes of other processes on the same path are also read.
        share_after_reset: whether processes that have all been reset share again. Only for
            replicas that are all reset exactly once for each change of weights; see operators.md.
        admission: filters that decide what is written; written as one name, as a
            table of `name` and parameters, or as a list of these.
        compaction_rate: bytes per second that may be copied to empty sparse segments while
            serving, so that their files can be removed; 0 to turn compaction off.
        flow: when chunks are written: write-through, demote or exclusive; see vllm.md.
        strict_modes: whether to refuse folders and files that users other than this process's
            user and root own or may write to; see operators.md.
    """

    path: Path | tuple[Path, ...] = field(converter=check.folders)
    capacity_bytes: int = field(converter=check.positive_size)
    eviction_policy: str | Choice = field(default="lru", converter=check.policy)
    segment_bytes: int | None = field(default=None, converter=optional(check.positive_size))
    io: str = field(default="auto", converter=check.io_backend)
    io_threads: int = field(default=4, converter=check.io_threads)
    lane: int | None = field(default=None, converter=optional(check.lane))
    share: bool = field(default=True, converter=check.flag)
    share_after_reset: bool = field(default=False, converter=check.flag)
    compaction_rate: int = field(default=0, converter=check.any_size)
    admission: tuple[Choice, ...] = field(default=(), converter=check.filters)
    flow: Flow = field(default=Flow.WRITE_THROUGH, converter=check.flow)
    strict_modes: bool = field(default=True, converter=check.flag)

    is_store: ClassVar[bool] = False

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
        return _build(cls, values, where, beside)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders, one or more."""
        return self.path if isinstance(self.path, tuple) else (self.path,)


@attrs.frozen(field_transformer=_named)
class TierConfig:
    """A tier of another kind than disk: see `kvstore.plugins`.

    Attributes:
        type: the name of the kind.
        parameters: its other keys; the kind decides which are allowed.
        eviction_policy, admission, flow: as for a disk tier.
    """

    type: str
    parameters: Mapping[str, Any] = field(
        factory=dict, converter=check.table, repr=check.without_passwords
    )
    eviction_policy: str | Choice = field(default="lru", converter=check.policy)
    admission: tuple[Choice, ...] = field(default=(), converter=check.filters)
    flow: Flow = field(default=Flow.WRITE_THROUGH, converter=check.flow)

    def __attrs_post_init__(self) -> None:
        try:
            check_tier(self.type, self.parameters)
        except ValueError as error:
            raise ConfigError(f"type = {shown(self.type)}: {error}") from error
        if self.is_store and (self.eviction_policy != "lru" or self.flow is Flow.EXCLUSIVE):
            raise ConfigError(
                f"type = {self.type!r}: eviction_policy and the flow 'exclusive' are not for a "
                "store, which others use too and which decides itself what leaves"
            )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Always empty: no folder of this machine is known."""
        return ()

    @property
    def is_store(self) -> bool:
        """Whether the tier is a store that other hosts may use, too."""
        return find_tier(self.type).is_store


def _tiers(
    value: Sequence[DiskConfig | TierConfig | Mapping[str, Any]],
) -> tuple[DiskConfig | TierConfig, ...]:
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
        if "type" not in tier:
            raise ConfigError(f"missing key {where}.type: must be one of {', '.join(tier_names())}")
        rest = dict(tier)
        if rest["type"] == "disk":
            del rest["type"]
            tiers.append(_build(DiskConfig, rest, where))
            continue
        common = attrs.fields_dict(TierConfig).keys() - {"parameters"}
        given = {key: rest.pop(key) for key in common & rest.keys()}
        tiers.append(_build(TierConfig, {"parameters": rest, **given}, where))
    for index, tier in enumerate(tiers):
        taken = {os.path.realpath(path) for other in tiers[:index] for path in other.paths}
        for path in (path for path in tier.paths if os.path.realpath(path) in taken):
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


@attrs.frozen(field_transformer=_named)
class Config:
    """The whole configuration.

    Attributes:
        cpu_bytes_to_use: host memory for chunks of one engine, all of its workers together; a hard
            limit. With data parallel each engine takes as much.
        eviction_policy: name of the policy for host memory, or a table of `name`
            and its parameters: see policies.md. By default lru if there are slower tiers,
            otherwise hit-density with `whole_stores`; simulate.md says why.
        admission: filters that decide which chunks enter host memory; written as
            one name, as a table of `name` and parameters, or as a list of these.
        store_threshold: how often a chunk must have been looked up before it is
            stored; n > 1 is short for the filter `reuse` with threshold n.
        tiers: slower tiers, fastest first, stores last.
        chunk_bytes: size of every chunk. vLLM sets it; others must give it.
        identity: what processes and runs must have in common to share chunks: model, dtype,
            layout. vLLM sets it, and takes more that must be equal; others must give it if there is
            a tier. With {}, all that use the same paths and sizes share chunks.
        namespace: name of the folder below each tier's path; by default made
            from the model's name and the identity. That of another identity is refused.
        deadline_s: seconds without progress after which a deferred lookup is answered.
        max_wait_s: seconds after which it is answered in any case.
        lease_s: seconds for which promoted chunks are kept for a request that has stopped asking.
        write_queue_bytes: most bytes on their way to one tier at any time.
        keep_events: whether events are kept for `take_events`; vLLM decides this itself.
        shutdown_timeout_s: seconds that a shutdown waits for copies to slower tiers.
        demote_ahead: largest share of host memory that is kept free or copied ahead of need,
            if a tier's flow copies chunks when host memory evicts them. What is copied can still
            be hit. A prompt that is stored in one step and is larger than this waits for copies,
            or is stored in part.
        recompute_s: seconds in which the server computes a chunk; a chunk that would take longer
            to read is a miss. auto: as the server reports; 0: what a tier has is waited for in any
            case, to spare a busy device.
        pinned_share: share of host memory, and of each tier, that pinned or retained chunks may
            take; 0 for none. What is guaranteed to tenants is left to them.
        record_trace: file that records what requests look up, as hashes; see simulate.md.
        record_trace_bytes: most bytes of that recording; the older half is replaced.
        fetch_queued: whether chunks are fetched for requests that the server has queued, before it
            asks for them; see vllm.md.
        control: socket at which the store is inspected and changed while it serves: a path, or
            ``HOST:PORT`` of a loopback address; by default there is none. See control.md.
        control_token_file: file with the token that changes over a port must name.
        spans: whether waits and moves become OpenTelemetry spans; see watching.md.
        tenants: shares of host memory, of each disk and of stores with `capacity_bytes`, by name of
            the tenant, and "*" for all others together: `guaranteed` and `maximal` parts from 0 to
            1, and a `weight`; {} for equal shares. By default keys know no tenants. See tenants.md.
        encryption_keys: where the keys are with which chunks are encrypted on disks and in stores:
            path of a file, ``env:NAME`` of a variable, or ``module:function``. By default nothing
            is encrypted. See encryption.md.
        disk_codec: file that ``kvstore gate`` has written for this model: disks hold chunks in half
            the bytes, with the codec that it has tried. Numbers are rounded. By default they are
            stored as they are. See codec.md.
        store_codec: the same for stores.
    """

    cpu_bytes_to_use: int = field(converter=check.positive_size)
    eviction_policy: str | Choice | None = field(default=None, converter=optional(check.policy))
    store_threshold: int = field(default=0, converter=check.threshold)
    tiers: tuple[DiskConfig | TierConfig, ...] = field(default=(), converter=_tiers)
    chunk_bytes: int | None = field(default=None, converter=optional(check.positive_size))
    identity: Mapping[str, Any] | None = field(default=None, converter=optional(check.identity))
    namespace: str | None = field(default=None, converter=optional(check.folder_name))
    deadline_s: float = field(default=2.0, converter=check.seconds)
    max_wait_s: float = field(default=30.0, converter=check.seconds)
    lease_s: float = field(default=10.0, converter=check.seconds)
    write_queue_bytes: int = field(default=256 * 2**20, converter=check.positive_size)
    shutdown_timeout_s: float = field(default=30.0, converter=check.seconds)
    keep_events: bool = field(default=False, converter=check.flag)
    admission: tuple[Choice, ...] = field(default=(), converter=check.filters)
    demote_ahead: float = field(default=0.25, converter=check.half)
    recompute_s: float | str = field(default=check.AUTO, converter=check.pace)
    pinned_share: float = field(default=0.5, converter=check.nine_tenths)
    record_trace: Path | None = field(default=None, converter=optional(check.file_path))
    record_trace_bytes: int = field(default=2**30, converter=check.recording_size)
    spans: bool = field(default=False, converter=check.flag)
    fetch_queued: bool = field(default=True, converter=check.flag)
    control: str | None = field(default=None, converter=optional(check.socket))
    control_token_file: Path | None = field(default=None, converter=optional(check.file_path))
    tenants: Shares | None = field(default=None, converter=optional(check.tenants))
    encryption_keys: str | None = field(default=None, converter=optional(check.keys_source))
    disk_codec: Path | None = field(default=None, converter=optional(check.file_path))
    store_codec: Path | None = field(default=None, converter=optional(check.file_path))

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
            ignore: keys that another component reads, which are allowed.

        Raises:
            ConfigError: for an unknown key or a value that cannot be used.
        """
        if isinstance(values, Mapping):
            _check_names(cls, values, "", (*_SHORT, *sorted(ignore)))
            values = {key: value for key, value in values.items() if key not in ignore}
            values = _spelled_out(values)
        return _build(cls, values)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Config:
        """Read the configuration from a TOML file.

        Raises:
            ConfigError: if the file cannot be read, is not TOML or holds a bad value.
        """
        return cls.from_mapping(read_toml(path))

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Config:
        """Read the configuration from environment variables.

        ``KVSTORE_CONFIG`` names a TOML file. ``KVSTORE_CONFIG_DEADLINE_S=1`` sets one key, in the
        place of the file's; ``host``, ``disk`` and ``disk_bytes`` are keys, too. A value is
        text, or else what it means in TOML: ``KVSTORE_CONFIG_IDENTITY='{model = "m"}'``.

        Raises:
            ConfigError: as `from_toml`; for a variable of that name which is no key; if there is
                no such variable.
        """
        return cls.from_mapping(read_environment(variables))


def read_environment(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The values that `Config.from_environment` takes.

    Raises:
        ConfigError: for a file that cannot be read or is not TOML; for a variable that is no key;
            if there is no variable.
    """
    path, begin = variables.get(PREFIX), f"{PREFIX}_"
    names = sorted(name for name in variables if name.startswith(begin))
    given = {name.removeprefix(begin).lower(): name for name in names}
    if not given and not path:
        raise ConfigError(f"no configuration: give one, or set {PREFIX} to the path of one")
    values = read_toml(path) if path else {}
    keys = attrs.fields_dict(Config)
    for key in given:
        # What means the same in the file gives way.
        for other in _SAME.get(key, ()):
            values.pop(other, None)
    for key, name in given.items():
        if key not in keys and key not in _SHORT:
            allowed = [*keys, *_SHORT]
            raise ConfigError(
                f"unknown variable {name}: {_meant(key, allowed)}after {begin} comes one of: "
                f"{', '.join(allowed).upper()}"
            )
        values[key] = _from_text(keys.get(key), variables[name])
    return values


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: if it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except NOT_PARSED as error:
        raise ConfigError(f"{path}: not TOML ({error})") from error


def _from_text(key: attrs.Attribute[Any] | None, text: str) -> Any:
    """The value of an environment variable: text where the key takes that, else as in TOML."""
    try:
        convert: Any = None if key is None else key.converter
        if convert is not None:
            convert(text)
        # Quotes are what a file of variables may leave in them.
        if not text.startswith(("[", '"', "'")):
            return text
    except ConfigError:
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except NOT_PARSED:
        return text


def _spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the keys of `_SHORT` by what they are short for."""
    given = dict(values)
    host, disk, size = (given.pop(key, None) for key in _SHORT)
    if host is not None:
        if "cpu_bytes_to_use" in given:
            raise ConfigError("host is short for cpu_bytes_to_use: give one of them")
        given["cpu_bytes_to_use"] = check.check_size("host", host, 1)
    if disk is None and size is None:
        return given
    if disk is None or size is None:
        missing = "disk, a path" if disk is None else "disk_bytes, the most bytes to use there"
        raise ConfigError(f"missing key {missing}: disk and disk_bytes describe one tier together")
    if "tiers" in given:
        raise ConfigError("disk is short for a tier of type disk: describe it in tiers instead")
    size = check.check_size("disk_bytes", size, 1)
    try:
        disk = check.folders(disk)
    except ValueError as error:
        raise ConfigError(f"disk = {shown(disk)}: {error}") from error
    given["tiers"] = [{"type": "disk", "path": disk, "capacity_bytes": size}]
    return given


def _build(cls: type[_T], values: object, where: str = "", beside: Collection[str] = ()) -> _T:
    if not isinstance(values, Mapping):
        name = "" if where else "; Config.from_toml reads a file"
        raise ConfigError(
            f"{where or 'configuration'} = {shown(values)}: must be a table of keys{name}"
        )
    prefix = f"{where}." if where else ""
    keys = attrs.fields_dict(cls)
    _check_names(cls, values, prefix, beside)
    missing = [key for key, each in keys.items() if each.default is attrs.NOTHING]
    missing = [key for key in missing if key not in values]
    if missing:
        raise ConfigError(f"missing key {prefix}{', '.join(missing)}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _check_names(
    cls: type[Any], values: Mapping[str, Any], prefix: str, beside: Collection[str]
) -> None:
    """Refuse keys that are neither fields of `cls` nor in `beside`."""
    keys = attrs.fields_dict(cls)
    for key in values:
        if key in keys or key in beside:
            continue
        allowed = [*keys, *beside]
        # A text may be a secret.
        is_number = isinstance(values[key], (int, float))
        value = f" = {shown(values[key])}" if is_number else ""
        if cls is Config and key in attrs.fields_dict(DiskConfig):
            raise ConfigError(
                f"unknown key {key}{value}; it is a key of a tier: instead of disk and disk_bytes "
                'give "tiers": [{"type": "disk", "path": ..., "capacity_bytes": ..., '
                f'"{key}": ...}}]'
            )
        raise ConfigError(
            f"unknown key {prefix}{key}{value}; "
            f"{_meant(key, allowed)}allowed are: {', '.join(allowed)}"
        )


def _meant(key: object, allowed: Collection[str]) -> str:
    text = str(key).lower()
    close = [each for each in allowed if len(text) > 3 and each.startswith(text)]
    close = close or difflib.get_close_matches(text, allowed, 1)
    return f"did you mean {close[0]}? " if close else ""
