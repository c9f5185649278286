"""``kvstore simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.plugins import Choice
from kvstore.simulation import Setup, read_trace
from kvstore.tools.cli import main
from kvstore.tools.replays import progress_of, scaled
from tests.tools.support import error_of, json_of, run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [[1, 2, 3], [4, 5], [1, 2, 6], [4, 5, 7], [1, 2, 3]]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * n, "hash_ids": ids}) + "\n"
            for n, ids in enumerate(requests)
        )
    )
    return path


def told(*arguments: object) -> Any:
    return json_of("simulate", *arguments)


def test_a_table_has_a_row_for_each_combination(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--host", "3,100%", "--policy", "lru,s3-fifo(small=0.5)",
                 "--optimum"]) == 0  # fmt: skip
    head, names, *rows = capsys.readouterr().out.splitlines()
    assert head == "trace.jsonl: 5 requests, 14 accesses to 7 chunks"
    assert names.split()[:2] == ["host", "policy"]
    assert [row.split()[:2] for row in rows[:4]] == [
        ["3", "lru"], ["3", "s3-fifo(small=0.5)"], ["7", "lru"], ["7", "s3-fifo(small=0.5)"]
    ]  # fmt: skip
    assert [row.split(":")[0] for row in rows[4:]] == [
        "optimum with 3 chunks", "optimum with 7 chunks"
    ]  # fmt: skip


def test_json_tells_the_same_and_more(trace: Path) -> None:
    found = told(trace, "--host", 7, "--optimum", "--chunk-bytes", "2MiB")
    assert found["trace"] == {
        "name": "trace.jsonl", "requests": 5, "accesses": 14, "unique": 7
    }  # fmt: skip
    (row,) = found["replays"]
    assert (row["hits"], row["hit_ratio"], row["host_writes"]) == (7, 0.5, 7)
    assert row["bytes_written_per_hit"] == 2 * 2**20
    assert found["optimum"][0]["hits"] == 7


def test_what_hits_save_is_told_where_costs_are_given(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With room for all the hits are the first 2 of three prompts of three chunks, and all of one.
    costs = ("--host", 7, "--compute-ms", "1000,3000@2", "--read-ms", 5)
    (row,) = told(trace, *costs)["replays"]
    hits = 2 + 2 + 3
    assert row["hits"] == hits
    assert row["saved_s"] == pytest.approx(hits + 3 * 1.0 + 2.0)
    assert row["computed_without_s"] == pytest.approx(14 + 4 * 3.0 + 1.0)
    _, names, shown = run("simulate", trace, *map(str, costs)).splitlines()
    assert names.endswith("s saved  saved %")
    assert shown.split()[-2:] == ["12", "44.44"]
    assert told(trace, "--host", 7)["replays"][0]["saved_s"] is None
    with pytest.raises(SystemExit):
        main(["simulate", str(trace), "--compute-ms", "12@3"])
    assert "--compute-ms: must be milliseconds, a number above 0, or such as 12,30@60" in (
        capsys.readouterr().err
    )


def test_two_tiers_filters_and_flows(trace: Path) -> None:
    rows = told(
        trace, "--host", 3, "--disk", 7, "--flow", "write-through,demote,exclusive",
        "--disk-admission", "none,reuse(threshold=2)",
    )["replays"]  # fmt: skip
    assert [(row["flow"], row["disk_admission"]) for row in rows] == [
        (flow, gate)
        for gate in ([], ["reuse(threshold=2)"])
        for flow in ("write-through", "demote", "exclusive")
    ]
    assert all(row["hits"] == row["host_hits"] + row["disk_hits"] for row in rows)
    assert rows[0]["hits"] == 7
    assert rows[3]["disk_writes"] < rows[0]["disk_writes"]


def test_a_curve_ends_where_everything_fits(trace: Path) -> None:
    curves = told(trace, "--curve", "--policy", "lru,arc", "--optimum")["curves"]
    assert {name: points[-1] for name, points in curves.items()} == {
        name: {"chunks": 7, "hit_ratio": 0.5} for name in ("lru", "arc", "optimum")
    }
    assert "chunks" in run("simulate", trace, "--curve")


def test_sizes_may_be_bytes(trace: Path) -> None:
    (row,) = told(trace, "--host", "8MiB", "--chunk-bytes", "2MiB")["replays"]
    assert row["host_chunks"] == 4


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "hit-density"])
def test_room_for_more_than_there_is_costs_no_more_than_room_for_all(
    trace: Path, policy: str
) -> None:
    sizes = f"100%,{10**17}"
    found = told(trace, "--host", 3, "--disk", sizes, "--disk-policy", policy,
                 "--disk-admission", "reuse(threshold=1)")  # fmt: skip
    for host in ("--host", "--store"):
        more = ["--replicas", 2] if host == "--store" else []
        told(trace, host, sizes, *more)
    one, other = found["replays"]
    assert (one["hits"], other["disk_chunks"]) == (other["hits"], 10**17)


def test_a_filter_remembers_that_part_of_the_keys_that_a_sample_has() -> None:
    setup = Setup(8, 4, disk_admission=(Choice.parse("reuse(table=40)"), Choice("doorkeeper")))
    half = scaled(setup, 0.5)
    assert half.disk_admission == (Choice.parse("reuse(table=20)"), Choice("doorkeeper"))
    default = scaled(Setup(8, host_admission=(Choice("reuse"),)), 0.01)
    assert default.host_admission == (Choice.parse("reuse(table=640)"),)


@pytest.mark.parametrize("more", [[], ["--curve"], ["--replicas", "2"]])
def test_a_trace_that_asks_for_nothing_is_refused(tmp_path: Path, more: list[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": []}\n')
    assert "empty.jsonl: no request asks for a chunk" in error_of("simulate", path, *more)


BUDGET = "endurance(bytes_per_day=500000000000)"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(trace: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{suffix}"
    told(trace, "--curve", "--picture", path)
    begin = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(begin)
    told(trace, "--host", "2,5", "--optimum", "--picture", path)
    # Its name is no formula.
    odd = trace.rename(trace.parent / "cost_$5_and_$6.jsonl")
    told(odd, "--host", "2", "--picture", path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "lots"], '--host lots: must be a number of chunks, a share such as "5%"'),
        (["--host", "0"], "--host 0: must be at least one chunk"),
        (["--policy", "mru"], "--policy mru: unknown policy 'mru'; known are: arc"),
        (["--policy", "lru(x=1)"], "--policy lru(x=1): "),
        (["--policy", "lru("], "--policy lru(: "),
        (["--disk", "5", "--disk-policy", "mru"], "--disk-policy mru: unknown policy"),
        (["--admission", "magic"], "--admission magic: unknown filter"),
        (["--disk", "5", "--flow", "up"], "--flow up: must be one of: write-through, demote"),
        (["--disk", str(10**17), "--disk-admission", "doorkeeper"], f"{10**17} chunks: a filter"),
        (["--disk", "5", "--flow", ","], "--flow and --disk: name at least one"),
        (["--host", "1" + 400 * "0"], "--host 1"),
        (["--host", "1000000000PiB", "--chunk-bytes", "1"], "--host 1000000000PiB: must be"),
        (["--sample", "2"], "--sample 2.0: must be above 0 and at most 1"),
        (["--host", "64GiB"],
         "--host 64GiB: a size in bytes needs --chunk-bytes, because trace.jsonl"),
        (["--disk", "5,1TiB"], "--disk 1TiB: a size in bytes needs --chunk-bytes"),
        (["--replicas", "2", "--store", "1GiB"], "--store 1GiB: a size in bytes needs --chunk-b"),
        (["--read-ms", "3"], "--read-ms says what is saved only with --compute-ms"),
        (["--compute-ms", "3", "--curve"],
         "--curve is of all sizes of one server's host memory: without"),
        (["--picture", "x.jpg"], "x.jpg: a picture must end in one of: .png, .svg"),
        (["--disk", "1%"], "--disk 1%: less than one chunk; 0 is none"),
        (["--disk", "1KiB", "--chunk-bytes", "2KiB"], "--disk 1KiB: less than one chunk"),
        (["--replicas", "2", "--store", "1%"], "--store 1%: less than one chunk"),
        (["--host", "9" * 400 + "%"], "--host 99"),
        (["--curve", "--disk", "5"],
         "--curve is of all sizes of one server's host memory: without"),
        (["--disk", "5", "--disk-admission", BUDGET], "bytes_per_day is of the whole trace"),
        (["--disk-admission", BUDGET, "--chunk-bytes", "1KiB", "--sample", "0.5"],
         "bytes_per_day is of the whole trace"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    trace: Path, arguments: list[str], message: str
) -> None:
    assert f"kvstore: {message}" in error_of("simulate", trace, "--host", "5", *arguments)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert f"{path}, line 1: not a trace" in error_of("simulate", path)


def test_a_trace_too_small_for_the_default_has_one_chunk_of_host_memory(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [1, 2, 3]}) + "\n")
    (row,) = told(path)["replays"]
    assert row["host_chunks"] == 1
    assert "--host 10%: less than one chunk" in error_of("simulate", path, "--host", "10%")


def test_a_size_of_chunks_that_nobody_gave_is_not_made_up(trace: Path) -> None:
    assert told(trace, "--host", 4)["chunk_bytes"] is None
    assert told(trace, "--host", 4, "--chunk-bytes", "64KiB")["chunk_bytes"] == 65536


def test_reading_shows_how_far_it_is_on_a_terminal_alone(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tools.simulate.NOTED_BYTES", 0)
    assert main(["simulate", str(trace), "--json"]) == 0
    assert "read" not in capsys.readouterr().err
    monkeypatch.setattr("kvstore.tools.replays.sys.stderr.isatty", lambda: True)
    assert main(["simulate", str(trace)]) == 0
    size = trace.stat().st_size
    assert f"{size} B of {size} B read" in capsys.readouterr().err


def test_several_servers_are_replayed_with_each_router_and_store(trace: Path) -> None:
    rows = told(
        trace, "--replicas", 3, "--host", 4, "--store", "0,100%",
        "--router", "round-robin,session",
    )["replays"]  # fmt: skip
    assert [(row["router"], row["store_chunks"] > 0) for row in rows] == [
        ("round-robin", False),
        ("session", False),
        ("round-robin", True),
        ("session", True),
    ]
    assert all(row["store_read"] == 0 for row in rows[:2])
    assert "wire/hit" in run("simulate", trace, "--replicas", "3", "--store", "100%")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas 0: must be from 1 to 10000"),
        (["--replicas", "2", "--router", ","], "--router: name at least one"),
        (["--store", "50%"], "--store and --router are for --replicas"),
        (["--replicas", "2", "--router", "luck"], "--router luck: must be one of"),
        (["--replicas", "2", "--store", "lots"], "--store lots"),
        (["--replicas", "2", "--hints"], "cannot be combined with --hints"),
    ],
)
def test_servers_that_cannot_be_replayed_are_refused_by_name(
    trace: Path, arguments: list[str], said: str
) -> None:
    assert said in error_of("simulate", trace, *arguments)


def test_a_replay_tells_a_person_how_long_it_takes(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    show = progress_of("replay 2 of 3", read_trace(trace))
    show(0)
    show(3)
    *_, last = terminal.getvalue().split("\r")
    assert re.match(r"replay 2 of 3: 60%, [\d,]+ requests/s, 0 s left", last)
