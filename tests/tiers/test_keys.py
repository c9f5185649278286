"""Keys: where they come from, which are refused, and how changes are noticed."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.policies.tenants import tag_of, tenant_keys
from kvstore.tiers.keys import KeyRing, id_of, parse_keys, read_keys, write_keys
from tests.patience import until

NEW, OLD, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
KEY = b"a block key of a chunk"
(ALICES,) = tenant_keys("alice", [KEY])


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_tenant_has_its_own_keys_and_all_others_have_theirs(file: Path) -> None:
    text = f'"*" = "{OTHER.hex()}"\nalice = ["{NEW.hex()}", "{OLD.hex()}"]\n'
    ring = KeyRing(write(file, text), tag_of)
    assert ring.newest(KEY).material == OTHER
    assert ring.newest(ALICES).material == NEW
    assert ring.find(ALICES, id_of(OLD)) is not None
    assert ring.find(ALICES, id_of(OTHER)) is None
    assert ring.find(KEY, id_of(OLD)) is None
    assert ring.ids() == {id_of(NEW), id_of(OLD), id_of(OTHER)}


def test_what_is_written_is_read(file: Path) -> None:
    table = parse_keys({"*": [OTHER], 'a "name" of\n mine': [NEW, OLD]}, "here")
    write_keys(file, table)
    assert parse_keys(read_keys(file), "there") == table
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no keys of"),
        ("alice = 'x'", "hexadecimal"),
        (f"'*' = '{NEW.hex()[2:]}'", "hexadecimal"),
        ("'*' = []", "a key or a list"),
        ("'*' = 3", "a key or a list"),
        ("'*' = [3]", "hexadecimal"),
        (f"'*' = ['{NEW.hex()}', '{NEW.hex()}']", "twice"),
        (f"alice = '{NEW.hex()}'", "no keys of"),
        (f"'*' = '{NEW.hex()}", "not TOML"),
        (f"'*' = '{NEW.hex()}'\nalice = '{OLD.hex()}'", "tenants"),
    ],
)
def test_what_is_no_table_of_keys_is_refused_and_not_shown(
    file: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        KeyRing(write(file, text))
    assert str(file) in str(caught.value)
    assert NEW.hex()[:16] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    write(file, f"'*' = '{NEW.hex()}'")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go="):
        KeyRing(str(file))


def test_a_file_of_another_user_is_refused(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    write(file, f"'*' = '{NEW.hex()}'")
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigError, match="chown"):
        KeyRing(str(file))


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [make_folder, make_pipe, lambda path: None])
def test_what_is_no_file_is_refused(file: Path, make: Callable[[Path], None]) -> None:
    make(file)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyRing(str(file))


def test_keys_may_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEYS", f"'*' = '{NEW.hex()}'")
    assert KeyRing("env:THE_KEYS").newest(KEY).material == NEW
    monkeypatch.delenv("THE_KEYS")
    with pytest.raises(ConfigError, match="THE_KEYS"):
        KeyRing("env:THE_KEYS")
    monkeypatch.setenv("THE_KEYS", NEW.hex())
    with pytest.raises(ConfigError, match="not TOML") as caught:
        KeyRing("env:THE_KEYS")
    assert NEW.hex()[:16] not in str(caught.value)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function that gives keys."""
    module: Any = types.ModuleType("key_service")
    module.keys = {"*": NEW}
    module.asked = 0

    def fetch() -> Any:
        module.asked += 1
        return module.keys

    module.fetch = fetch
    monkeypatch.setitem(sys.modules, "key_service", module)
    return module


def test_keys_may_come_from_a_function(service: Any) -> None:
    ring = KeyRing("key_service:fetch")
    assert ring.newest(KEY).material == NEW
    service.keys = {"*": [OTHER.hex(), NEW]}
    ring.look()
    assert ring.newest(KEY).material == OTHER
    assert ring.find(KEY, id_of(NEW)) is not None


@pytest.mark.parametrize("source", ["key_service:nothing", "no_such_module:fetch"])
def test_a_function_that_is_not_there_is_refused(service: Any, source: str) -> None:
    with pytest.raises(ConfigError, match=source):
        KeyRing(source)


def test_a_change_is_noticed_while_keys_are_used(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.01)
    ring = KeyRing(write(file, f"'*' = '{OLD.hex()}'"))
    write(file, f"'*' = ['{NEW.hex()}', '{OLD.hex()}']")
    until(lambda: ring.newest(KEY).material == NEW)


def test_nobody_waits_for_a_source_that_hangs(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.0)
    ring = KeyRing("key_service:fetch")
    asked, goes_on = threading.Event(), threading.Event()
    keys = service.keys

    def hangs() -> Any:
        service.asked += 1
        asked.set()
        goes_on.wait()
        return keys

    monkeypatch.setattr(ring._read, "_call", hangs)
    service.asked = 0
    try:
        for _ in range(100):
            assert ring.newest(KEY).material == NEW
        assert asked.wait(30)
        # It is asked once, not once for each use.
        assert service.asked == 1
    finally:
        goes_on.set()


@pytest.mark.parametrize("text", ["", "'*' = 'x'", None])
def test_keys_stay_while_their_source_is_wrong(
    file: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(write(file, f"'*' = '{NEW.hex()}'"))
    if text is None:
        file.unlink()
    else:
        write(file, text)
    for _ in range(3):
        ring.look()
    assert ring.newest(KEY).material == NEW
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "keys: those from before are kept, as " + str(file)[:3]
    ]
    write(file, f"'*' = ['{OTHER.hex()}', '{NEW.hex()}']")
    ring.look()
    assert ring.newest(KEY).material == OTHER
