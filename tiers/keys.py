"""Keys: the secrets with which chunks are encrypted, by tenant and version.

They come from a file, an environment variable or a function (a hook of a key management service).
In each a tenant's name stands with its keys, the newest first; "*" are the keys of all others. The
newest key encrypts, the older ones still decrypt. What is taken out is forgotten: nobody can read
its chunks any more.

This module is long because whatever reads, keeps or writes a secret stands here.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import stat
import threading
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from itertools import chain
from pathlib import Path
from secrets import token_bytes
from typing import Any, NamedTuple

from kvstore.concurrency import open_at_once
from kvstore.errors import NOT_PARSED, ConfigError
from kvstore.types import Changes, about

__all__ = [
    "ALL",
    "ID_BYTES",
    "KEY_BYTES",
    "KeyRing",
    "Secret",
    "id_of",
    "parse_keys",
    "read_keys",
    "write_keys",
]

logger = logging.getLogger("kvstore.keys")

KEY_BYTES = 32
"""Length of a key, of AES-256."""

ID_BYTES = 4
"""Length of a key's id, by which a chunk names the key that it was encrypted with."""

ALL = "*"
"""Whose keys are those of everybody who has none of their own."""

SILENT_SECONDS = 10.0
"""How long a look may take before a warning says that the source does not answer."""

LOOK_SECONDS = 1.0
"""Seconds after which keys in use are looked up again."""


class Secret(NamedTuple):
    """A key and its id."""

    id: bytes
    material: bytes


Owned = tuple[Mapping[bytes, list[Secret]], ...]
"""Secrets by the tags of tenants. A list follows its tenant's keys until they are forgotten."""


class KeyRing:
    """The keys of all tenants, as their source has them now.

    While they are used the source is asked again every second, in a thread of its own: a file only
    if it has changed. If it cannot be read, or is wrong, the keys stay as they were.

    Args:
        source: path of a file, ``env:NAME`` of a variable, or ``module:function``.
        tag_of: returns the tag of a tenant, with which the keys of its chunks begin. Without it
            there are no tenants.

    Attributes:
        changes: how often the keys have changed.
        tag_bytes: length of the tag that keys of chunks begin with, 0 without tenants.

    Raises:
        ConfigError: if the source cannot be used.
    """

    changes = 0

    def __init__(self, source: str, tag_of: Callable[[str], bytes] | None = None) -> None:
        self.source = source
        self._tag_of = tag_of
        self.tag_bytes = 0 if tag_of is None else len(tag_of(ALL))
        self._read = _reader(source)
        self._looking, self._reading = threading.Lock(), threading.Lock()
        self._changing = threading.Lock()  # For a moment only.
        self._complained = False
        self._began = 0.0
        self._due = time.monotonic() + LOOK_SECONDS
        self._by_tag: Mapping[bytes, list[Secret]] = {}
        self._others: Sequence[Secret] = ()
        # Of tenants whose keys were forgotten while there may be chunks of theirs in host memory:
        # nobody else has these, so what is sealed with them is gone, too.
        self._nobodys: Mapping[bytes, list[Secret]] = {}
        self._untold: set[bytes] = set()
        # Before the keys are read: a change in between is seen by the next look.
        self._version = self._read.version()
        self._take(self._read())

    @property
    def owned(self) -> Owned:
        """The keys that tenants have of their own now, for `newest`."""
        by_tag = self._by_tag  # First, as these change last.
        return self._nobodys, by_tag

    def newest(self, key: bytes, before: Owned = ()) -> Secret:
        """Return the secret with which the chunk of `key` is to be encrypted.

        Args:
            before: what was `owned` when its writing began: a chunk of whoever had a key of its own
                then is never encrypted with those of all others, nor with one that its tenant got
                after it was forgotten.
        """
        return self._of(key, before)[0]

    def find(self, key: bytes, key_id: bytes) -> Secret | None:
        """Return the secret of this id, if it is one of those for the chunk of `key`.

        What a tenant has stored before it had keys of its own is under those of all others.
        """
        self.poll()
        # Copied at once: a list changes while it is looked through.
        its = [tuple(owned.get(key[: self.tag_bytes], ())) for owned in self.owned]
        for secret in chain(*its, self._others):
            if secret.id == key_id:
                return secret
        return None

    def lasting(self, keys: Sequence[bytes], before: Owned) -> int:
        """Return how many leading chunks can still be opened, as no tenant of theirs is forgotten.

        Args:
            before: what was `owned` when their writing began: who is forgotten since does not
                count, nor who was being forgotten then. The core may learn of it later.
        """
        nobodys, by_tag = self.owned

        def lasts(tag: bytes) -> bool:
            its = next((owned[tag] for owned in before if tag in owned), None)
            return tag not in nobodys and (its is None or by_tag.get(tag) is its)

        tags = (key[: self.tag_bytes] for key in keys)
        return next((count for count, tag in enumerate(tags) if not lasts(tag)), len(keys))

    @property
    def own_ids(self) -> set[bytes]:
        """The ids of keys that are a tenant's own."""
        return {secret.id for its in self._by_tag.values() for secret in its[:]}

    def poll(self) -> None:
        """Look in a thread, if it is time. Called now and then, also where nothing is used."""
        if time.monotonic() >= self._due:
            self._look_later()

    def forgotten(self) -> Changes:
        """Return the tags of tenants whose keys were forgotten since the last call; look if due.

        Once the core has removed their chunks, what they store is under the keys of all others.
        """
        self.poll()
        with self._changing:
            told, self._untold = {tag: self._nobodys[tag] for tag in self._untold}, set()

        def settle() -> None:
            with self._changing:
                left = {t: its for t, its in self._nobodys.items() if its is not told.get(t)}
                self._nobodys = left

        return Changes(forgotten=sorted(told), on_taken=settle)

    def ids(self, *, newest: bool = False) -> set[bytes]:
        """Return the ids of all keys, or of the newest of each tenant."""
        several = [self._others, *self._by_tag.values()]
        return {secret.id for its in several for secret in its[: 1 if newest else None]}

    def look(self) -> None:
        """Take the keys that the source has now. May block.

        Raises:
            ConfigError: if it cannot be used; the keys stay as they were.
        """
        # One after the other, or what was read first could be taken last.
        with self._reading:
            version = self._read.version()
            if version != self._version or version is None:
                self._take(self._read())
                self._version = version
            self._complained = False

    def _look(self) -> None:
        try:
            self.look()
        except ConfigError as error:
            self._complain(error)
        finally:
            self._looking.release()

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            logger.warning(
                "keys: those from before are kept, as %s cannot be used now: %s",
                self.source,
                error,
                extra=about("keys.unreadable", source=self.source, error=error),
            )
        self._complained = True

    def _look_later(self) -> None:
        """Look in a thread, unless a look is under way."""
        now = time.monotonic()
        self._due = now + LOOK_SECONDS
        if not self._looking.acquire(blocking=False):
            if now - self._began > SILENT_SECONDS:
                self._complain(TimeoutError(f"no answer for {now - self._began:.0f} s"))
            return
        self._began = now
        try:
            threading.Thread(target=self._look, name="kvstore-keys", daemon=True).start()
        except RuntimeError:
            # No thread can be started now; a later use tries again.
            self._looking.release()

    def _of(self, key: bytes, before: Owned) -> Sequence[Secret]:
        self.poll()
        tag = key[: self.tag_bytes]
        for owned in (*before, *self.owned):
            if secrets := owned.get(tag):
                return secrets
        return self._others

    def _take(self, found: Mapping[str, Any]) -> None:
        parsed = parse_keys(found, self.source)
        named = {name: secrets for name, secrets in parsed.items() if name != ALL}
        if named and self._tag_of is None:
            raise ConfigError(
                f"{self.source}: has keys of {sorted(named)[0]!r}, but the configuration has no "
                f"tenants: only {ALL!r} may have keys"
            )
        tag_of = self._tag_of
        by_tag = {tag_of(name): secrets for name, secrets in named.items()} if tag_of else {}
        # A hook is asked again and again.
        changed = (by_tag, parsed[ALL]) != (self._by_tag, self._others)
        with self._changing:
            for tag, its in self._by_tag.items():
                if {*its}.isdisjoint(by_tag.get(tag, ())):
                    # Also of who has other keys instead. First: from one moment to the next its
                    # chunks are sealed with another key.
                    nobodys = token_bytes(KEY_BYTES)
                    # Before it is used: who has sealed with it finds it here.
                    self._nobodys = {**self._nobodys, tag: its}
                    its[:] = [Secret(id_of(nobodys), nobodys)]
                    self._untold.add(tag)
                else:
                    its[:] = by_tag[tag]
                    by_tag[tag] = its
        self._by_tag, self._others = by_tag, parsed[ALL]
        # Last: who sees that they have changed has to see how.
        self.changes += changed


def id_of(material: bytes) -> bytes:
    """Return the id of a key, which says nothing of the key itself."""
    return sha256(b"kvstore key id" + material).digest()[:ID_BYTES]


def parse_keys(found: object, source: str) -> dict[str, list[Secret]]:
    """Return the secrets that a table of keys holds: a key or several by tenant, newest first.

    A key is `KEY_BYTES` bytes, or as many in hexadecimal.

    Raises:
        ConfigError: if it is no such table. The message does not show a key.
    """
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{source}: must be a table of keys by name of the tenant")
    parsed: dict[str, list[Secret]] = {}
    for name, value in found.items():
        if _is_key(name):
            raise ConfigError(f"{source}: a key stands where the name of a tenant belongs")
        several = [value] if isinstance(value, (str, bytes, bytearray)) else value
        if not isinstance(several, Sequence) or not several:
            raise ConfigError(f"{source}: {name!r}: must be a key or a list of keys")
        secrets = [_secret(each, f"{source}: {name!r}") for each in several]
        if len({secret.id for secret in secrets}) < len(secrets):
            raise ConfigError(f"{source}: {name!r}: has a key twice")
        parsed[name] = secrets
    if ALL not in parsed:
        raise ConfigError(f"{source}: no keys of {ALL!r}, all that have none of their own")
    owners: dict[bytes, str] = {}
    for name, secrets in parsed.items():
        for secret in secrets:
            other = owners.setdefault(secret.id, name)
            if other != name:
                raise ConfigError(
                    f"{source}: {other!r} and {name!r} have a key in common, which could not be "
                    "forgotten for one of them"
                )
    return parsed


def _is_key(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and set(text.lower()) <= set("0123456789abcdef")


def _secret(value: object, where: str) -> Secret:
    material = b""
    if isinstance(value, (bytes, bytearray)):
        material = bytes(value)
    elif isinstance(value, str):
        with contextlib.suppress(ValueError):
            material = bytes.fromhex(value)
    if len(material) != KEY_BYTES:
        raise ConfigError(
            f"{where}: a key must be {2 * KEY_BYTES} hexadecimal digits, such as those of "
            f"openssl rand -hex {KEY_BYTES}"
        )
    return Secret(id_of(material), material)


class _Reader(ABC):
    """Reads a source of keys."""

    def __init__(self, source: str) -> None:
        self.source = source

    def version(self) -> object:
        """Return what differs when the source has changed, or None if that is not known."""
        return None

    @abstractmethod
    def __call__(self) -> Any:
        """Return what the source has now.

        Raises:
            ConfigError: if it cannot be used.
        """


class _File(_Reader):
    def __init__(self, source: str) -> None:
        try:
            # A process may change its folder later.
            super().__init__(os.path.abspath(os.path.expanduser(source)))
        except OSError as error:
            raise _unreadable(source, error) from error

    def version(self) -> object:
        try:
            found = os.stat(self.source)
        except ValueError as error:
            raise ConfigError(f"{self.source!r}: {error}") from error
        except OSError as error:
            raise _unreadable(self.source, error) from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def __call__(self) -> Any:
        return read_keys(Path(self.source))


class _Variable(_Reader):
    def version(self) -> object:
        return ""

    def __call__(self) -> Any:
        name = self.source.removeprefix("env:")
        try:
            return tomllib.loads(os.environ[name])
        except KeyError:
            raise ConfigError(f"the variable {name} with the keys is not set") from None
        except NOT_PARSED:
            raise ConfigError(f"the variable {name} with the keys is not TOML") from None


class _Hook(_Reader):
    def __init__(self, source: str) -> None:
        super().__init__(source)
        module, _, name = source.partition(":")
        try:
            self._call: Callable[[], Any] = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{source}: {error}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{module}: raised {type(error).__name__} when imported") from error

    def __call__(self) -> Any:
        try:
            found = self._call()
            # A table that fetches keys as they are asked for may fail at that.
            found = dict(found) if isinstance(found, Mapping) else found
        # It may raise anything, and say what is nobody's business.
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self.source}: raised {type(error).__name__}") from error
        if inspect.iscoroutine(found):
            found.close()
            raise ConfigError(f"{self.source}: returned a coroutine: it must not be async")
        return found


def _reader(source: str) -> _Reader:
    if source.startswith("env:"):
        return _Variable(source)
    if _is_key(source):
        raise ConfigError("encryption_keys: must say where keys are, and is a key itself")
    module, _, name = source.partition(":")
    if name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return _Hook(source)
    return _File(source)


def _unreadable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: the keys cannot be read: {error.strerror}")


def write_keys(path: Path, keys: Mapping[str, Sequence[Secret]]) -> None:
    """Write a file of keys, which appears whole or not at all, for its owner alone.

    One process at a time may do so.

    One that is there keeps its owner and mode; behind a symbolic link, the file itself is replaced.

    Raises:
        ConfigError: if a name cannot be written.
        OSError: as the system says.
    """
    lines = ["# Keys of kvstore, the newest of each tenant first. Who reads this reads the cache."]
    for name, secrets in keys.items():
        its = ", ".join(f'"{secret.material.hex()}"' for secret in secrets)
        lines.append(f"{json.dumps(name, ensure_ascii=False)} = [{its}]")
    try:
        text = "\n".join(lines).encode() + b"\n"
        tomllib.loads(text.decode())
    except NOT_PARSED:
        raise ConfigError(f"{path}: TOML has no way to write one of {sorted(keys)!a}") from None
    path = Path(os.path.realpath(path))
    # One name, so that what a killed process left goes, with the keys in it.
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                before = path.stat()
                if before.st_uid != os.geteuid():
                    os.fchown(fd, before.st_uid, -1)
                # Its owner need not be in its group.
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, -1, before.st_gid)
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def read_keys(path: Path, *, anybodys: bool = False) -> dict[str, Any]:
    """Return the table in a file of keys.

    Only its owner may read and write it. If that is root, its group may read it, too: that is how
    secrets are mounted.

    Args:
        anybodys: whether it may belong to another user than this process's and root.

    Raises:
        ConfigError: if it cannot be read, others may read or write it, or it is not TOML.
    """
    try:
        fd = open_at_once(path, follows=True)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: not a regular file")
            if found.st_uid not in (0, os.geteuid()) and not anybodys:
                raise ConfigError(f"{path}: belongs to user {found.st_uid}: chown it")
            if found.st_mode & (0o077 if found.st_uid else 0o037):
                mode = stat.S_IMODE(found.st_mode)
                raise ConfigError(
                    f"{path}: others may use the keys (mode {mode:04o}): chmod go= {path}"
                )
            text = file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return tomllib.loads(text.decode("utf-8-sig"))
    except NOT_PARSED:
        # What the parser says may show a key.
        raise ConfigError(f"{path}: not TOML") from None
