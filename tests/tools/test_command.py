"""The `kvstore` command over a real cache."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError
from kvstore.tools.cli import EXAMPLES, _parser, main
from kvstore.tools.output import print_json, print_table
from tests.tiers.support import flip
from tests.tools.support import command, error_of, in_a_process, json_of, on_terminal, run

CHUNK = 64 * 1024
KEYS = [b"key-%03d" % index + b"\0\0\0\0" for index in range(30)]


def config(path: Path, host: str = "4MiB", capacity: int = 2**22) -> dict[str, Any]:
    disk = {"type": "disk", "path": str(path), "segment_bytes": "1MiB", "capacity_bytes": capacity}
    sizes = {"cpu_bytes_to_use": host, "chunk_bytes": CHUNK}
    return {**sizes, "identity": {"model": "tiny"}, "tiers": [disk]}


@pytest.fixture
async def cache(tmp_path: Path) -> Path:
    async with kvstore.open(config(tmp_path / "cache")) as store:
        await store.put(KEYS, [bytes([index]) * CHUNK for index in range(30)])
    return tmp_path / "cache"


def segments(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/lane-0/segment-*.safetensors"))


def test_inspect_lists_namespaces_lanes_and_segments(cache: Path) -> None:
    said = run("inspect", cache)
    assert "namespace tiny-" in said
    assert re.search(r"lane +process +chunks .*\n +0 +- +30 +1\.9 MiB +2\.8 MiB +3 ", said)
    assert "segment-" not in said
    listed = command("inspect", str(cache), "--segments").stdout
    assert all(f"segment-{number}.safetensors" in listed for number in range(3))


def test_inspect_as_json_has_counts_bytes_and_times(cache: Path) -> None:
    told = json_of("inspect", cache)
    (namespace,) = told["namespaces"]
    assert namespace["identity"]["model"] == "tiny"
    (lane,) = namespace["lanes"]
    assert sum(segment["live"] for segment in lane["segments"]) == 30
    assert sum(segment["live_bytes"] for segment in lane["segments"]) == 30 * CHUNK
    for segment in lane["segments"]:
        if segment["live"]:
            assert 0 < segment["oldest_ms"] <= segment["newest_ms"]


async def test_reads_are_counted_across_a_restart(cache: Path) -> None:
    async with kvstore.open(config(cache)) as store, store.get(KEYS[:5]) as chunks:
        assert len(chunks) == 5
    told = json_of("inspect", cache)
    lane = told["namespaces"][0]["lanes"][0]
    assert sum(segment["reads"] for segment in lane["segments"]) == 5


async def test_inspect_and_verify_work_beside_the_process_that_owns_the_lane(cache: Path) -> None:

    async with kvstore.open(config(cache)) as store:
        told = in_a_process("inspect", str(cache)).stdout
        assert re.search(rf"\n +0 +{os.getpid()} +30 ", told)
        assert in_a_process("verify", str(cache)).returncode == 0
        assert await store.resolve(KEYS) == 30


def test_verify_reads_every_chunk(cache: Path) -> None:
    assert json_of("verify", cache) == {
        "version": 1,
        "chunks": 30,
        "bytes": 30 * CHUNK,
        "unchecked": 0,
        "faults": [],
    }


def test_verify_finds_a_flipped_byte_in_a_payload_and_names_its_key(cache: Path) -> None:
    path = segments(cache)[0]
    flip(path, path.stat().st_size - 1)
    (fault,) = json_of("verify", cache, status=1)["faults"]
    assert fault["path"] == str(path)
    assert bytes.fromhex(fault["key"]) in KEYS
    assert "digest" in fault["what"]


def test_a_report_in_a_file_has_all_faults_though_progress_is_shown(
    cache: Path, tmp_path: Path
) -> None:
    path = segments(cache)[0]
    flip(path, path.stat().st_size - 1)
    with (tmp_path / "report").open("wb") as report:
        shown, status = on_terminal(["verify", str(cache)], "", out=report)
    assert status == 1
    assert "WRONG" not in shown
    assert f"WRONG {path}" in (tmp_path / "report").read_text()


def test_an_identity_with_a_number_that_json_lacks_is_told(cache: Path) -> None:
    (file,) = cache.glob("*/namespace.json")
    file.write_text(file.read_text().replace('"tiny"', "NaN"))
    assert "allowed are text, finite numbers" in run("inspect", cache, "--json", status=1)
    with pytest.raises(KVStoreError, match="cannot be told in JSON"):
        print_json({"share": float("nan")})


def test_an_error_is_nowhere_else_where_standard_error_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert main(["inspect", "/nowhere"]) == 2
    assert capsys.readouterr().out == ""


def test_an_empty_column_costs_others_no_width_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "mean error of the log-probability of a token, in nats"
    print_table(["figure", ">with the codec", ">at most", ""], [(long, 0.01, 0.02, "")])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_verify_and_inspect_find_a_damaged_record(cache: Path) -> None:
    flip(segments(cache)[0], 4096 + 128 + 64)
    for name in ("verify", "inspect"):
        assert "slot 1: damaged record" in run(name, cache, status=1)


def test_verify_finds_a_truncated_segment(cache: Path) -> None:
    path = segments(cache)[0]
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    assert "cut short" in run("verify", cache, status=1)


def test_verify_finds_a_damaged_header_and_a_foreign_file(cache: Path) -> None:
    first, second = segments(cache)[:2]
    flip(first, 20)
    second.write_bytes(b"something else")
    (namespace,) = cache.glob("*/namespace.json")
    namespace.write_text("{")
    for name in ("verify", "inspect"):
        said = run(name, cache, status=1)
        for path in (first, second, namespace):
            (line,) = (line for line in said.splitlines() if str(path) in line)
            assert line.count(str(path)) == 1, "once is enough"


def test_a_huge_claim_in_a_header_costs_no_memory(cache: Path) -> None:
    from kvstore.tiers.disk.format import Geometry, Header, encode_header

    path = segments(cache)[0]
    header = Header("00" * 32, "11" * 16, Geometry(2**40, 65536, 65536))
    with path.open("r+b") as handle:
        handle.write(encode_header(header))
    run("verify", cache, status=1)


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_a_path_without_a_cache_is_a_usage_error(tmp_path: Path, name: str) -> None:
    assert "nowhere is not a folder" in error_of(name, tmp_path / "nowhere")
    assert "holds no kvstore namespace" in error_of(name, tmp_path)


def test_of_an_option_that_is_given_twice_neither_is_taken(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    for tenant in ("alice", "bob"):
        run("keys", keys, "--add", tenant)
    said = error_of("keys", keys, "--forget", "alice", "--forget", "bob")
    assert "--forget is given twice" in said
    assert all(name in run("keys", keys) for name in ("alice", "bob"))


def test_a_number_beyond_all_machines_is_a_usage_error(tmp_path: Path) -> None:
    assert "must be a whole number" in error_of("top", tmp_path, "--times", "9" * 30)


def test_an_unknown_command_is_a_usage_error() -> None:
    error_of("frobnicate")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_explains_itself_with_examples_that_are_right(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: kvstore {name}" in told
    assert "exit status: 0" in told
    examples, page = EXAMPLES[name]
    assert (Path(__file__).resolve().parents[2] / "docs" / page).exists()
    for line in examples.splitlines():
        words = shlex.split(line.split(" | ")[0].split(" > ")[0])
        assert words[:2] == ["kvstore", name]
        _parser().parse_args(words[1:])


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["inspect", "inspect --segments", "config check", "simulate"])
def test_tables_fit_the_terminal_and_a_pipe_has_a_line_for_each_row(
    cache: Path, tmp_path: Path, name: str, columns: int
) -> None:
    toml, trace = tmp_path / "kvstore.toml", tmp_path / "trace.jsonl"
    toml.write_text('cpu_bytes_to_use = "1MiB"\nchunk_bytes = 4096\n')
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 3)
    words = {
        "inspect": ["inspect", str(cache)],
        "inspect --segments": ["inspect", str(cache), "--segments"],
        "config check": ["config", "check", str(toml), "--all"],
        "simulate": ["simulate", str(trace), "--host", "1", "--disk", "1,2"],
    }[name]
    shown, status = on_terminal(words, "", columns)
    assert status == 0, shown
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]
    table = [line for line in lines if str(tmp_path) not in line]
    assert max(map(len, table)) <= columns, shown
    # What the environment says of terminals does not make one of a pipe.
    coloured = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "30"}
    piped = in_a_process(*words, environment=coloured).stdout.splitlines()
    assert not any("\x1b" in line for line in piped)
    assert len(piped) <= len(lines)
    assert not any(line.endswith(" ") for line in piped)


async def test_inspect_shows_the_epoch_and_compact_gives_older_chunks_back(cache: Path) -> None:
    from kvstore.tiers.disk.epoch import raise_epoch

    (namespace,) = cache.iterdir()
    assert "epoch" not in command("inspect", str(cache)).stdout
    raise_epoch(namespace, 3)
    text = command("inspect", str(cache)).stdout
    assert f"namespace {namespace.name}, epoch 3" in text
    assert re.search(r" outdated .*\n +0 +- +0 +0 B .* 30 ", text)
    told = json_of("inspect", cache)["namespaces"][0]
    assert (told["epoch"], told["lanes"][0]["epoch"]) == (3, 0)
    # Nobody will find them: whether they are whole, and forgetting them, matters to nobody.
    for segment in namespace.rglob("segment-*"):
        half = segment.stat().st_size // 2
        with segment.open("r+b") as file:
            file.seek(half)
            file.write(bytes(half))
    run("verify", cache)
    assert "would forget 0 chunks" in command("purge", str(cache), "--all", "--dry-run").stdout
    run("compact", cache)
    told = json_of("inspect", cache)["namespaces"][0]
    assert (told["epoch"], told["lanes"][0]["epoch"]) == (3, None)
    assert told["lanes"][0]["segments"] == []
    (namespace / "epoch").write_text("soon\n")
    assert "holds no epoch" in run("inspect", cache, status=1)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("kvstore in", {"inspect"}),
        ("kvstore com", {"compact", "completion"}),
        ("kvstore gc --ke", {"--keep"}),
        ("kvstore advise --ho", {"--host"}),
        ("kvstore completion ", {"bash", "zsh", "tcsh"}),
    ],
)
def test_bash_completes_commands_and_options(
    typed: str, expected: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    script = run("completion", "bash")
    name = re.search(r"complete .*-F (\S+) kvstore", script)
    assert name is not None
    words = typed.split(" ")
    asked = " ".join(f"'{word}'" for word in words)
    program = f"{script}\nCOMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}\n"
    program += f"{name[1]} 2>/dev/null; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert expected <= set(done.stdout.split()), done.stdout
    assert all(each.startswith(words[-1]) for each in done.stdout.split())


def test_of_a_long_identity_inspect_shows_what_a_person_would_call_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {f"config.{number}": number for number in range(60)}
    identity = {"model": "tiny", "weights": "w" * 200, **settings}
    with kvstore.open_sync({**config(tmp_path), "identity": identity}) as store:
        store.put(KEYS[:1], [bytes(CHUNK)])
    lines = run("inspect", tmp_path).splitlines()
    assert '  model: "tiny"' in lines
    assert any(line.startswith("  weights: ") and line.endswith("...") for line in lines)
    assert any(line.endswith("settings more: --settings lists them") for line in lines)
    assert len(lines) < 10
    whole = run("inspect", tmp_path, "--settings")
    assert all(f"  config.{number}: {number}\n" in whole for number in range(60))
    assert "w" * 200 in whole
