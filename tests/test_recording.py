"""Recording requests: what comes back, what bounds it, what is refused."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gzip
import io
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

import kvstore
from kvstore.errors import ConfigError, TraceError
from kvstore.observe.recorder import MOST_QUEUED, Recorder
from kvstore.observe.recording import MAGIC, RecordingStream
from kvstore.simulation import read_trace
from tests.patience import PATIENCE

MIB = 2**20

FULL = [b"full %d\0\0\0\0" % depth for depth in range(3)]
SLIDING = [b"sliding\0\0\0\1"]


def record(path: Path, *requests: Any, limit: int = MIB, chunk_bytes: int = 4096) -> Recorder:
    recorder = Recorder(path, limit, chunk_bytes)
    for chains in requests:
        recorder.add(chains)
    end(recorder)
    return recorder


def end(recorder: Recorder) -> None:
    """Let it write what waits."""

    async def run() -> None:
        recorder.stop()
        await recorder.run()

    asyncio.run(run())


@pytest.mark.parametrize("away", ["moved", "in the way"])
def test_a_recording_that_somebody_takes_away_is_begun_anew(
    tmp_path: Path, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace"
    recorder = Recorder(path, 2**14, 4096)

    async def run() -> None:
        running = asyncio.create_task(recorder.run())
        for number in range(100):
            recorder.add([[b"%03d-%04d\0\0\0\0" % (number, depth) for depth in range(50)]])
            if number == 50:
                await recorder._write()
                if away == "moved":
                    path.rename(tmp_path / "kept")
                else:
                    (tmp_path / "trace.old").unlink(missing_ok=True)
                    (tmp_path / "trace.old" / "folder").mkdir(parents=True)
        recorder.stop()
        await running

    asyncio.run(run())
    assert not list(tmp_path.glob(".*")), "nothing half-made is left"
    if away == "moved":
        assert "record_trace stopped" not in caplog.text
        assert list(RecordingStream(path))
        assert list(RecordingStream(tmp_path / "kept"))
    else:
        assert "record_trace stopped" in caplog.text


def test_what_was_recorded_comes_back_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [FULL, SLIDING], [FULL[:2]])
    recording = RecordingStream(path)
    assert recording.chunk_bytes == 4096
    first, second = recording
    assert [list(chain) for chain in first.chains] == [
        [xxhash.xxh3_64_intdigest(key) for key in chain] for chain in (FULL, SLIDING)
    ]
    assert [list(chain) for chain in second.chains] == [list(first.chains[0][:2])]
    assert first.time <= second.time
    assert FULL[0] not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_simulator_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [FULL, SLIDING], [FULL[:2]])
    trace = read_trace(path)
    assert [list(chunks) for chunks in trace.requests] == [[0, 1, 2], [3], [0, 1]]
    assert trace.chunk_bytes == 4096
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed).requests == trace.requests
    # What is recorded is not packed, whatever it is called.
    path.rename(tmp_path / "trace.xz")
    assert read_trace(tmp_path / "trace.xz").requests == trace.requests


def test_it_never_grows_beyond_its_limit(tmp_path: Path) -> None:
    path, most = tmp_path / "trace", 64 * 1024
    requests = [[[b"%d" % (number * 10 + depth) for depth in range(10)]] for number in range(3000)]
    record(path, *requests, limit=most)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert most / 3 < sum(sizes) <= most
    kept = list(RecordingStream(path))
    assert list(kept[-1].chains[0]) == [xxhash.xxh3_64_intdigest(key) for key in requests[-1][0]]
    assert 200 < len(kept) < 3000


def test_an_earlier_recording_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [FULL])
    record(path, [SLIDING])
    assert [len(request.chains[0]) for request in list(RecordingStream(path))] == [3, 1]


def test_starts_without_requests_leave_the_older_recording_alone(tmp_path: Path) -> None:
    """As those that fail for another reason, again and again."""
    path = tmp_path / "trace"
    record(path, [FULL])
    for _ in range(3):
        Recorder(path, MIB, 4096).abandon()
    assert [len(request.chains[0]) for request in list(RecordingStream(path))] == [3]


def test_who_comes_while_another_begins_takes_the_next_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had opened the earlier recording, which is the older one by now, and is kept."""
    path = tmp_path / "trace.kvt"
    record(path, [FULL])
    first: list[Recorder] = []
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if not first:
            monkeypatch.setattr(fcntl, "flock", lock)
            first.append(Recorder(path, MIB, 4096))
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Recorder(path, MIB, 4096)
    for recorder, request in ((first[0], SLIDING), (second, FULL[:1])):
        recorder.add([request])
        end(recorder)
    assert (first[0].path, second.path) == (path, tmp_path / "trace-1.kvt")
    assert [len(each.chains[0]) for each in list(RecordingStream(path))] == [3, 1]


def test_two_processes_write_to_two_files(tmp_path: Path) -> None:
    first = Recorder(tmp_path / "trace.kvt", MIB, 1)
    second = Recorder(tmp_path / "trace.kvt", MIB, 1)
    assert second.path == tmp_path / "trace-1.kvt"
    for recorder in (first, second):
        recorder.add([FULL])
        end(recorder)
        assert len(list(RecordingStream(recorder.path))) == 1


def test_what_cannot_be_written_in_time_is_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "trace", MIB, 1)
    recorder.add([[b"key"] * (MOST_QUEUED + 1)])
    assert not caplog.text
    for _ in range(3):
        recorder.add([[b"key"] * (MOST_QUEUED // 2 + 1)])
    assert recorder.dropped == 3
    assert caplog.text.count("does not take requests as fast as they come") == 1
    end(recorder)


def test_where_the_disk_is_full_all_that_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "trace", MIB, 1)

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    fd = os.open(tmp_path / "trace", os.O_RDWR)
    monkeypatch.setattr(recorder, "_file", Full(fd, "r+"))
    for _ in range(10):
        recorder.add([FULL])
    end(recorder)
    assert recorder.dropped == 10
    assert "10 requests were not recorded" in caplog.text
    for _ in range(10):
        recorder.add([[]])
    assert not recorder._queue, "nobody empties it any more"
    assert recorder.dropped == 20


def test_what_lies_in_the_way_of_a_new_file_is_not_written_to(tmp_path: Path) -> None:
    planted = tmp_path / ".trace.new"
    planted.touch()
    planted.chmod(0o666)
    path = tmp_path / "trace"
    record(path, *[[FULL]] * 400, limit=2**14)
    assert (tmp_path / "trace.old").exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_header_that_was_cut_off_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(MAGIC[:10])
    path.chmod(0o600)
    record(path, [FULL])
    assert len(list(RecordingStream(path))) == 1


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [FULL], [FULL])
    whole = path.read_bytes()
    for cut in (1, 20, 45):
        path.write_bytes(whole[:-cut])
        recording = RecordingStream(path)
        assert len(list(recording)) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"x" + data[1:], "is not a recording"),
        (lambda data: data[:-30] + b"?" + data[-29:], "damaged at byte"),
        (lambda data: MAGIC + b"{}\n", "header is damaged"),
        (lambda data: MAGIC + b'{"chunk_bytes": "a"}\n', "header is damaged"),
        (lambda data: MAGIC, "header is damaged"),
    ],
)
def test_damage_is_refused_by_place(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "trace"
    record(path, [FULL], [FULL])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=message) as refusal:
        list(RecordingStream(path))
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("own", [True, False])
def test_nothing_is_recorded_into_a_file_that_others_own_or_may_write_to(
    tmp_path: Path, own: bool
) -> None:
    path = tmp_path / "trace"
    path.touch(0o600)
    if own:
        path.chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("giving files to another user needs root")
    said = "may be written by every user" if own else "belongs to user nobody"
    with pytest.raises(ConfigError, match=rf"record_trace = .*trace.*{said}"):
        Recorder(path, MIB, 1)
    assert path.stat().st_size == 0


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"record_trace = .*notes\.txt.*not a recording"):
        Recorder(path, MIB, 1)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="record_trace = "):
        Recorder(path / "below", MIB, 1)


def test_a_store_records_what_it_was_asked(tmp_path: Path) -> None:
    keys = [b"block %d" % depth + b"\0\0\0\0" for depth in range(4)]

    async def use() -> None:
        config = {
            "cpu_bytes_to_use": 8 * 4096,
            "chunk_bytes": 4096,
            "record_trace": str(tmp_path / "trace"),
        }
        async with kvstore.open(config) as store:
            await store.put(keys, [bytes(4096)] * 4)
            async with store.get(keys[:3]) as chunks:
                assert len(chunks) == 3

    asyncio.run(use())
    trace = read_trace(tmp_path / "trace")
    assert [list(chunks) for chunks in trace.requests] == [[0, 1, 2, 3], [0, 1, 2]]


def test_a_file_that_never_takes_what_is_written_keeps_no_process_from_ending(
    tmp_path: Path,
) -> None:
    code = """
import asyncio, sys, threading
from pathlib import Path
from kvstore.observe.recorder import Recorder

class Stuck:
    def write(self, data):
        threading.Event().wait()
    def close(self):
        pass

async def main():
    recorder = Recorder(Path(sys.argv[1]), 2**20, 1)
    recorder.add([[b"key"]])
    import kvstore.observe.recorder as module
    module.wrap = lambda file, executor: Handle(executor)
    recorder.stop()
    await asyncio.wait({asyncio.create_task(recorder.run())}, timeout=0.5)
    print("left", flush=True)

class Handle:
    def __init__(self, executor):
        self.executor = executor
    async def write(self, data):
        return await asyncio.get_running_loop().run_in_executor(self.executor, Stuck().write, data)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "left\n"
