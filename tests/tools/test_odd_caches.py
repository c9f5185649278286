"""The command over caches that are damaged, planted, read-only, in use or somebody else's.

Whatever it meets it says in words, and its exit status tells: 0 all is well, 1 something is wrong,
2 it could not be done.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import ForeignFileError, KVStoreError
from kvstore.maintenance.offline import compact, purge
from kvstore.maintenance.survey import Fault, survey, verify
from kvstore.tiers.disk.format import ALIGN, RECORD_BYTES
from kvstore.tiers.disk.index import read_index
from kvstore.tiers.disk.io.base import read_bytes
from kvstore.tiers.disk.segment import remove_file
from kvstore.tools.cli import main
from tests.tiers.support import STRANGER, flip
from tests.tools.support import command
from tests.tools.test_command import CHUNK, KEYS, config, segments
from tests.tools.test_upkeep import sparse_cache

READING = [
    ["inspect"],
    ["verify"],
    ["compact", "--dry-run"],
    ["purge", "--all", "--dry-run"],
]
CHANGING = [["compact"], ["purge", "--all"]]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def run(*arguments: object) -> tuple[int, str]:
    """The exit status of the command, and all that it says."""
    done = command(*map(str, arguments))
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of 30 chunks in two segments and a half."""

    async def fill() -> None:
        async with kvstore.open(config(tmp_path / "cache")) as store:
            await store.put(KEYS, [bytes([index]) * CHUNK for index in range(30)])

    asyncio.run(fill())
    return tmp_path / "cache"


@pytest.fixture
def read_only(cache: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    place = cache.with_name("mounted")
    place.mkdir()
    mounts: list[list[str | Path]] = [
        ["--bind", cache, place],
        ["-o", "remount,ro,bind", place],
    ]
    for arguments in mounts:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def namespace_of(cache: Path) -> Path:
    (folder,) = (one for one in cache.iterdir() if one.is_dir() and not one.is_symlink())
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wrong(cache: Path) -> set[tuple[str, int | None]]:
    return {(one.path, one.slot) for one in verify(cache) if isinstance(one, Fault)}


# -- what must not be followed ---------------------------------------------------------------


def test_purge_and_compact_do_not_follow_a_namespace_that_is_a_link(
    cache: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "linked").symlink_to(namespace_of(cache))
    before = contents(cache)
    for arguments in (["purge", trap, "--all"], ["compact", trap], ["verify", trap]):
        status, told = run(*arguments)
        assert status in (1, 2)
        assert "linked" in told
        assert "symbolic link" in told
    assert contents(cache) == before


@pytest.mark.parametrize("arguments", CHANGING, ids=" ".join)
def test_a_path_that_is_a_link_is_not_changed(
    cache: Path, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "link").symlink_to(cache)
    before = contents(cache)
    status, told = run(*arguments, tmp_path / "link")
    assert status == 2
    assert "is a symbolic link; give the folder itself" in told
    assert contents(cache) == before
    assert run("verify", tmp_path / "link")[0] == 0


@pytest.mark.parametrize("arguments", [*READING, *CHANGING], ids=" ".join)
@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_path_is_not_the_current_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], path: str
) -> None:
    monkeypatch.chdir(cache)
    before = contents(cache)
    status, told = run(arguments[0], path, *arguments[1:])
    assert status == 2
    assert "must be the path of a folder, not empty" in told
    assert contents(cache) == before


@pytest.mark.parametrize("option", ["--namespace", "--unused", "--key"])
def test_an_empty_condition_is_no_condition_that_all_fulfil(cache: Path, option: str) -> None:
    name = namespace_of(cache).name
    for more in ([], ["--namespace", name], ["--all"]):
        assert run("purge", cache, *more, option, "")[0] == 2
    assert wrong(cache) == set()
    (its,) = survey(cache)
    assert sum(segment.counted for lane in its.lanes for segment in lane.segments) == 30


def test_a_segment_with_a_second_name_is_not_purged(cache: Path, tmp_path: Path) -> None:
    first = segments(cache)[0]
    os.link(first, tmp_path / "backup")
    before = first.read_bytes()
    status, told = run("purge", cache, "--all")
    assert status == 1
    assert f"WRONG {first}: has 2 names (hard links)" in told
    assert first.read_bytes() == before


@pytest.mark.parametrize("arguments", CHANGING, ids=" ".join)
def test_a_cache_that_others_could_have_filled_is_changed_on_request_alone(
    cache: Path, arguments: list[str]
) -> None:
    (namespace_of(cache) / "lane-0").chmod(0o777)
    before = contents(cache)
    status, told = run(*arguments, cache)
    assert status == 2
    assert "FAILED" in told
    assert "may be written by every user (mode 0777)" in told
    assert contents(cache) == before
    assert run(*arguments, cache, "--no-strict-modes")[0] == 0


# -- damage ------------------------------------------------------------------------------------


async def test_compact_tells_all_the_damage_that_it_meets_and_verify_the_rest(
    tmp_path: Path,
) -> None:
    await sparse_cache(tmp_path)
    found = [s for n in survey(tmp_path) for lane in n.lanes for s in lane.segments]
    for segment in found:
        # The last slot's payload, and a record.
        flip(Path(segment.path), segment.file_bytes - segment.slots * segment.slot_bytes)
        flip(Path(segment.path), ALIGN + 5 * RECORD_BYTES + 64)
    cut = Path(found[-1].path)
    os.truncate(cut, found[-1].file_bytes - CHUNK // 2)
    flip(Path(found[0].path), 30)
    before = wrong(tmp_path)
    assert (found[0].path, None) in before
    assert (str(cut), None) in before
    dry = json.loads(run("compact", tmp_path, "--dry-run", "--json")[1])["lanes"][0]["result"]
    status, told = run("compact", tmp_path, "--json")
    assert status == 1
    result = json.loads(told)["lanes"][0]["result"]
    met = {(fault["path"], fault["slot"]) for fault in result["faults"]}
    assert result["dropped"] == sum(fault["key"] is not None for fault in result["faults"])
    after = wrong(tmp_path)
    assert met, "compact met no damage"
    assert met | after == before
    assert {(fault["path"], fault["slot"]) for fault in dry["faults"]} <= before
    # What is left is what was not read, and the segment that is none.
    assert met & after == {(found[0].path, None)}


def test_a_damaged_record_that_compact_erases_is_told_and_counts(cache: Path) -> None:
    first = segments(cache)[0]
    for slot in (1, 4):
        flip(first, ALIGN + slot * RECORD_BYTES + 64)
    status, told = run("compact", cache)
    assert status == 1
    assert "2 damaged records" in told
    for slot in (1, 4):
        assert f"WRONG {first} slot {slot}: damaged record" in told
    assert run("verify", cache)[0] == 0
    assert run("compact", cache)[0] == 0


def test_a_lane_of_nothing_but_damaged_segments_is_not_called_empty(cache: Path) -> None:
    for path in segments(cache):
        flip(path, 30)
    for arguments in (
        ["compact"],
        ["compact", "--dry-run"],
        ["verify"],
        ["purge", "--all"],
    ):
        status, told = run(*arguments, cache)
        assert status == 1, arguments
        assert told.count("WRONG") == len(segments(cache))


def test_what_no_command_mends_says_what_to_do_and_that_helps(cache: Path) -> None:
    described = namespace_of(cache) / "namespace.json"
    whole = described.read_text()
    described.write_text("{")
    assert "namespace.json: not a namespace file" in run("verify", cache)[1]
    described.write_text('{"format": "of another application"}')
    assert "not a namespace file ('of another application')" in run("verify", cache)[1]
    described.write_text("{")
    with pytest.raises(ForeignFileError, match="remove it: the next server"):
        kvstore.open_sync(config(cache))
    described.write_text(whole.replace('"identity": {', '"identity": {"more": 1,'))
    assert "its digest does not match its identity" in run("verify", cache)[1]
    described.unlink()
    with kvstore.open_sync(config(cache)) as store:
        assert all(store.contains(KEYS))
    broken = segments(cache)[0]
    flip(broken, 30)
    status, told = run("compact", cache)
    assert (status, "nothing in it can be found again, so remove it" in told) == (1, True)
    broken.unlink()
    assert run("compact", cache)[0] == 0


def test_a_namespace_that_cannot_be_read_does_not_keep_the_others_from_compaction(
    cache: Path,
) -> None:
    broken = cache / "aaa"
    broken.mkdir()
    (broken / "namespace.json").write_text("{")
    flip(segments(cache)[0], ALIGN + RECORD_BYTES + 64)
    status, told = run("compact", cache)
    assert status == 2
    assert "FAILED" in told
    assert "1 damaged record\n" in told


def test_a_dry_run_refuses_what_the_run_would_refuse(cache: Path) -> None:
    cache.chmod(0o777)
    for command_line in (["compact"], ["purge", "--all"]):
        status, told = run(*command_line, cache, "--dry-run")
        assert status == 2
        assert "may be written by every user" in told
        assert run(*command_line, cache) == (status, told)


def test_a_purge_that_cannot_write_has_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    dropped: list[int] = []
    monkeypatch.setattr(os, "fdatasync", failing)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args[-1]))
    status, told = run("purge", "--all", cache)
    assert status == 2
    assert "FAILED" in told
    assert "Input/output error" in told
    assert dropped, "else the next purge would read that it is erased, which the medium lacks"
    assert set(dropped) == {os.POSIX_FADV_DONTNEED}


@pytest.mark.parametrize("command_line", CHANGING)
@pytest.mark.parametrize("odd", ["lane", "lock", "owner", "links"])
@needs_root
def test_a_dry_run_tells_which_files_the_run_would_not_change(
    cache: Path, command_line: list[str], odd: str
) -> None:
    segment = segments(cache)[0]
    if odd == "lane":
        segment.parent.chmod(0o777)
    elif odd == "links":
        os.link(segment, cache.with_name("more"))
    else:
        os.chown(segment if odd == "owner" else segment.with_name("lock"), STRANGER, STRANGER)
    dry, told = run(*command_line, cache, "--dry-run")
    assert dry, told
    assert "WRONG" in told or "FAILED" in told
    assert run(*command_line, cache)[0] == dry


def test_lanes_whose_namespace_file_is_lost_are_told_and_left_alone(cache: Path) -> None:
    (namespace,) = (path.parent for path in cache.glob("*/namespace.json"))
    lost = cache / "lost"
    shutil.copytree(namespace, lost)
    (lost / "namespace.json").unlink()
    assert run("verify", cache)[0] == 1
    status, told = run("inspect", cache)
    assert status == 1
    assert f"WRONG {lost}/namespace.json: cannot be read (No such file or directory)" in told
    status, told = run("gc", cache, "--keep", 1, "--yes")
    assert f"keep  {namespace.name}" in told
    assert "leave lost, " in told
    before = contents(lost)
    status, told = run("purge", lost, "--all")
    assert status == 2
    assert f"FAILED {lost}" in told
    assert contents(lost) == before
    assert [path.name for path in segments(lost)] == [path.name for path in segments(namespace)]


Make = Callable[[Path], object]

INSTEAD: dict[str, Make] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
}
CHANGED: dict[str, Make] = {
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "huge": lambda path: os.truncate(path, 2**42),
}


@pytest.mark.parametrize("odd", [*INSTEAD, *CHANGED])
@pytest.mark.parametrize("part", ["namespace.json", "lane-0/lock", "lane-0/segment-1.safetensors"])
def test_no_oddity_in_the_place_of_a_file_ends_a_command_by_a_traceback(
    cache: Path, odd: str, part: str
) -> None:
    path = namespace_of(cache) / part
    if odd in INSTEAD:
        path.unlink()
    (INSTEAD | CHANGED)[odd](path)
    for arguments in (*READING, *CHANGING, ["inspect", "--json"]):
        status, told = run(*arguments, cache)
        assert status in (0, 1, 2)
        assert "Traceback" not in told
        assert status == 0 or told.strip()


def test_a_lane_that_is_no_folder_is_none(cache: Path) -> None:
    namespace = namespace_of(cache)
    (namespace / "lane-1").write_text("a file")
    os.mkfifo(namespace / "lane-3")
    for arguments in (*READING, *CHANGING):
        assert run(*arguments, cache)[0] == 0
        assert run(*arguments, namespace)[0] == 0


def test_a_lane_under_a_name_that_no_process_gives_is_none(cache: Path) -> None:
    """Its owner would be asked for by the lock of another folder."""
    lane = next(cache.glob("*/lane-0"))
    for name in ("lane-00", "lane-1\u0663"):
        shutil.copytree(lane, lane.with_name(name))
    (found,) = survey(cache)
    assert [each.path for each in found.lanes] == [str(lane)]


def test_a_lane_that_is_a_symbolic_link_is_told_and_not_followed(cache: Path) -> None:
    (namespace_of(cache) / "lane-2").symlink_to("lane-0")
    for arguments in (*READING, *CHANGING, ["gc", "--keep", "1"]):
        status, told = run(*arguments, cache)
        keeps = arguments[0] == "gc" and "keep" in told
        assert keeps or (status, "lane-2" in told) == (1, True)
        assert keeps or "is a symbolic link; it is not followed" in told


# -- places and outputs -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_what_only_reads_works_on_a_read_only_mount(read_only: Path, arguments: list[str]) -> None:
    assert run(*arguments, read_only)[0] == 0


@pytest.mark.parametrize("arguments", CHANGING, ids=" ".join)
def test_what_changes_fails_in_words_on_a_read_only_mount(
    read_only: Path, arguments: list[str]
) -> None:
    status, told = run(*arguments, read_only)
    assert status == 2
    assert "FAILED" in told
    assert "Read-only file system" in told


AS_STRANGER = f"""
import contextlib, io, json, os, sys
from kvstore.tools.cli import _parser, main
_parser()  # Imports what this user can read.
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
told = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(arguments)
    told.append([status, out.getvalue() + err.getvalue()])
print(json.dumps(told))
"""


def as_stranger(commands: list[list[str]]) -> Iterator[tuple[list[str], int, str]]:
    """The commands as another user runs them: the exit status of each, and all that it says."""
    words = [sys.executable, "-c", AS_STRANGER, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for arguments, (status, told) in zip(commands, json.loads(done.stdout), strict=True):
        yield arguments, status, told


@pytest.mark.parametrize("part", ["cache", "namespace", "lane", "segment"])
@needs_root
def test_a_cache_that_this_user_may_not_read_is_told_in_words(cache: Path, part: str) -> None:
    tree = [cache, namespace_of(cache), namespace_of(cache) / "lane-0", segments(cache)[0]]
    hidden = ["cache", "namespace", "lane", "segment"].index(part)
    for parent in [*cache.parents, *tree[:hidden]]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    (namespace_of(cache) / "namespace.json").chmod(0o644)
    commands = [[*arguments, str(cache)] for arguments in (*READING, *CHANGING)]
    for arguments, status, told in as_stranger(commands):
        assert status in (1, 2), (arguments, told)
        assert "Permission denied" in told or "cannot be read" in told, (arguments, told)


@pytest.mark.parametrize("mode", [0o700, 0o711])
@needs_root
def test_a_namespace_beside_others_that_cannot_be_searched_is_told(cache: Path, mode: int) -> None:
    """That nothing was done there is no success. A lost+found is nobody's cache."""
    hidden = shutil.copytree(namespace_of(cache), cache / "hidden")
    hidden.chmod(mode)
    (cache / "lost+found").mkdir(mode=0o700)
    for path in [*cache.parents, cache, *cache.glob("cache-*"), *cache.glob("cache-*/**/*")]:
        if not path.is_symlink() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o055)
    reading = [["inspect"], ["verify"]]
    changing = [["compact"], ["purge", "--all"], ["gc", "--yes", "--keep", "2"]]
    commands = [[*arguments, str(cache)] for arguments in (*reading, *changing)]
    for arguments, status, told in as_stranger(commands):
        assert "lost+found" not in told
        assert status in (1, 2), (arguments, told)
        assert "hidden" in told, (arguments, told)


@pytest.mark.parametrize("look", ["inspect", "top"])
def test_an_output_that_nobody_reads_is_no_success(cache: Path, look: str) -> None:
    flip(segments(cache)[0], ALIGN + RECORD_BYTES + 64)
    reader, writer = os.pipe()
    os.close(reader)
    places = [writer, os.open("/dev/full", os.O_WRONLY)]
    for place in places:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.tools", look, str(cache)],
            stdout=place,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(place)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_without_a_place_for_errors_it_works(cache: Path) -> None:
    for what in (f"verify {cache}", f"compact {cache}", f"export {cache} {cache}/bundle"):
        done = subprocess.run(f"{sys.executable} -m kvstore.tools {what} 2>&-", shell=True)
        assert done.returncode == 0, what


def test_without_an_output_the_status_still_tells(cache: Path) -> None:
    shell = f"{sys.executable} -m kvstore.tools verify {cache} >&-"
    assert subprocess.run(shell, shell=True).returncode == 0
    flip(segments(cache)[0], ALIGN + RECORD_BYTES + 64)
    assert subprocess.run(shell, shell=True).returncode == 1


def test_names_that_are_no_text_are_shown_and_not_stumbled_over(cache: Path) -> None:
    odd = os.fsencode(cache.parent) + b"/\xff\xfe \x1b[31m"
    shutil.copytree(cache, os.fsdecode(odd))
    os.truncate(os.path.join(odd, os.fsencode(segments(cache)[0].relative_to(cache))), 10)
    for more in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.tools", "verify", odd, *more],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr


def test_a_path_that_no_file_system_takes_is_refused_in_words() -> None:
    for path in ("x" * 5000, "/dev/null/below", "/proc/self/mem", "/dev/null"):
        for arguments in (*READING, *CHANGING):
            status, told = run(*arguments, path)
            assert status == 2
            assert told.startswith("kvstore: ")


# -- a live cache -----------------------------------------------------------------------------


async def test_looking_at_a_cache_in_full_flow_finds_nothing_wrong(tmp_path: Path) -> None:
    async with kvstore.open(config(tmp_path)) as store:
        ended = False

        async def churn() -> None:
            number = 0
            while not ended:
                keys = [b"churn-%06d" % (number + n) + b"\0\0\0\0" for n in range(8)]
                await store.put(keys, [bytes([n]) * CHUNK for n in range(8)])
                number += 8

        churning = asyncio.ensure_future(churn())
        try:
            for _ in range(30):
                for look in (wrong, lambda path: {f for n in survey(path) for f in n.faults}):
                    assert await asyncio.to_thread(look, tmp_path) == set()
        finally:
            ended = True
            await churning


def test_segments_that_vanish_under_a_survey_are_no_faults(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for left in range(6):
        copy = cache.with_name(f"copy-{left}")
        shutil.copytree(cache, copy)
        calls = 0

        def vanishing(path: Path, left: int = left, copy: Path = copy) -> object:
            nonlocal calls
            calls += 1
            if calls > left:
                shutil.rmtree(namespace_of(copy) / "lane-0", ignore_errors=True)
            return read_index(path)

        monkeypatch.setattr("kvstore.maintenance.survey.read_index", vanishing)
        assert wrong(copy) == set()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_segment_that_is_emptied_and_removed_amid_a_look_is_no_fault(
    cache: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """As a server does with it; one of the same name may follow."""
    for left in range(12):
        copy = shutil.copytree(cache, cache.with_name(f"copy-{left}"))
        calls = 0

        def emptying(fd: int, size: int, offset: int, left: int = left) -> bytes:
            nonlocal calls
            calls += 1
            if calls == left + 1:
                path = Path(os.readlink(f"/proc/self/fd/{fd}"))
                whole = path.read_bytes()
                with path.open("r+b") as file:
                    remove_file(path, file.fileno())
                if replaced:
                    path.write_bytes(whole)
            return read_bytes(fd, size, offset)

        monkeypatch.setattr("kvstore.tiers.disk.index.read_bytes", emptying)
        assert wrong(copy) == set()
        assert calls > left


# -- the functions ------------------------------------------------------------------------------


def test_the_functions_take_text_and_refuse_what_is_none_by_their_own_error(cache: Path) -> None:
    assert purge(str(cache), key=KEYS[0])[0].chunks == 1
    assert compact(str(cache))[0].result is not None
    calls: tuple[Callable[[Any], object], ...] = (
        survey,
        compact,
        purge,
        lambda path: list(verify(path)),
    )
    for call in calls:
        for path in (None, 5, b"\xff" * 3, "with\0nul", [], object()):
            with pytest.raises(KVStoreError):
                call(path)
    for wrong_one in ({"key": "text"}, {"key": b""}, {"unused_since_ms": "7d"}, {"namespace": 5}):
        with pytest.raises(KVStoreError):
            purge(cache, **wrong_one)


def test_purge_says_how_the_space_comes_back(cache: Path) -> None:
    assert "kvstore compact" not in run("purge", cache, "--all", "--dry-run")[1]
    before = sum(path.stat().st_size for path in segments(cache))
    assert "kvstore compact gives the space back" in run("purge", cache, "--all")[1]
    assert sum(path.stat().st_size for path in segments(cache)) == before
    assert run("compact", cache)[0] == 0
    assert segments(cache) == []
    assert command("verify", str(cache)).returncode == 0


def test_a_path_above_a_link_is_the_one_that_the_system_means(cache: Path, tmp_path: Path) -> None:
    other = shutil.copytree(cache, tmp_path / "elsewhere" / "kv")
    (cache / "link").symlink_to(other / "below")
    (other / "below").mkdir()
    assert run("purge", f"{cache}/link/..", "--all", "--yes")[0] == 0
    assert sum(one.counted for lane in survey(cache)[0].lanes for one in lane.segments) > 0
    assert sum(one.counted for lane in survey(other)[0].lanes for one in lane.segments) == 0


def test_what_means_nothing_is_told_in_a_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for arguments in (
        ["keys", loop, "--add", "x"],
        ["top", ""],
        ["doctor", ""],
        ["inspect", cache, "--tenant", "others"],
        ["top", "http://127.0.0.1:1/metrics"],
    ):
        status, told = run(*arguments)
        assert (status, told.count("\n")) == (2, 1), (arguments, told)
    # As where standard error is closed.
    monkeypatch.setattr(sys, "stderr", None)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n')
    assert main(["simulate", str(trace), "--host", "1"]) == 0
