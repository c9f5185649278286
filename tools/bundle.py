"""``kvstore export``, ``kvstore import`` and ``kvstore show``: chunks carried and looked at."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import time

import numpy as np
import numpy.typing as npt

from kvstore.errors import BlockKeyError, ConfigError, KVStoreError
from kvstore.maintenance.bundle import (
    export_bundle,
    import_bundle,
    places_of,
    read_whole,
    the_namespace,
    unread,
)
from kvstore.maintenance.payloads import sealer_of
from kvstore.maintenance.survey import NamespaceSurvey
from kvstore.sizes import format_size
from kvstore.tiers.codec import DTYPES as CODED
from kvstore.tiers.codec import Codec
from kvstore.tools.output import age, print_json, show_progress, tell_unchecked
from kvstore.types import check_key

__all__ = ["DTYPES", "parse_age", "parse_key", "run_export", "run_import", "run_show"]

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8")


def parse_key(option: str, text: str) -> bytes:
    """A key from hex.

    Raises:
        ConfigError: if it is none; the message begins with `option`.
    """
    try:
        return check_key(bytes.fromhex(text))
    except BlockKeyError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: must be the key in hex") from error


MOST_AGE = 1e10
"""Seconds, three hundred years."""


def parse_age(option: str, text: str) -> float:
    """Parse an age, such as ``"90s"``, ``"15m"``, ``"36h"`` or ``"7d"``, to seconds.

    Raises:
        ConfigError: for anything else; the message begins with `option`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else -1
    if not 0 <= seconds <= MOST_AGE:
        raise ConfigError(
            f'{option} {text!r:.60}: allowed are ages such as "90s", "15m", "36h", "7d"'
        )
    return seconds


def run_export(options: argparse.Namespace) -> int:
    """Write a bundle; return 1 if a chunk was left out."""
    keys = None
    if options.key:
        keys = [parse_key("--key", text) for text in options.key]
    since = 0.0
    if options.used is not None:
        since = (time.time() - parse_age("--used", options.used)) * 1000
    with show_progress("bytes") as show:
        done = export_bundle(
            options.path,
            options.file,
            keys=keys,
            used_since_ms=since,
            replace=options.force,
            encryption_keys=options.keys,
            progress=show,
        )
    if options.json:
        print_json(dataclasses.asdict(done))
    else:
        for fault in done.faults:
            print(f"WRONG {fault}")
        print(f"{options.file}: {done.chunks} chunks, {format_size(done.bytes)}")
        tell_unchecked(done.unchecked, options.keys)
    return int(bool(done.faults))


def run_import(options: argparse.Namespace) -> int:
    """Store the chunks of a bundle; return 1 if a chunk was wrong, or is not there in the end."""
    with show_progress() as show:
        done = import_bundle(
            options.file,
            options.path,
            capacity_bytes=options.capacity,
            keys=options.keys,
            strict_modes=options.strict_modes,
            progress=show,
        )
    if options.json:
        print_json(dataclasses.asdict(done))
    else:
        for fault in done.faults:
            print(f"WRONG {fault}")
        before = f", {done.there:,} of them before" if done.there else ""
        print(
            f"{options.path}/{done.namespace}: has {done.stored:,} of {done.chunks:,} chunks now"
            f"{before}"
        )
        if done.stored < done.chunks and not done.faults:
            print("its lane holds no more (see --capacity), or could not be written: see the log")
    return int(bool(done.faults) or done.stored < done.chunks)


def run_show(options: argparse.Namespace) -> int:
    """Show one chunk; return 1 if it is damaged.

    Raises:
        KVStoreError: if it is not there, or has no whole number of elements.
    """
    key = parse_key("key", options.key)
    namespace = the_namespace(options.path)
    place = places_of(namespace, [key]).get(key)
    if place is None:
        raise KVStoreError(f"{options.path} holds no chunk {key.hex()}{unread(namespace)}")
    sealer = sealer_of(options.keys, namespace.digest)
    place, payload = read_whole(place, sealer)
    # What cannot be read is not whole, whatever its key.
    checked = place.proof.checkable(sealer) or payload is None
    told: dict[str, object] = {
        "namespace": namespace.name,
        "segment": str(place.path),
        "slot": place.slot,
        "bytes": place.size,
        "digest": place.proof.value.hex(),
        "encrypted": place.proof.sealed,
        "whole": payload is not None if checked else None,
        "stored_ms": place.stored_ms,
        "read_ms": place.read_ms,
        "reads": place.reads,
    }
    if options.dtype is not None and not checked:
        raise KVStoreError("the chunk is encrypted, with a key that is not known: see --keys")
    if payload is not None and options.dtype is not None:
        plain = place.proof.check(payload, sealer) or b""
        told |= statistics(_decoded(plain, namespace, options.dtype), options.dtype)
    if options.json:
        print_json(told)
        return int(checked and payload is None)
    told["stored_ms"] = f"{age(place.stored_ms)} ago ({time.ctime(place.stored_ms / 1000)})"
    told["whole"] = ("yes" if payload is not None else "no") if checked else "not checked: no key"
    told["used"] = f"{age(max(place.read_ms, place.stored_ms))} ago"
    del told["read_ms"]
    width = max(map(len, told))
    for name, value in told.items():
        print(f"{name.removesuffix('_ms'):<{width}}  {value}")
    if checked and payload is None:
        print(f"WRONG payload does not match its {place.proof.name}, or cannot be read")
    return int(checked and payload is None)


def _decoded(payload: bytes, namespace: NamespaceSurvey, dtype: str) -> bytes:
    """The chunk of a payload, which may be encoded.

    Raises:
        KVStoreError: if it is, from other numbers than `dtype`.
    """
    identity = namespace.identity or {}
    # What else has this name is the operator's own.
    found = next((each for each in map(Codec, CODED) if each.is_of(identity)), None)
    if found is None or len(payload) != identity["chunk_bytes"]:
        return payload
    if found.dtype != dtype:
        raise KVStoreError(f"--dtype {dtype}: the chunk is encoded, {found}: say {found.dtype}")
    size = identity["codec"]["chunk_bytes"]
    memory = memoryview(bytearray(max(size, len(payload))))
    memory[: len(payload)] = payload
    found.decode(memory, size)
    return bytes(memory[:size])


def statistics(payload: bytes, dtype: str) -> dict[str, object]:
    """What the numbers of a chunk are like.

    Raises:
        KVStoreError: if it has no whole number of them.
    """
    values = _values(payload, dtype)
    finite = values[np.isfinite(values)]
    found: dict[str, object] = {
        "values": len(values),
        "not_finite": len(values) - len(finite),
        "zeros": int((values == 0).sum()),
    }
    if len(finite):
        with np.errstate(over="ignore", invalid="ignore"):
            told = {name: float(getattr(finite, name)()) for name in ("min", "max", "mean", "std")}
        # Their sum, or their squares, may be beyond what a number holds.
        found |= {
            name: float(f"{value:.6g}") if math.isfinite(value) else None
            for name, value in told.items()
        }
    return found


def _values(payload: bytes, dtype: str) -> npt.NDArray[np.float64]:
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if len(payload) % size:
        raise KVStoreError(f"--dtype {dtype}: {len(payload)} bytes are no whole number of values")
    if dtype == "bfloat16":
        # The upper half of a float32.
        wide = np.frombuffer(payload, np.uint16).astype(np.uint32) << 16
        with np.errstate(invalid="ignore"):
            return wide.view(np.float32).astype(np.float64)
    return np.frombuffer(payload, dtype).astype(np.float64)
