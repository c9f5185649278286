"""``kvstore keys``: the file of keys that chunks are encrypted with."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from secrets import token_bytes

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.keys import ALL, KEY_BYTES, Secret, id_of, parse_keys, read_keys, write_keys
from kvstore.tools.output import asks, confirm, counted, print_json, print_table

__all__ = ["run_keys"]


def run_keys(options: argparse.Namespace) -> int:
    """List the ids of keys, or make or forget keys first. Keys themselves are never shown.

    Raises:
        KVStoreError: if the file cannot be used, or has no keys of that tenant.
        OSError: if it cannot be written.
    """
    if str(options.file).startswith("env:"):
        raise ConfigError(f"{options.file}: give a file: what a variable holds is not changed here")
    # Before it is locked: a person may take long.
    if (options.forget or options.retire) is not None and asks(options):
        keys = _read(options)
        if options.forget in keys:
            confirm(f"forget the keys of {options.forget!r}? Nobody can read its chunks any more")
        old = len(keys.get(options.retire, ())) - 1
        if old > 0:
            confirm(
                f"remove {counted(old, 'older key')} of {options.retire!r}? Nobody can read any "
                "more what is encrypted with it; kvstore ctl reencrypt comes first"
            )
    if any(each is not None for each in (options.add, options.retire, options.forget)):
        with _alone(options.file):
            keys = _changed(options)
    else:
        keys = _read(options)
    ids = {tenant: [secret.id.hex() for secret in its] for tenant, its in keys.items()}
    if options.json:
        print_json({"tenants": ids})
    else:
        rows = [[name, its[0], ", ".join(its[1:]) or "-"] for name, its in ids.items()]
        print_table(["tenant", "newest key", "older keys"], rows)
    return 0


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other command change a file of this folder meanwhile: it would lose these keys."""
    folder = os.open(
        Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    )
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _changed(options: argparse.Namespace) -> dict[str, list[Secret]]:
    """Change the file, and return what is in it then."""
    keys = _read(options)
    if options.add is not None and not (options.add and options.add.isprintable()):
        raise KVStoreError(f"{options.add!r} is no name of a tenant: it must be printable")
    if options.add is not None:
        keys.setdefault(options.add, []).insert(0, _new())
        keys.setdefault(ALL, [_new()])
    for tenant in (options.retire, options.forget):
        if tenant is not None and tenant not in keys:
            raise KVStoreError(f"{options.file} has no keys of {tenant!r}")
    if options.retire is not None:
        del keys[options.retire][1:]
    if options.forget == ALL:
        raise KVStoreError(f"{ALL!r} must have a key: add one, and then retire the others")
    if options.forget is not None:
        del keys[options.forget]
    write_keys(options.file, keys)
    return keys


def _new() -> Secret:
    material = token_bytes(KEY_BYTES)
    return Secret(id_of(material), material)


def _read(options: argparse.Namespace) -> dict[str, list[Secret]]:
    if options.add is not None and not options.file.exists():
        return {}
    # Root may look after the keys of a server's user.
    found = read_keys(options.file, anybodys=os.geteuid() == 0)
    if not found:
        raise ConfigError(f"{options.file}: holds no keys")
    return parse_keys(found, str(options.file))
