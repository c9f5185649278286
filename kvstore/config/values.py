"""Values of a configuration: converters, which check what was given, and JSON schemas of them.

A converter returns the value as the configuration holds it, and raises `ValueError` that says what
is allowed. Its argument's type is what a type checker accepts in the constructor.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.plugins import Choice, check_filters, check_policy
from kvstore.policies.parameters import shown
from kvstore.policies.shares import OTHERS, Share, Shares
from kvstore.sizes import parse_size
from kvstore.types import Flow

__all__ = ["SCHEMAS", "check_size", "parse_size"]

AUTO = "auto"

IO_BACKENDS = ("auto", "aio", "direct", "mmap", "buffered", "portable")

MAX_IO_THREADS = 64

MAX_LANE = 63

MAX_THRESHOLD = 1000
"""Highest `store_threshold`."""

MIN_RECORDING = 2**20
"""Lowest `record_trace_bytes`."""

MOST_GUARANTEED = 0.9
"""Most that may be guaranteed to tenants together: the others need some room, too."""

LEAST_WEIGHT = 1e-6

MAX_SECONDS = 10**9
"""Longest time that is accepted, 31 years."""

MAX_BYTES = 2**60
"""Largest size that is accepted; a larger one must be a mistake."""

_NO_PATH = re.compile(r"[~$]|[A-Za-z][\w+.-]*:/")
"""What is not expanded, and an address, whose slashes a path may have folded."""

Size = int | str
"""Bytes, or text such as "64GiB"."""

FilePath = str | os.PathLike[str]

PluginTable = Mapping[str, Any]
"""`name` of a policy or filter, and its parameters."""


def _size(value: object, least: int) -> int:
    size = parse_size(value)
    if size < least:
        raise ValueError(f"must be at least {least} byte{'s' if least > 1 else ''}")
    if size > MAX_BYTES:
        raise ValueError(f"must be at most {MAX_BYTES} bytes")
    return size


def check_size(name: str, value: object, least: int = 0) -> int:
    """Parse `value` as a size in bytes, as in the configuration.

    Raises:
        ConfigError: if it is not a size; the message calls it `name`.
    """
    try:
        return _size(value, least)
    except ValueError as error:
        raise ConfigError(f"{name} = {shown(value)}: {error}") from error


def without_passwords(value: object) -> str:
    """A value as text, without what stands before the host of an address."""
    return re.sub(r"(?<!/)//(?!/).*@", "//***@", str(value))


def any_size(value: Size) -> int:
    return _size(value, 0)


def positive_size(value: Size) -> int:
    return _size(value, 1)


def recording_size(value: Size) -> int:
    return _size(value, MIN_RECORDING)


def _whole(value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"must be a whole number from {least} to {most}")
    return value


def io_threads(value: int) -> int:
    return _whole(value, 1, MAX_IO_THREADS)


def lane(value: int) -> int:
    return _whole(value, 0, MAX_LANE)


def threshold(value: int) -> int:
    return _whole(value, 0, MAX_THRESHOLD)


def seconds(value: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_SECONDS:
        raise ValueError(f"must be a number of seconds above 0, and at most {MAX_SECONDS}")
    return float(value)


def pace(value: float | str) -> float | str:
    if isinstance(value, str) and value == AUTO:
        return AUTO
    try:
        if isinstance(value, str):
            raise ValueError
        return 0.0 if value == 0 and not isinstance(value, bool) else seconds(value)
    except ValueError as error:
        raise ValueError('must be "auto", 0, or a number of seconds') from error


def _share(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(f"must be a number from 0 to {most:g}")
    return float(value)


def half(value: float) -> float:
    return _share(value, 0.5)


def nine_tenths(value: float) -> float:
    return _share(value, 0.9)


def flag(value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def folder_name(value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be the name of a folder")
    return value


def _path(value: object, what: str) -> Path:
    try:
        if not isinstance(value, (str, os.PathLike)) or not str(value):
            raise ValueError("empty, or not a path")
        if b"\0" in os.fsencode(value):
            raise ValueError("a zero byte")
        path = Path(os.path.expanduser(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"must be the path of a {what}") from error
    if _NO_PATH.match(str(path)):
        raise ValueError(
            f"must be the path of a {what}: no address, no variable and no user that is unknown"
        )
    return path.absolute()


def file_path(value: FilePath) -> Path:
    return _path(value, "file")


def folders(value: FilePath | Sequence[FilePath]) -> Path | tuple[Path, ...]:
    if not isinstance(value, (list, tuple)):
        return _path(value, "folder")
    paths = tuple(_path(one, "folder") for one in value)
    if not paths or len(set(map(os.path.realpath, paths))) < len(paths):
        raise ValueError("must be the path of a folder, or a list of different ones")
    return paths if len(paths) > 1 else paths[0]


def socket(value: FilePath) -> str:
    if isinstance(value, (str, os.PathLike)) and str(value).strip():
        where = os.fspath(value)
        where = os.path.expanduser(where) if isinstance(where, str) else "~"
        if "\0" not in where and not _NO_PATH.match(where):
            return where
    raise ValueError("must be the path of a socket, or HOST:PORT of a loopback address")


def io_backend(value: str) -> str:
    if value not in IO_BACKENDS:
        raise ValueError(f"must be one of: {', '.join(IO_BACKENDS)}")
    return str(value)


def flow(value: Flow | str) -> Flow:
    try:
        return Flow(value)
    except ValueError as error:
        allowed = ", ".join(each.value for each in Flow)
        raise ValueError(f"must be one of: {allowed}") from error


def policy(value: str | Choice | PluginTable) -> str | Choice:
    choice = check_policy(value)
    return choice if choice.parameters else choice.name


def filters(
    value: str | Choice | PluginTable | Sequence[str | Choice | PluginTable],
) -> tuple[Choice, ...]:
    return check_filters(value)


def identity(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a table of model, dtype, layout and the like")
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"may hold text, numbers, lists and tables only ({error})") from error
    return dict(value)


def keys_source(value: str) -> str:
    """Return where the keys of an encryption are."""
    if not isinstance(value, (str, os.PathLike)) or os.fspath(value) in ("", "env:"):
        raise ValueError("must be the path of a file, env:NAME, or module:function")
    return os.fspath(value)


def table(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a table of keys")
    return dict(value)


def tenants(value: Shares | Mapping[str, Mapping[str, float]]) -> Shares:
    if isinstance(value, Shares):
        return value
    given = table(value)
    for name in given:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name!r}: must be text in UTF-8") from None
    shares = {name: _tenant(name, share) for name, share in given.items()}
    if OTHERS in shares:
        raise ValueError(f"{OTHERS}: all that have no share of their own are called so; use *")
    others = shares.pop("*", Share())
    made = Shares(shares, others)
    if made.guaranteed > MOST_GUARANTEED + 1e-9:
        text = f"{made.guaranteed:g} is guaranteed in all: must be at most {MOST_GUARANTEED}"
        raise ValueError(text)
    return made


def _tenant(name: str, share: object) -> Share:
    if not isinstance(share, Mapping):
        raise ValueError(f"{name}: must be a table of {', '.join(_SHARE)}")
    for key, each in share.items():
        if key not in _SHARE:
            raise ValueError(f"{name}.{key}: unknown key, allowed are {', '.join(_SHARE)}")
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 <= each < math.inf:
            raise ValueError(f"{name}.{key}: must be a number of at least 0")
    made = Share(**share)
    if not 0 < made.maximal <= 1:
        raise ValueError(f"{name}.maximal: must be above 0, and at most 1")
    if made.guaranteed > made.maximal:
        raise ValueError(f"{name}.guaranteed: must be at most maximal, which is {made.maximal:g}")
    if not LEAST_WEIGHT <= made.weight <= 1 / LEAST_WEIGHT:
        raise ValueError(f"{name}.weight: must be from {LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}")
    return made


_TEXT = {"type": "string", "minLength": 1}
_SIZE_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpP]?[iI]?[bB]?)\s*$"}
_PLUGIN = {
    "anyOf": [
        _TEXT,
        {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
    ]
}


def _bytes(least: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "integer", "minimum": least, "maximum": MAX_BYTES}, _SIZE_TEXT]}


def _one_or_more(schema: Mapping[str, Any], least: int) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "array", "items": schema, "minItems": least}]}


_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}

_SHARE = {
    "guaranteed": {"type": "number", "minimum": 0, "maximum": 1},
    "maximal": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "weight": {"type": "number", "exclusiveMinimum": 0},
}

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any_size": _bytes(0),
    "positive_size": _bytes(1),
    "recording_size": _bytes(MIN_RECORDING),
    "io_threads": {"type": "integer", "minimum": 1, "maximum": MAX_IO_THREADS},
    "lane": {"type": "integer", "minimum": 0, "maximum": MAX_LANE},
    "keys_source": _TEXT,
    "threshold": {"type": "integer", "minimum": 0, "maximum": MAX_THRESHOLD},
    "seconds": _SECONDS,
    "pace": {"anyOf": [{"const": AUTO}, {"const": 0}, _SECONDS]},
    "half": {"type": "number", "minimum": 0, "maximum": 0.5},
    "nine_tenths": {"type": "number", "minimum": 0, "maximum": 0.9},
    "flag": {"type": "boolean"},
    "folder_name": _TEXT,
    "file_path": _TEXT,
    "folders": _one_or_more(_TEXT, 1),
    "socket": _TEXT,
    "io_backend": {"enum": list(IO_BACKENDS)},
    "flow": {"enum": [each.value for each in Flow]},
    "policy": _PLUGIN,
    "filters": _one_or_more(_PLUGIN, 0),
    "identity": {"type": "object"},
    "table": {"type": "object"},
    "tenants": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": _SHARE,
            "additionalProperties": False,
        },
    },
}
"""The JSON schema of what each converter accepts, by its name."""
