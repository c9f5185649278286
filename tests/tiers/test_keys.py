"""Keys: where they come from, which are refused, and how changes are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.policies.shares import tag_of, tenant_keys
from kvstore.tiers.keys import KeyRing, id_of, parse_keys, read_keys, write_keys
from tests.patience import PATIENCE, until

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
    # What she has stored before she had keys of her own.
    assert ring.find(ALICES, id_of(OTHER)) is not None
    assert ring.find(KEY, id_of(OLD)) is None
    assert ring.ids() == {id_of(NEW), id_of(OLD), id_of(OTHER)}


def test_a_write_follows_the_keys_of_its_tenant_until_they_are_forgotten(file: Path) -> None:
    def change(**keys: list[bytes]) -> None:
        write_keys(file, parse_keys({"*": [OTHER], **keys}, "here"))
        ring.look()

    write_keys(file, parse_keys({"*": [OTHER], "alice": [OLD]}, "here"))
    ring = KeyRing(str(file), tag_of)
    begun = ring.owned
    change(alice=[NEW, OLD])
    assert ring.newest(ALICES, begun).material == NEW
    change(alice=[NEW])
    assert ring.newest(ALICES, begun).material == NEW
    # Nobody opens what was begun before, whatever she gets, until the core has let her chunks go.
    known = {id_of(OLD), id_of(NEW), id_of(OTHER)}
    for keys in ({"alice": [OLD]}, {}, {"alice": [OLD]}):
        change(**keys)
        assert ring.newest(ALICES, begun).id not in known
        assert ring.newest(ALICES, ring.owned).id not in known
    earlier = ring.forgotten()
    change(alice=[NEW])
    later = ring.forgotten()
    earlier.end()
    assert ring.newest(ALICES).id not in known
    later.end()
    assert ring.newest(ALICES).material == NEW
    assert ring.newest(ALICES, begun).id not in known


def test_a_key_that_stays_is_found_while_others_leave(file: Path) -> None:
    third = bytes([4]) * 32

    class Id(bytes):
        def __eq__(self, other: object) -> bool:
            ring.look()
            return bytes(self) == other

        __hash__ = bytes.__hash__

    write_keys(file, parse_keys({"*": [OTHER], "alice": [third, NEW, OLD]}, "here"))
    ring = KeyRing(str(file), tag_of)
    write_keys(file, parse_keys({"*": [OTHER], "alice": [NEW, OLD]}, "here"))
    for wanted in (NEW, OLD):
        found = ring.find(ALICES, Id(id_of(wanted)))
        assert found is not None
        assert found.material == wanted


def test_what_is_written_is_read(file: Path) -> None:
    table = parse_keys({"*": [OTHER], 'a "name" of\n mine': [NEW, OLD]}, "here")
    write_keys(file, table)
    assert parse_keys(read_keys(file), "there") == table
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_a_killed_process_left_goes_with_the_keys_in_it(file: Path) -> None:
    table = parse_keys({"*": [OTHER], "alice": [NEW]}, "here")
    write_keys(file, table)
    killed = f"""
import os, signal
from pathlib import Path
from kvstore.tiers import keys
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
file = Path({str(file)!r})
keys.write_keys(file, keys.parse_keys(keys.read_keys(file), "here"))
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert len(list(file.parent.iterdir())) == 2
    write_keys(file, {"*": table["*"]})
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_any_name_is_written_or_refused_before_the_file_changes(file: Path) -> None:
    table = parse_keys({"*": [OTHER], "team-\U0001f600 é": [NEW]}, "here")
    write_keys(file, table)
    assert parse_keys(read_keys(file), "there") == table
    with pytest.raises(ConfigError, match="no way to write"):
        write_keys(file, parse_keys({"*": [OTHER], "\udcff": [OLD]}, "here"))
    assert parse_keys(read_keys(file), "there") == table


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
        (f"'*' = '{NEW.hex()}'\nalice = '{NEW.hex()}'", "in common"),
        (f"'*' = '{OLD.hex()}'\n{NEW.hex()} = '{OLD.hex()}'", "name of a tenant belongs"),
    ],
)
def test_what_is_no_table_of_keys_is_refused_and_not_shown(
    file: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        KeyRing(write(file, text))
    assert str(file) in str(caught.value)
    assert NEW.hex()[:16] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o620, 0o604, 0o622, 0o610])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    write(file, f"'*' = '{NEW.hex()}'")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go="):
        KeyRing(str(file))


def test_a_secret_that_is_mounted_for_a_group_is_read(file: Path, as_root: None) -> None:
    write(file, f"'*' = '{NEW.hex()}'")
    os.chown(file, 0, 65534)
    file.chmod(0o440)
    link = file.with_name("link")
    link.symlink_to(file)
    assert KeyRing(str(link)).newest(KEY).material == NEW


def test_a_file_that_is_written_anew_keeps_owner_mode_and_links(file: Path, as_root: None) -> None:
    table = parse_keys({"*": [OTHER]}, "here")
    write_keys(file, table)
    os.chown(file, 65534, 65533)
    file.chmod(0o400)
    link = file.with_name("link")
    link.symlink_to(file.name)
    more = parse_keys({"*": [NEW, OTHER]}, "here")
    write_keys(link, more)
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65533, 0o400)
    assert link.is_symlink()
    # Root looks after the keys of a server's user; a server takes its own and root's alone.
    assert parse_keys(read_keys(link, anybodys=True), "here") == more
    with pytest.raises(ConfigError, match="chown"):
        KeyRing(str(link))


@pytest.mark.parametrize("text", ["\ufeff'*' = '{}'", "# mine\r\n'*' = '{}'\r\n"])
def test_a_file_may_come_from_another_editor(file: Path, text: str) -> None:
    ring = KeyRing(write(file, text.format(NEW.hex().upper())))
    assert ring.newest(KEY).material == NEW


def test_a_key_in_place_of_its_file_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="is a key itself") as caught:
        KeyRing(NEW.hex())
    assert NEW.hex() not in str(caught.value)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [make_folder, make_pipe, lambda path: None])
def test_what_is_no_file_is_refused(file: Path, make: Callable[[Path], None]) -> None:
    make(file)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyRing(str(file))


def test_a_folder_in_place_of_the_file_costs_no_descriptor(file: Path) -> None:
    ring = KeyRing(write(file, f"'*' = '{NEW.hex()}'"))
    file.unlink()
    file.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ConfigError, match="Is a directory"):
            ring.look()
    assert len(os.listdir("/proc/self/fd")) == before
    assert ring.newest(KEY).material == NEW


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
    before = ring.changes
    ring.look()
    assert ring.changes == before
    service.keys = {"*": [OTHER.hex(), NEW]}
    ring.look()
    assert ring.changes == before + 1
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


def test_a_path_is_one_wherever_the_process_goes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.01)
    write(file, f"'*' = '{OLD.hex()}'")
    monkeypatch.setenv("HOME", str(file.parent))
    assert KeyRing(f"~/{file.name}").newest(KEY).material == OLD
    monkeypatch.chdir(file.parent)
    ring = KeyRing(file.name)
    monkeypatch.chdir("/")
    write(file, f"'*' = ['{NEW.hex()}', '{OLD.hex()}']")
    until(lambda: ring.newest(KEY).material == NEW)


def test_a_path_from_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = """
import os, sys
from kvstore.tiers.keys import KeyRing
os.rmdir(sys.argv[1])
KeyRing("keys.toml")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, gone],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert "ConfigError: keys.toml: the keys cannot be read" in done.stderr


def test_nobody_waits_for_a_source_that_hangs_and_the_log_says_that_it_does(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("kvstore.tiers.keys.SILENT_SECONDS", 0.05)
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
        time.sleep(0.1)
        for _ in range(10):
            assert ring.newest(KEY).material == NEW
        # It is asked once, not once for each use, and complained of once.
        assert service.asked == 1
        (record,) = (one for one in caplog.records if one.name == "kvstore.keys")
        assert "no answer for" in record.getMessage()
    finally:
        goes_on.set()


class Fetching(dict[str, bytes]):
    """A table that fetches each key as it is asked for."""

    def __iter__(self) -> Iterator[str]:
        raise ConnectionError("token s3cret was refused")

    keys = items = __iter__  # type: ignore[assignment]


async def later() -> dict[str, bytes]:
    return {"*": NEW}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (lambda: open("token s3cret was refused"), "raised FileNotFoundError"),
        (lambda: sys.exit(3), "raised SystemExit"),
        (lambda: Fetching({"*": NEW}), "raised ConnectionError"),
        (later, "must not be async"),
    ],
)
def test_a_function_that_fails_later_keeps_the_keys_and_is_told_of(
    service: Any,
    answers: Any,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.0)
    ring = KeyRing("key_service:fetch")
    monkeypatch.setattr(ring._read, "_call", answers)
    until(lambda: ring.newest(KEY).material == NEW and bool(caplog.records))
    assert told in caplog.text
    assert "s3cret" not in caplog.text
    monkeypatch.setattr(service, "fetch", answers)
    with pytest.raises(ConfigError, match=told) as caught:
        KeyRing("key_service:fetch")
    assert "s3cret" not in str(caught.value)


def test_a_module_that_raises_when_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key_service_without_url.py").write_text("raise RuntimeError('KMS_URL')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="raised RuntimeError when imported"):
        KeyRing("key_service_without_url:fetch")


def test_what_was_read_last_counts(service: Any) -> None:
    ring = KeyRing("key_service:fetch")
    begun, goes_on = threading.Event(), threading.Event()
    answers = [{"*": NEW}, {"*": [OTHER, NEW]}]

    def slow() -> Any:
        answer = answers.pop(0)
        if answers:
            begun.set()
            goes_on.wait(PATIENCE)
        return answer

    ring._read._call = slow  # type: ignore[attr-defined]
    looks = [threading.Thread(target=ring.look) for _ in range(2)]
    looks[0].start()
    assert begun.wait(PATIENCE)
    looks[1].start()
    looks[1].join(0.1)
    goes_on.set()
    for look in looks:
        look.join(PATIENCE)
    assert ring.newest(KEY).material == OTHER


@pytest.mark.parametrize("text", ["", "'*' = 'x'", None])
def test_keys_stay_while_their_source_is_wrong(
    file: Path,
    text: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.tiers.keys.LOOK_SECONDS", 0.0)
    ring = KeyRing(write(file, f"'*' = '{NEW.hex()}'"))
    if text is None:
        file.unlink()
    else:
        write(file, text)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        ring.look()
    until(lambda: ring.newest(KEY).material == NEW and caplog.records)
    for _ in range(100):
        assert ring.newest(KEY).material == NEW
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "keys: those from before are kept, as " + str(file)[:3]
    ]
    write(file, f"'*' = ['{OTHER.hex()}', '{NEW.hex()}']")
    ring.look()
    assert ring.newest(KEY).material == OTHER
