"""Namespace: the folder of bytes that may be exchanged, with its identity."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import (
    MALFORMED,
    ConfigError,
    ForeignFileError,
    NamespaceMismatchError,
    PathUnusableError,
)
from kvstore.tiers.disk.trust import ANYBODYS, STRICT, Trust, hand_over, make_folder

__all__ = ["Namespace", "enclosing", "read_namespace"]

FILE_NAME = "namespace.json"
_LEFTOVER = re.compile(r"\.namespace\.json\.(\d{1,10})-[0-9a-f]{8}")
MAX_FILE_BYTES = 1024 * 1024

_TRIES = 64
"""How often a file is published at most: as often as there may be lanes."""

REMEDY = "remove it: the next server that opens the namespace writes it anew, and finds its chunks"


@dataclass(frozen=True)
class Namespace:
    """One model, dtype, layout and parallel shape.

    Attributes:
        name: the folder's name; letters, digits, ``.``, ``_`` and ``-``.
        identity: everything that must be equal for bytes to be exchanged.
            Values are JSON scalars, lists or mappings.
    """

    name: str
    identity: Mapping[str, Any]

    @classmethod
    def of(cls, label: str, identity: Mapping[str, Any]) -> Namespace:
        """A namespace named after `label` and the digest of `identity`."""
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[-64:].lstrip("-.") or "kv"
        return cls(f"{slug}-{_digest(identity)[:12]}", identity)

    @property
    def digest(self) -> str:
        """SHA-256 of the identity in canonical JSON, in hex: what segments carry."""
        return _digest(self.identity)

    def check_name(self) -> None:
        """Make sure that the name is that of a folder.

        Raises:
            PathUnusableError: if it is not.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", self.name):
            raise PathUnusableError(
                f"namespace name {self.name!r}: allowed are up to 128 letters, digits, "
                "'.', '_' and '-', not beginning with '.' or '-'"
            )

    def establish(self, root: Path, trust: Trust = STRICT) -> Path:
        """Make sure that ``root/name`` exists and is this namespace; returns the folder.

        Raises:
            NamespaceMismatchError: if the folder belongs to another identity.
            PathUnusableError: if it cannot be made, read or written, or is not to be trusted.
            ConfigError: if the identity cannot be written as JSON.
        """
        self.check_name()
        told = {
            "format": "kvstore namespace",
            "version": 1,
            "digest": self.digest,
            "identity": self.identity,
        }
        make_folder(root, trust, own=False)
        folder = root / self.name
        make_folder(folder, trust, own=True)
        _remove_leftovers(folder)
        file = folder / FILE_NAME
        for _ in range(_TRIES):
            if os.path.lexists(file):
                break
            # A process that cannot see this one's pid may remove it as a leftover.
            with contextlib.suppress(FileNotFoundError):
                self._publish(file, told)
        self.match(folder, trust)
        return folder

    def match(self, folder: Path, trust: Trust = ANYBODYS) -> None:
        """Make sure that `folder` is this namespace.

        Raises:
            NamespaceMismatchError: if it belongs to another identity.
            ForeignFileError, PathUnusableError: as `read_namespace`.
        """
        found = read_namespace(folder, trust)
        if found.get("digest") != self.digest or found.get("identity") != _plain(self.identity):
            raise NamespaceMismatchError(
                f"{folder} belongs to another namespace: {_difference(found, self.identity)}. "
                "Choose another path or namespace name, or remove the folder"
            )

    @staticmethod
    def _publish(file: Path, told: Mapping[str, Any]) -> None:
        temporary = file.with_name(f".{FILE_NAME}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as handle:
                hand_over(fd, file.parent)
                json.dump(told, handle, indent=2, sort_keys=True)
                handle.write("\n")
                handle.flush()
                os.fsync(handle.fileno())
            try:
                os.link(temporary, file)
            except FileExistsError:
                pass
            except OSError as error:
                # Some file systems have no hard links.
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.rename(temporary, file)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise PathUnusableError(f"{file}: cannot be written ({error.strerror})") from error
        finally:
            # What stays is removed by the next process that opens the namespace.
            with contextlib.suppress(OSError):
                temporary.unlink()


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes left that were killed while they published."""
    # Where the folder cannot be listed they stay.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _LEFTOVER.fullmatch(name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                # A folder of that name, say, stays.
                with contextlib.suppress(OSError):
                    (folder / name).unlink()


def enclosing(path: Path) -> Path | None:
    """The folder of the namespace that `path` is, or lies in; None if there is none."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if os.path.lexists(one / FILE_NAME)), None)


def read_namespace(folder: Path, trust: Trust = ANYBODYS) -> dict[str, Any]:
    """Read ``namespace.json`` in `folder`.

    Raises:
        ForeignFileError: if it is not a namespace file of this format.
        PathUnusableError: if it cannot be read, or is not to be trusted.
    """
    file = folder / FILE_NAME
    if (raw := trust.read(file, MAX_FILE_BYTES + 1)) is None:
        raise PathUnusableError(f"{file}: cannot be read ({os.strerror(errno.ENOENT)})")
    try:
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError("too large")
        found: dict[str, Any] = json.loads(raw)
        if found["format"] != "kvstore namespace":
            raise ForeignFileError(f"{file}: not a namespace file ({found['format']!r:.60})")
        if found["version"] != 1:
            raise ForeignFileError(
                f"{file}: version {found['version']}; this program reads version 1"
            )
        if not isinstance(found["digest"], str) or not isinstance(found["identity"], dict):
            raise ValueError("incomplete")
        if _digest(found["identity"]) != found["digest"]:
            raise ValueError("its digest does not match its identity")
    except (*MALFORMED, ConfigError) as error:
        raise ForeignFileError(f"{file}: not a namespace file ({error}); {REMEDY}") from error
    return found


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _digest(identity: Mapping[str, Any]) -> str:
    try:
        # As it is read back: numbers that are names of entries are texts there, in another order.
        plain = json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"identity = {identity!r}: allowed are text, finite numbers, true, false, null, "
            f"lists and tables of these ({error})"
        ) from error
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _difference(found: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    theirs, ours = found["identity"], _plain(identity)
    differing = [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    return "; ".join(differing) or "its digest does not match its identity"
