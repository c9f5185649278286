"""``kvstore config``: check and explain a configuration; its schema, reference and a sample."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs

from kvstore.assembly import NAMES_ADDED, key_ring, namespace_of, rows_for, spans_of
from kvstore.concurrency import open_at_once
from kvstore.config import Config, DiskConfig, TierConfig
from kvstore.config.describe import Key, json_schema, keys_of, reference, sample, shown_value
from kvstore.config.values import without_passwords
from kvstore.errors import ConfigError, KVStoreError
from kvstore.gate import codecs_of
from kvstore.observe.recorder import fault_of
from kvstore.plugins import create_tier
from kvstore.sizes import format_size
from kvstore.tiers.disk.format import Geometry
from kvstore.tiers.disk.lane import lane_folders
from kvstore.tiers.disk.namespace import FILE_NAME, Namespace
from kvstore.tiers.disk.trust import Trust, open_folder
from kvstore.tiers.headroom import available_bytes, most_bytes
from kvstore.tiers.pinned import round_to_page
from kvstore.tiers.sealing import Sealer
from kvstore.tools.config_file import read_config
from kvstore.tools.output import parse_bytes, print_json, print_table
from kvstore.types import TierPlace

__all__ = ["add_config_arguments", "run_config"]


@dataclass(frozen=True)
class Line:
    """One value of a configuration, explained.

    Attributes:
        key: with its table, as ``tiers[0].path``.
        given: whether it was said, or is a default.
        text: what follows from it.
        warning: what will go wrong, if anything.
        refused: whether a server would not start with it, where there is a warning.
    """

    key: str
    value: str
    given: bool
    text: str = ""
    warning: str = ""
    refused: bool = True


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "check a configuration and explain each of its values"
    check = actions.add_parser("check", help=text, description=text)
    check.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="TOML, or JSON as given to vLLM, SGLang or LMCache; "
        "without one, the environment (KVSTORE_CONFIG...)",
    )
    check.add_argument(
        "--chunk-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="the size of a chunk where the server knows it, to count chunks",
    )
    check.add_argument("--all", action="store_true", help="also values that are defaults")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, text in (
        ("schema", "print the JSON schema of a configuration, for editors"),
        ("sample", "print a TOML file with every key and its default"),
        ("reference", "print the tables of docs/configuration.md"),
    ):
        actions.add_parser(name, help=text, description=text)


def run_config(options: argparse.Namespace) -> int:
    """Run the command; return 1 if the configuration would fail or disappoint."""
    if options.action == "schema":
        print(json.dumps(json_schema(), indent=2))
    elif options.action == "sample":
        print(sample())
    elif options.action == "reference":
        print(reference(), end="")
    else:
        return _check(options)
    return 0


def _check(options: argparse.Namespace) -> int:
    values, said = read_config(options.file)
    config = said
    if options.chunk_bytes is not None and said.chunk_bytes is None:
        config = attrs.evolve(said, chunk_bytes=options.chunk_bytes)
    lines = [*explain(values, config)]
    if options.chunk_bytes not in (None, config.chunk_bytes):
        warning = f"counts, and not the {options.chunk_bytes} of --chunk-bytes"
        lines.append(Line("chunk_bytes", str(config.chunk_bytes), True, "", warning, False))
    if options.file is None or options.file.suffix != ".json":
        # What a server of one's own must say, and others set.
        lines += [*_missing(config), *_of_others(said)]
    warned = [line for line in lines if line.warning]
    if options.json:
        print_json({"values": [asdict(line) for line in lines]})
        return int(bool(warned))
    shown = [line for line in lines if options.all or line.given or line.warning]
    print_table(
        ["key", "value", "meaning"],
        [(line.key, line.value, line.text) for line in shown],
    )
    for line in warned:
        print(f"{'WRONG' if line.refused else 'WARNING'} {line.key}: {line.warning}")
    refused = any(line.refused for line in warned)
    print(f"{options.file or 'the environment'}: can{'not' if refused else ''} be used here")
    return int(bool(warned))


def explain(values: Mapping[str, Any], config: Config) -> Iterator[Line]:
    """Explain each value, tier after tier."""
    given = {key for key in values if key != "tiers"}
    given |= {"cpu_bytes_to_use"} if "host" in values else set()
    for name, key in keys_of(Config).items():
        if name != "tiers":
            yield _line("", key, getattr(config, name), name in given, config)
    said = values.get("tiers") or [{}] * len(config.tiers)
    for index, tier in enumerate(config.tiers):
        prefix = f"tiers[{index}]."
        its: Mapping[str, Any] = said[index] if isinstance(said[index], Mapping) else {}
        if isinstance(tier, TierConfig):
            shared = _shared(tier)
            yield Line(f"{prefix}type", tier.type, True, _free(shared) if shared else "")
            if warning := _not_created(tier, config):
                yield Line(prefix.rstrip("."), tier.type, True, warning=warning)
            for name, value in tier.parameters.items():
                yield Line(f"{prefix}{name}", without_passwords(value), True)
        for name, key in keys_of(type(tier)).items():
            if name in ("type", "parameters"):
                continue
            short = "disk" in values and name in ("path", "capacity_bytes")
            yield _line(prefix, key, getattr(tier, name), name in its or short, config, tier)


def _missing(config: Config) -> Iterator[Line]:
    for key in ("chunk_bytes", "identity"):
        try:
            getattr(config, f"given_{key}")
        except ConfigError as error:
            yield Line(key, "none", False, warning=str(error))


def _of_others(config: Config) -> Iterator[Line]:
    """The folders of the same name that are of another identity, where that is known."""
    with contextlib.suppress(KVStoreError):  # A codec's and a name's faults are told of their keys.
        size = config.given_chunk_bytes
        ours = namespace_of(config, size, round_to_page(size), "", config.given_identity)
        for folder in (path / ours.name for _, path in _disks(config)):
            try:
                if os.path.lexists(folder / FILE_NAME):
                    ours.match(folder)
            except KVStoreError as error:
                yield Line("namespace", ours.name, True, warning=str(error))


def _line(
    prefix: str,
    key: Key,
    value: Any,
    given: bool,
    config: Config,
    tier: DiskConfig | TierConfig | None = None,
) -> Line:
    text, warning = key.text.partition(";")[0].partition(". ")[0].rstrip(".").replace("``", "`"), ""
    refused = True
    if key.name == "eviction_policy" and tier is None:
        value = config.host_policy
    if key.is_size and value:
        text = f"{value:,} bytes"
        text += _chunks(key.name, value, config, tier)
    if isinstance(tier, DiskConfig) and key.name == "path":
        text = "; ".join(_free(path) for path in tier.paths)
        name = config.namespace or "*"
        faults = (_unusable(path, tier.strict_modes, name) for path in tier.paths)
        warning = "; ".join(filter(None, faults))
    if isinstance(tier, DiskConfig) and key.name == "capacity_bytes":
        warning = _too_small(tier, config)
        refused = bool(warning)
        # A server takes what there is, and says so.
        warning = warning or _too_large(tier, config)
    if key.name == "cpu_bytes_to_use":
        if (available := available_bytes()) is not None and value > available:
            text += f"; {format_size(available)} are available now"
        if value > (memory := most_bytes()):
            warning = f"{format_size(memory)} is all that this process may use here"
    if value and tier is None and key.name in _WHEN_OPENED:
        try:
            _WHEN_OPENED[key.name](config)
        except KVStoreError as error:
            warning = str(error).removeprefix(f"{key.name}: ")
            warning = warning.removeprefix(f"{key.name} = {str(value)!r}: ")
    return Line(f"{prefix}{key.name}", shown_value(key, value), given, text, warning, refused)


def _check_control(config: Config) -> None:
    try:
        from kvstore.control.server import is_socket, loopback, token_of
    except ImportError as error:
        raise ConfigError(
            f"needs aiohttp, pip install 'kvstore-offload[control]' ({error})"
        ) from error
    try:
        if (where := config.control) is not None and loopback(where) is None:
            is_socket(Path(where))
        if config.control_token_file is not None:
            if where is None:
                raise ConfigError("control_token_file belongs to control, which is not given")
            token_of(config.control_token_file)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_keys(config: Config) -> None:
    if (keys := key_ring(config)) is not None:
        Sealer(keys, "")


def _check_recording(config: Config) -> None:
    if config.record_trace is None:
        return
    try:
        fd = open_at_once(config.record_trace, os.O_RDWR)
    except FileNotFoundError:
        if not os.access(there := _existing(config.record_trace.parent), os.W_OK | os.X_OK):
            raise ConfigError(f"{there} cannot be written to by this user") from None
        return
    except OSError as error:
        raise ConfigError(str(error.strerror)) from error
    try:
        if (fault := fault_of(fd)) is not None:
            raise ConfigError(fault)
    finally:
        os.close(fd)


def _check_identity(config: Config) -> None:
    if taken := NAMES_ADDED & (config.identity or {}).keys():
        raise ConfigError(f"{min(taken)} is a name that kvstore adds itself: call it otherwise")


def _check_codec(config: Config) -> None:
    codecs_of(config, config.chunk_bytes or 2, config.identity)


_WHEN_OPENED: dict[str, Callable[[Config], object]] = {
    "control": _check_control,
    "control_token_file": _check_control,
    "encryption_keys": _check_keys,
    "disk_codec": lambda config: _check_codec(attrs.evolve(config, store_codec=None)),
    "store_codec": lambda config: _check_codec(attrs.evolve(config, disk_codec=None)),
    "spans": lambda config: spans_of(config, [], lambda: None, 1),
    "record_trace": _check_recording,
    "identity": _check_identity,
    "namespace": lambda config: Namespace(str(config.namespace), {}).check_name(),
}
"""What opening a store would find wrong with a value; raises what that would raise."""


def _not_created(tier: TierConfig, config: Config) -> str:
    """Why a store cannot be created, if so. No server is asked, and no directory is made."""
    if (shared := _shared(tier)) is not None:
        return _unusable(shared, tier.parameters.get("strict_modes", True))
    try:
        size, codec = config.chunk_bytes or 2, None
        if tier.is_store:
            # What is wrong with the codec itself is told of its own key.
            with contextlib.suppress(ConfigError):
                codec = codecs_of(config, size, config.identity).get("store_codec")
        place = TierPlace("check", {}, size, key_ring(config), codec=codec)
        create_tier(tier.type, place, tier.parameters)
    except ValueError as error:
        return str(error)
    return ""


def _shared(tier: TierConfig) -> Path | None:
    """The directory that hosts share, if the tier is one."""
    url = str(tier.parameters.get("url", ""))
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:///") else None


def _chunks(name: str, size: int, config: Config, tier: DiskConfig | TierConfig | None) -> str:
    """How many chunks that is, as the engine counts them."""
    chunk_bytes = config.chunk_bytes
    if chunk_bytes is None or name in ("chunk_bytes", "record_trace_bytes", "compaction_rate"):
        return ""
    if name == "cpu_bytes_to_use":
        return f", {rows_for(config, chunk_bytes).rows:,} chunks"
    if not isinstance(tier, DiskConfig):
        return f", {size // chunk_bytes:,} chunks"
    geometry = _geometry(tier, config, chunk_bytes)
    if name == "segment_bytes":
        return f", {geometry.slots:,} chunks"
    segments = size // len(tier.paths) // geometry.file_bytes * len(tier.paths)
    return f", {segments:,} segments of {geometry.slots:,} chunks: {segments * geometry.slots:,}"


def _geometry(tier: DiskConfig, config: Config, chunk_bytes: int) -> Geometry:
    """The geometry of the segments that the tier will make."""
    size = chunk_bytes
    with contextlib.suppress(ConfigError):
        if (codec := codecs_of(config, chunk_bytes, None).get("codec")) is not None:
            size = codec.coded_bytes(chunk_bytes)
    share = tier.capacity_bytes // len(tier.paths)
    return Geometry.wanted(tier.segment_bytes, share, round_to_page(size), size)


def _existing(path: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _free(path: Path) -> str:
    free = shutil.disk_usage(_existing(path)).free
    return f"{'exists' if os.path.exists(path) else 'will be made'}, {format_size(free)} free"


def _unusable(path: Path, strict: bool, namespace: str = "*") -> str:
    """Why no cache can lie there, or its namespace not be used, as far as that can be seen."""
    try:
        if stat.S_ISLNK(path.lstat().st_mode):
            return f"{path} is a symbolic link; give the folder itself"
    except (FileNotFoundError, NotADirectoryError):
        pass  # It will be made, or cannot be: see below.
    except OSError as error:
        return str(error.strerror)
    there = _existing(path)
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to by this user"
    try:
        os.close(open_folder(there, Trust(strict), own=False))
        for cache in (file.parent for file in path.glob(f"{namespace}/{FILE_NAME}")):
            for folder in (cache, *(lane for _, lane in lane_folders(cache))):
                os.close(open_folder(folder, Trust(strict), own=True))
    except OSError as error:  # Of a folder that is not trusted, too.
        return str(error)
    return ""


def _disks(config: Config) -> Iterator[tuple[DiskConfig, Path]]:
    return (
        (one, path) for one in config.tiers if isinstance(one, DiskConfig) for path in one.paths
    )


def _held(path: Path) -> int:
    """Bytes of the segments below a folder, as far as they are there still."""
    held = 0
    with contextlib.suppress(OSError):
        for file in path.rglob("*.safetensors"):
            with contextlib.suppress(OSError):
                held += file.lstat().st_size
    return held


def _too_small(tier: DiskConfig, config: Config) -> str:
    """Say that no file of the tier is small enough, if so."""
    share = tier.capacity_bytes // len(tier.paths)
    if tier.segment_bytes is not None and share < tier.segment_bytes:
        return f"smaller than segment_bytes ({format_size(tier.segment_bytes)}): lower that"
    if config.chunk_bytes is not None:
        geometry = _geometry(tier, config, config.chunk_bytes)
        if not geometry.slots:
            return "segment_bytes is less than one chunk and its record take"
        if share < geometry.file_bytes:
            return f"smaller than one segment, of {geometry.file_bytes} bytes"
    return ""


def _too_large(tier: DiskConfig, config: Config) -> str:
    """Say that the files of all tiers will not fit on a drive of this one, if so."""
    wanted, held = Counter[int](), Counter[int]()
    for each, path in _disks(config):
        drive = _existing(path).stat().st_dev
        wanted[drive] += each.capacity_bytes // len(each.paths)
        held[drive] += _held(path)
    for path in tier.paths:
        drive, free = _existing(path).stat().st_dev, shutil.disk_usage(_existing(path)).free
        if wanted[drive] > free + held[drive]:
            return (
                f"{format_size(wanted[drive])} are wanted on the drive of {path}, where "
                f"{format_size(free)} are free and {format_size(held[drive])} are used already"
            )
    return ""
