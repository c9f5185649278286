"""Traces of requests: which chunks each request looked up, by hash.

Three formats are read, each plain or compressed by gzip or xz, and recognized by
their contents:

* the Mooncake format (Qin et al., FAST'25): one JSON object per line with
  ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``;
* the packed format: a JSON object with ``block_tokens``, ``requests``, ``blocks``
  and ``unique``, then per request the array ``[ms, input_tokens, output_tokens,
  ref, keep, new]``: the first `keep` ids of request `ref`, then `new` fresh ones;
* kvstore's own recording (`kvstore.observe.recording`).
"""

from __future__ import annotations

import heapq
import json
import lzma
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import NOT_PARSED, TraceError
from kvstore.observe.recording import (
    MAGIC,
    Progress,
    RecordedRequest,
    RecordingStream,
    open_compressed,
)
from kvstore.policies.parameters import shown
from kvstore.simulation.numbering import Numbering, hashes_of

__all__ = ["Trace", "read_trace"]

Ids = Sequence[Any]

AT_ONCE = 2**20
"""Approximate number of ids that are numbered in one batch."""

MOST_AT_ONCE = 256
"""Most requests that a server has at one time: only these can end in another order."""

MOST_IDS = 2**22
"""Most chunks of one request; a limit, because a short packed line can name any number."""

MOST_CHUNKS = 2**32
"""Most chunks of a trace."""

MOST_MS = 2**53
"""The latest time in milliseconds: a whole number beyond it is not exact as a float."""

MIX = 0x9E3779B97F4A7C15
"""An odd number, so that multiplication by it permutes the 64-bit numbers."""


@dataclass(slots=True)
class Trace:
    """Requests in order.

    Attributes:
        name: name of the source.
        requests: for each request its chunks, numbered from 0 in order of first appearance.
        times: when each request arrived, in seconds; never decreases.
        unique: number of different chunks.
        chunk_bytes: size of a chunk, if the trace gives it.
    """

    name: str
    requests: list[array[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    unique: int = 0
    chunk_bytes: int | None = None

    @property
    def accesses(self) -> int:
        """Chunks looked up, over all requests."""
        return sum(map(len, self.requests))

    def check_chained(self) -> None:
        """Make sure that each chunk always follows the same one, as hashes of prefixes do.

        Raises:
            TraceError: if one does not.
        """
        parents = array("q", [-2]) * self.unique
        for number, chunks in enumerate(self.requests):
            parent = -1
            for chunk in chunks:
                if parents[chunk] == -2:
                    parents[chunk] = parent
                elif parents[chunk] != parent:
                    raise TraceError(
                        f"{self.name}: request {number + 1} has a chunk that follows another chunk "
                        "than before: its ids are not hashes of prefixes"
                    )
                parent = chunk

    def keys(self) -> list[bytes]:
        """Return a key for each chunk, as well mixed as a hash."""
        return [
            (number * MIX % 2**64).to_bytes(8, "big") + b"\0\0\0\0"
            for number in range(1, self.unique + 1)
        ]

    @classmethod
    def of(cls, name: str, requests: Iterable[tuple[float, Ids]]) -> Trace:
        """Build a trace from (seconds, ids) of each request; ids may be of any type."""
        trace = cls(name)
        numbering = Numbering()
        latest = 0.0
        batch: list[npt.NDArray[np.uint64]] = []
        count = 0
        for seconds, ids in requests:
            latest = max(latest, seconds)
            trace.times.append(latest)
            batch.append(hashes_of(ids))
            count += len(ids)
            if count >= AT_ONCE:
                trace.requests += _numbered(numbering, batch)
                batch, count = [], 0
        trace.requests += _numbered(numbering, batch)
        trace.unique = numbering.count
        return trace


def _numbered(
    numbering: Numbering, requests: Sequence[npt.NDArray[np.uint64]]
) -> Iterator[array[int]]:
    """Yield the chunks of each of `requests` by number, without duplicates."""
    if not requests:
        return
    numbers = numbering.number(np.concatenate(requests))
    start = 0
    for request in requests:
        part = numbers[start : start + len(request)]
        start += len(request)
        ordered = np.sort(part)
        if (ordered[1:] == ordered[:-1]).any():
            yield array("I", dict.fromkeys(part.tolist()))
        else:
            chunks = array("I")
            chunks.frombytes(part.tobytes())
            yield chunks


def read_trace(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Trace:
    """Read a trace of any format; if `limit` is given, only its first requests.

    Args:
        progress: called now and then with the bytes read so far and the size of the file.

    Raises:
        TraceError: if the file cannot be read, is damaged, or is not a trace; the
            message names the file and the line.
    """
    path = Path(path)
    try:
        with open_compressed(path, progress) as file:
            if file.peek(len(MAGIC))[: len(MAGIC)] == MAGIC:  # type: ignore[attr-defined]
                trace = _of_recording(path, limit, progress)
            else:
                trace = Trace.of(path.name, islice(_parse(path, file), limit))
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"{path}: cannot be read ({reason})") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"{path}: its compression is damaged ({error})") from error
    if not trace.requests:
        raise TraceError(f"{path}: contains no requests")
    return trace


def _as_they_came(recording: Iterable[RecordedRequest]) -> Iterator[RecordedRequest]:
    """Sort requests by arrival; a recording has them in the order in which they ended."""
    heap: list[tuple[float, int, RecordedRequest]] = []
    for number, request in enumerate(recording):
        heapq.heappush(heap, (request.time, number, request))
        if len(heap) > MOST_AT_ONCE:
            yield heapq.heappop(heap)[-1]
    while heap:
        yield heapq.heappop(heap)[-1]


def _of_recording(path: Path, limit: int | None, progress: Progress) -> Trace:
    if not path.is_file():
        raise TraceError(f"{path}: a recording is read more than once, so it must be a file")
    recording = RecordingStream(path, progress)
    # Each group of a hybrid model is loaded and stored on its own.
    requests = _as_they_came(recording)
    chains = ((each.time, chain) for each in requests for chain in each.chains)
    trace = Trace.of(path.name, islice(chains, limit))
    trace.chunk_bytes = recording.chunk_bytes
    return trace


def _parse(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[float, Ids]]:
    """Yield (seconds, ids) of each request of a text format."""
    packed: list[Sequence[int]] | None = None
    fresh = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except NOT_PARSED as error:
            start = line[:40].decode("ascii", "backslashreplace").strip()
            raise TraceError(
                f"{where}: not a trace; a line of JSON is expected, not {start!r}"
            ) from error
        if number == 1 and isinstance(values, dict) and "block_tokens" in values:
            packed = []
            continue
        if packed is None:
            yield _mooncake(where, values)
            continue
        seconds, ref, keep, new = _packed(where, values, packed)
        if fresh + new > MOST_CHUNKS:
            raise TraceError(f"{where}: more than {MOST_CHUNKS} chunks")
        ids = (
            [*packed[ref][:keep], *range(fresh, fresh + new)] if keep else range(fresh, fresh + new)
        )
        fresh += new
        packed.append(array("I", ids))
        yield seconds, packed[-1]


def _mooncake(where: str, values: object) -> tuple[float, Ids]:
    if not isinstance(values, dict) or "hash_ids" not in values:
        raise TraceError(
            f"{where}: not a request; an object with timestamp and hash_ids is expected"
        )
    ids = values["hash_ids"]
    if not isinstance(ids, list) or not all(_is_whole(one) or isinstance(one, str) for one in ids):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers or strings")
    return _seconds(where, values.get("timestamp", 0)), ids


def _packed(
    where: str, values: object, before: Sequence[Sequence[int]]
) -> tuple[float, int, int, int]:
    if not isinstance(values, list) or len(values) != 6:
        raise TraceError(f"{where}: not a packed request; six numbers are expected")
    ms, _, _, *numbers = values
    for name, value in zip(("ref", "keep", "new"), numbers, strict=True):
        least = -1 if name == "ref" else 0
        if not _is_whole(value) or value < least:
            raise TraceError(
                f"{where}: {name} must be a whole number of at least {least}, not {shown(value)}"
            )
    ref, keep, new = numbers
    if keep and not (0 <= ref < len(before) and keep <= len(before[ref])):
        raise TraceError(
            f"{where}: keeps {shown(keep)} ids of request {shown(ref)}, which does not have as many"
        )
    if keep + new > MOST_IDS:
        raise TraceError(
            f"{where}: keep and new must be at most {MOST_IDS} together, new is {shown(new)}"
        )
    return _seconds(where, ms), ref, keep, new


def _seconds(where: str, ms: object) -> float:
    """Return the time of a request in seconds; also refuses NaN, which `json` accepts."""
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not 0 <= ms <= MOST_MS:
        raise TraceError(
            f"{where}: timestamp must be a number of milliseconds from 0 to {MOST_MS}, "
            f"not {shown(ms)}"
        )
    return ms / 1000


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
