"""``kvstore ctl``: what it sends, what it prints, how it ends."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import kvstore
from kvstore.sizes import format_size
from tests.store.support import CHUNK, keys_of, payloads, small
from tests.tools.support import command
from tests.tools.test_top import served

A = keys_of("a", 4)


async def ctl(*words: str, given: str = "") -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    with patch("sys.stdin", io.StringIO(given)):
        done = await asyncio.to_thread(command, "ctl", *words)
    return done.returncode, done.stdout, done.stderr


def hexes(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


async def test_it_names_chunks_by_words_files_and_standard_input(tmp_path: Path) -> None:
    where = str(tmp_path / "s")
    listed, named = tmp_path / "list.json", tmp_path / "object.json"
    listed.write_text(json.dumps(hexes(A)))
    named.write_text(json.dumps({"keys": hexes(A)}))
    async with kvstore.open(small(tmp_path / "cache", disk=64, control=where)) as store:
        await store.put(A, payloads(A))
        for words, given in (
            (hexes(A), ""),
            (["--file", str(listed)], ""),
            (["--file", str(named)], ""),
            (["--file", "-"], named.read_text()),
        ):
            status, out, _ = await ctl(where, "remove", "--dry-run", *words, given=given)
            assert status == 0
            assert "remove: nothing was done; 4 keys" in out
            assert "host: 4" in out
        status, out, _ = await ctl(where, "--json", "remove", *hexes(A))
        told = json.loads(out)
        assert (status, told["state"], told["affected"], told["version"]) == (0, "done", 4, 1)
        status, out, _ = await ctl(where, "status", "--json")
        assert (status, json.loads(out)["version"]) == (0, 1)
        status, _, err = await ctl(where, "set", "disk.bytes=1GiB")
        assert (status, "allowed are host.bytes" in err) == (2, True)
        status, out, _ = await ctl(where, "status")
        assert (status, "job 1, remove: done" in out) == (0, True)
        rows = store.stats().rows
        size = format_size(rows * CHUNK)
        assert f"host: 0 chunks, 0 B of {size} in use" in out
        assert await store.put(keys_of("more", 2), payloads(keys_of("more", 2))) == 2
        _, out, _ = await ctl(where, "status")
        assert f"host: 2 chunks, {format_size(2 * CHUNK)} of {size} in use" in out
        await ctl(where, "set", f"host.bytes={rows // 2 * CHUNK}")
        _, out, _ = await ctl(where, "status")
        half = format_size(rows // 2 * CHUNK)
        assert f"host: 2 chunks, {format_size(2 * CHUNK)} of {half} ({size} are allocated)" in out


async def test_a_file_may_ask_for_a_dry_run(tmp_path: Path) -> None:
    where, file = str(tmp_path / "s"), tmp_path / "body.json"
    async with kvstore.open(small(tmp_path / "cache", control=where)):
        file.write_text('{"keys": ["61"], "dry_run": true}')
        status, out, errors = await ctl(where, "remove", "--file", str(file))
        assert (status, "nowhere" in out, errors) == (0, True, ""), out


async def test_it_ends_with_1_where_a_job_failed_and_2_where_it_was_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "s")
    many = keys_of("many", 8)
    async with kvstore.open(small(tmp_path / "cache", rows=8, control=where)):
        status, out, _ = await ctl(where, "retain", "--seconds", "60", *hexes(many))
        assert (status, "4 chunks are beyond pinned_share" in out) == (1, True)
        for words, reason in (
            (["remove", "zz"], "'zz' is not 1 to 56 bytes"),
            (["remove"], "name the chunks by KEY or by --file"),
            (["set", "bytes=5"], "write NAME=VALUE"),
            (["set", "host.bytes"], "write NAME=VALUE"),
            (["set", "host.bytes=1MiB", "host.bytes=2MiB"], "host.bytes is given twice"),
            (["job", "99"], "no such job"),
            (["remove", "--file", str(tmp_path / "missing")], "No such file"),
        ):
            status, _, errors = await ctl(where, *words)
            assert status == 2
            assert reason in errors
    status, _, errors = await ctl(where, "status")
    assert (status, "no answer" in errors) == (2, True)
    status, _, errors = await ctl(str(tmp_path), "status")
    assert (status, "it is no socket" in errors) == (2, True)


async def test_words_and_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    odd, deep = tmp_path / "odd", tmp_path / "deep"
    odd.write_bytes(b"\xff\xc3")
    deep.write_text("[" * 100_000)
    for words in (
        ["http://127.0.0.1:abc", "status"],
        ["http://127.0.0.1:9", "--token-file", str(odd), "status"],
        ["s", "remove", "--file", str(odd)],
        ["s", "remove", "--file", str(deep)],
        ["s", "set", "host.bytes=1", "host.bytes.x=2"],
    ):
        status, _, errors = await ctl(*words)
        assert (status, "Traceback" in errors) == (2, False), words


async def test_another_server_is_told_apart(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path)) as store, served(store) as url:
        port = url.removesuffix("/metrics")
        status, _, errors = await ctl(port, "status")
        assert (status, "is no control socket of kvstore" in errors) == (2, True)
    for url in ("http://localhost", "http://a b:80"):
        status, _, errors = await ctl(url, "status")
        assert (status, "must be http://HOST:PORT" in errors) == (2, True)
