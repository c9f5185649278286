"""Object stores: S3 and compatible, Google Cloud Storage, Azure, a shared directory.

All but the directory use `obstore`. A value is one object. Large ones are read in several ranges at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from kvstore.tiers.disk.namespace import Namespace
from kvstore.tiers.disk.trust import Trust
from kvstore.tiers.remote.client import StoreClient, StoreError, Unread
from kvstore.tiers.remote.directory import WAVE, DirectoryClient
from kvstore.tiers.remote.mount import Mount
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.slices import copy
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url
except ImportError:  # pragma: no cover
    obstore = None  # type: ignore[assignment]

__all__ = ["ObjectTier"]

_T = TypeVar("_T")

_URL = re.compile(r"(s3|gs|az)://[\w.-]+(/[^?#@\s]*)?|file:///+[^/?#][^?#]*")
_ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[^?#@\s]*)?")

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_CREDENTIALS = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"),
        *("AWS_REGION", "AWS_DEFAULT_REGION"),
    ),
    "az": (
        *(f"AZURE_STORAGE_{name}_KEY" for name in ("ACCESS", "ACCOUNT", "MASTER", "SAS")),
        *(f"AZURE_{name}" for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")),
        *(f"AZURE_STORAGE_{name}" for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")),
        *(f"AZURE_STORAGE_{name}" for name in ("SAS_TOKEN", "TOKEN")),
    ),
}
"""Variables that `obstore` reads: see https://docs.rs/object_store."""

CONNECTIONS = 32
"""Most requests under way at once."""

REMOVALS = 4
"""Most requests under way that remove values, beside all others."""

PAGE_NAMES = 1000
"""Values in a portion of a list, as in a page of S3."""

PAGE_SECONDS = 60.0
"""How long a portion may take: what a service names may be nothing, and more to come, for ever."""

MOST_TOLD = 500
"""Most characters of an error."""

IDLE_SECONDS = 5
"""How long a connection that nobody uses is kept. Dead ones are found out one by one."""

RANGE_BYTES = 4 * 2**20
"""Most bytes of a value that one request reads."""


class ObjectTier(StoreTier):
    """A bucket, a container or a directory, shared by all processes that name it.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or
            `file:///directory`. Azure's account and all credentials come from the environment, or
            from where the client finds them on such a machine, never from here.
        endpoint: URL of another service than the scheme's own, such as `http://minio:9000`.
        region: region of the bucket.
        timeout_s: seconds after which a call has failed.
        capacity_bytes: most bytes of chunks there, of this model. The oldest are removed first: in
            a bucket by when they were stored, in a directory by when they were last read. By
            default nothing is removed.
        strict_modes: for a directory, whether to refuse folders and files that users other than
            this process's user and root own or may write to.

    Raises:
        ValueError: for an invalid parameter, or without the package `obstore`, which a directory
            does not need.
    """

    name = "object"

    asked_at_once = CONNECTIONS

    def __init__(
        self,
        place: TierPlace,
        *,
        url: str = "",
        endpoint: str = "",
        region: str = "",
        timeout_s: float = 5.0,
        capacity_bytes: int = 0,
        strict_modes: bool = True,
    ) -> None:
        # An invalid URL is not shown, because it may hold a password.
        if not _URL.fullmatch(url):
            raise ValueError(
                "url: must be s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
                "file:///directory; credentials belong in the environment"
            )
        parts = urlsplit(url)
        _check_endpoint("endpoint", endpoint)
        if not endpoint:
            for name in _ENDPOINTS.get(parts.scheme, ()):
                _check_endpoint(name, os.environ.get(name, ""))
        for name in _CREDENTIALS.get(parts.scheme, ()):
            # `obstore` would die of it at the first call. Files that are mounted end so.
            if not os.environ.get(name, "").isprintable():
                raise ValueError(f"{name}: holds a line break, or what is no character")
        if not region.isprintable():
            raise ValueError("region: holds a line break, or what is no character")
        if parts.scheme in ("file", "gs") and endpoint:
            raise ValueError(f"endpoint: not allowed with {parts.scheme}://")
        if parts.scheme != "s3" and region:
            raise ValueError("region: only allowed with s3://")
        if parts.scheme != "file" and not strict_modes:
            raise ValueError("strict_modes: only allowed with file://")
        if parts.scheme != "file" and obstore is None:
            raise ValueError("needs the package obstore: pip install 'kvstore-offload[object]'")
        self._url = url
        super().__init__(place, timeout_s=timeout_s, capacity_bytes=capacity_bytes)
        options = {"endpoint": endpoint, "region": region}
        self._options: dict[str, Any] = {key: value for key, value in options.items() if value}
        if parts.scheme == "s3":
            # Records have digests; the client's own digest would be redundant and slower.
            self._options["unsigned_payload"] = True
        # Created now, so that an unusable URL or environment is reported at once.
        self._client_of: Callable[[], StoreClient]
        if parts.scheme == "file":
            mount = self._mounted(place, Trust(strict_modes))
            self.asked_at_once = WAVE
            self._client_of = partial(DirectoryClient, mount, ages=capacity_bytes > 0)
        else:
            self._client_of = partial(_Client, self._made())

    @property
    def address(self) -> str:
        return self._url

    def connect(self) -> StoreClient:
        return self._client_of()

    def _mounted(self, place: TierPlace, trust: Trust) -> Mount:
        try:
            Namespace(place.namespace, place.identity).check_name()
            mount = Mount(Path(unquote(urlsplit(self._url).path)), trust)
            # Check the existing folders, so that untrusted ones are reported at once, too.
            with contextlib.suppress(FileNotFoundError):
                os.close(mount.enter(self._prefix, make=False))
        except OSError as error:
            raise ValueError(f"url = {self._url!r}: {error}") from error
        return mount

    def _allows_http(self) -> bool:
        """Whether the endpoint, or else one that the environment names, is without TLS."""
        names = _ENDPOINTS.get(urlsplit(self._url).scheme, ())
        given = [self._options.get("endpoint")] if "endpoint" in self._options else []
        return any(str(each).startswith("http://") for each in given or map(os.environ.get, names))

    def _made(self) -> Any:
        try:
            options: Any = self._options
            return from_url(
                self._url,
                config=options,
                client_options={
                    "allow_http": self._allows_http(),
                    "connect_timeout": timedelta(seconds=self._timeout),
                    "timeout": timedelta(seconds=self._timeout),
                    "pool_idle_timeout": timedelta(seconds=IDLE_SECONDS),
                },
                # Few retries: the whole call has a deadline, and a failing store gets a pause.
                retry_config={
                    "max_retries": 2,
                    "retry_timeout": timedelta(seconds=self._timeout),
                },
            )
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(f"url = {self._url!r}: {_summary(error)}") from error


def _check_endpoint(name: str, address: str) -> None:
    """
    Raises:
        ValueError: for what is no address, without showing it.
    """
    with contextlib.suppress(ValueError):
        if not address or (_ENDPOINT.fullmatch(address) and urlsplit(address).port != 0):
            return
    raise ValueError(
        f"{name}: must be http://host:port or https://host:port, optionally with a path; "
        "credentials belong in the environment, in variables of their own"
    )


class _Client:
    """Client of an object store: see `ListingClient`."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._removing = asyncio.Semaphore(REMOVALS)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        found = await self._together([self._size(name) for name in names])
        return [size is not None for size in found]

    async def put(
        self,
        names: Sequence[str],
        records: Sequence[bytes],
        payloads: Sequence[memoryview],
        *,
        replace: bool = False,
    ) -> list[str | None]:
        async def one(name: str, record: bytes, payload: memoryview) -> str | None:
            if not replace and await self._size(name) is not None:
                return None
            value = b"".join((record, payload))
            try:
                # If two writers race, one replaces the other's value with the same value.
                await self._call(
                    lambda: obstore.put_async(self._store, name, value, use_multipart=False)
                )
            except (StoreError, FileNotFoundError) as error:
                # Raises if the store does not answer at all; otherwise it refused this value.
                await self._size(name)
                return _summary(error)
            return None

        values = zip(names, records, payloads, strict=True)
        return await self._together([one(*value) for value in values])

    async def get(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> list[bytes | str | None]:
        async def one(name: str, payload: memoryview) -> bytes | str | None:
            try:
                return await ranges(name, payload, RECORD_BYTES + len(payload))
            except _UnreadError as error:
                # The next write replaces it.
                return Unread(error)

        async def ranges(name: str, payload: memoryview, size: int) -> bytes | None:
            first = await self._range(name, 0, min(size, RANGE_BYTES))
            if first is None:
                return None
            if first[0] != size or len(first[1]) != min(size, RANGE_BYTES):
                return b""
            record = bytes(first[1][:RECORD_BYTES])
            copy(first[1][RECORD_BYTES:], payload)
            rest = range(RANGE_BYTES, size, RANGE_BYTES)
            parts = await self._together(
                [self._range(name, start, min(size, start + RANGE_BYTES)) for start in rest]
            )
            for start, part in zip(rest, parts, strict=True):
                wanted = min(size, start + RANGE_BYTES) - start
                if part is None or part[0] != size or len(part[1]) != wanted:
                    return b""
                copy(part[1], payload, start - RECORD_BYTES)
            return record

        return await self._together([one(*value) for value in zip(names, payloads, strict=True)])

    async def remove(self, names: Sequence[str]) -> None:
        """Remove them in one request, where the service has such a request."""
        try:
            await self._call(lambda: obstore.delete_async(self._store, [*names]), self._removing)
        except FileNotFoundError:
            await self._together([self._remove(name) for name in names])

    async def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._call(lambda: obstore.delete_async(self._store, name), self._removing)

    async def listed(
        self, place: str, but: Collection[str]
    ) -> AsyncIterator[Sequence[tuple[str, float]]]:
        """Yield names and times of objects, in the pages in which the service returns them."""
        epochs = await self._page(lambda: obstore.list_with_delimiter_async(self._store, place))
        for prefix in epochs["common_prefixes"]:
            if prefix.rpartition("/")[2] in but:
                continue
            portions = obstore.list(self._store, prefix, chunk_size=PAGE_NAMES).__aiter__()
            while (
                found := await self._page(lambda at=portions: anext(at, None))  # type: ignore[misc]
            ) is not None:
                yield [(each["path"], each["last_modified"].timestamp()) for each in found]

    async def _page(self, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await self._call(call)
        except TimeoutError:
            raise StoreError(f"no list of names within {PAGE_SECONDS:g} s") from None

    async def close(self) -> None:
        """Do nothing: the client manages its connections."""

    # -- inside --------------------------------------------------------------------------

    async def _size(self, name: str) -> int | None:
        """Return the size of a value in bytes; None if it does not exist."""
        try:
            found = await self._call(lambda: obstore.head_async(self._store, name))
        except FileNotFoundError:
            return None
        return int(found["size"])

    async def _range(self, name: str, start: int, end: int) -> tuple[int, memoryview] | None:
        """Return the size of a value and a range of its bytes; None if it does not exist."""

        async def read() -> tuple[int, memoryview]:
            result = await obstore.get_async(self._store, name, options={"range": (start, end)})
            return int(result.meta["size"]), memoryview(await result.bytes_async())

        try:
            size, part = await self._call(read)
        except FileNotFoundError:
            return None
        except StoreError as error:
            # A shorter value has no such range, for which each store has its own error.
            size_now = await self._size(name)
            if size_now is None:
                return None
            if size_now > start:
                raise _UnreadError(str(error)) from error
            return size_now, memoryview(b"")
        return size, part

    async def _call(
        self, call: Callable[[], Awaitable[_T]], free: asyncio.Semaphore | None = None
    ) -> _T:
        """Send a request once a connection is free.

        Args:
            free: of other connections than most requests.

        Raises:
            FileNotFoundError: if there is no such object.
            StoreError: for any other failure.
        """
        async with free or self._free:
            try:
                return await call()
            except FileNotFoundError:
                raise
            except Exception as error:
                # Of `obstore` also one that stands for a panic.
                raise StoreError(_summary(error)) from error

    async def _together(self, calls: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
        """Await all calls at once; if one raises, or this is cancelled, cancel the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
        except* StoreError as failed:
            first: BaseException = failed
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            kind = _UnreadError if isinstance(first, _UnreadError) else StoreError
            raise kind(str(first)) from None
        return [task.result() for task in tasks]


class _UnreadError(StoreError):
    """The store answers, and does not give this value, as one that is archived."""


def _summary(error: Exception) -> str:
    """Return the first line of an error; the others are debugging details of the client.

    Query strings and credentials in URLs are removed, as the former may contain a signature, and
    what the service answers at length, which may repeat a token.
    """
    text = str(error).strip()
    line = re.split(r": [<{]", text.partition("\n")[0], maxsplit=1)[0]
    if code := re.search(r"<Code>([A-Za-z]+)</Code>", text):
        line += f" ({code[1]})"
    line = re.sub(r"\?[^\s()\"']*", "?...", line)
    line = re.sub(r"//[^\s@]*@", "//...@", line)
    return f"{type(error).__name__}: {line[:MOST_TOLD]}"
