"""What drives say of their wear. The programs that ask them are replaced by ones that answer."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.tools import drives
from kvstore.tools.cli import main
from kvstore.tools.doctor import _of_drive
from kvstore.tools.drives import Wear, drives_under, read_wear
from tests.tools.support import error_of, run

LOG = {"data_units_written": 2_000_000, "power_on_hours": 8760}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole search path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def answers(folder: Path, program: str, answer: object, status: int = 0) -> None:
    """Install a program that prints an answer, whatever it is asked."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    path = folder / program
    path.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\nexit {status}\n")
    path.chmod(0o755)


def of_smartctl(used: Any) -> dict[str, Any]:
    return {"nvme_smart_health_information_log": LOG | {"percentage_used": used}}


def on_disk(path: Path, **more: Any) -> dict[str, Any]:
    tier = {"type": "disk", "path": str(path), "capacity_bytes": "8MiB", **more}
    return {"host": "16MiB", "chunk_bytes": "64KiB", "identity": {}, "tiers": [tier]}


def test_a_real_folder_lies_on_drives_that_there_are(tmp_path: Path) -> None:
    assert all(Path("/sys/block", Path(drive).name).exists() for drive in drives_under(tmp_path))


def test_what_has_no_drive_of_its_own_has_none() -> None:
    assert drives_under(Path("/proc")) == []


@pytest.mark.parametrize("command", ["top", "doctor"])
def test_a_folder_that_is_not_there_is_named(command: str, tmp_path: Path) -> None:
    told = error_of(command, tmp_path / "none")
    assert str(tmp_path / "none") in told
    assert len(told.splitlines()) == 1


def test_partitions_and_volumes_are_followed_to_their_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "block"
    for drive, part in (("nvme0n1", "nvme0n1p2"), ("nvme1n1", "nvme1n1p1")):
        (block / drive / part).mkdir(parents=True)
        (block / drive / part / "partition").write_text("1")
    below = block / "dm-0" / "slaves"
    below.mkdir(parents=True)
    (below / "nvme0n1p2").symlink_to(block / "nvme0n1" / "nvme0n1p2")
    (below / "nvme1n1p1").symlink_to(block / "nvme1n1" / "nvme1n1p1")
    number = os.stat(tmp_path).st_dev
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / f"{os.major(number)}:{os.minor(number)}").symlink_to(block / "dm-0")
    monkeypatch.setattr(drives, "BLOCK_DEVICES", devices)
    assert drives_under(tmp_path) == ["/dev/nvme0n1", "/dev/nvme1n1"]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("smartctl", of_smartctl(20)),
        ("nvme", LOG | {"percent_used": 20}),
        ("nvme", LOG | {"percentage_used": 20}),
        ("nvme", {"data_units_written": 2e6, "power_on_hours": 8760.0, "percent_used": 20.0}),
    ],
)
def test_either_program_tells_how_long_a_drive_lasts(
    programs: Path, program: str, answer: object
) -> None:
    # The status of smartctl is not 0 where the drive has had errors.
    answers(programs, program, answer, status=4)
    wear = read_wear("/dev/nvme0n1")
    assert wear == Wear("/dev/nvme0n1", 0.2, 1_024_000_000_000, 8760)
    assert wear.hours_left == pytest.approx(4 * 8760)
    assert _of_drive(wear) == (
        "/dev/nvme0n1: 20 % of its endurance used in 365 days, 953.7 GiB written; "
        "at that pace it lasts 4.0 years more."
    )


def test_the_second_program_is_asked_where_the_first_does_not_know(programs: Path) -> None:
    answers(programs, "smartctl", {"smartctl": {"exit_status": 2}}, status=2)
    answers(programs, "nvme", LOG | {"percent_used": 3})
    assert isinstance(read_wear("/dev/nvme0n1"), Wear)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "not JSON",
        "[]",
        "[" * 100_000,
        "{}",
        {"nvme_smart_health_information_log": None},
        {"nvme_smart_health_information_log": [1]},
        *map(of_smartctl, (None, "20 %", -1, 256, 10**400, 0.5, True)),
    ],
)
def test_what_cannot_be_told_is_said_in_words(programs: Path, answer: object) -> None:
    answers(programs, "smartctl", answer)
    told = read_wear("/dev/sda")
    assert isinstance(told, str)
    assert "smartctl" in told


def test_without_either_program_both_are_named(programs: Path) -> None:
    assert read_wear("/dev/sda") == "neither smartctl nor nvme is installed"


def test_a_drive_that_will_not_last_is_to_be_written_less(tmp_path: Path) -> None:
    told = _of_drive(Wear("/dev/nvme0n1", 0.5, 3 * 365 * 2**30, 8760))
    assert "lasts 1.0 years more" in told
    # 1,095 GiB have used half of it, so it takes as many again, and three years have 1,095 days.
    assert "1.0 GiB a day" in told
    (filter_,) = re.findall(r'"admission": ({[^}]*})', told)
    with kvstore.open_sync(on_disk(tmp_path, admission=json.loads(filter_))) as store:
        assert store.stats().tiers[0].chunks == 0
    assert "replace it" in _of_drive(Wear("/dev/nvme0n1", 1.2, 10**15, 8760))
    assert "too little" in _of_drive(Wear("/dev/nvme0n1", 0.01, 10**12, 30))
    assert "too little" in _of_drive(Wear("/dev/nvme0n1", 0.0, 10**12, 24))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache on a drive that tells its wear."""
    folder = tmp_path / "cache"
    with kvstore.open_sync(on_disk(folder)) as store:
        store.put([b"key"], [bytes(65536)])
    number = os.stat(folder).st_dev
    (tmp_path / "block" / "nvme9n1").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev" / f"{os.major(number)}:{os.minor(number)}"
    device.symlink_to(tmp_path / "block" / "nvme9n1")
    monkeypatch.setattr(drives, "BLOCK_DEVICES", tmp_path / "dev")
    return folder


def test_top_and_doctor_tell_how_long_the_drive_of_a_cache_lasts(
    cache: Path, programs: Path
) -> None:
    answers(programs, "smartctl", of_smartctl(20))
    line = "/dev/nvme9n1: 20 % of its endurance used"
    assert line in run("doctor", cache)
    assert line in run("top", cache, "--interval", "0.1")
    answers(programs, "smartctl", "not JSON")
    assert "endurance" not in run("top", cache, "--interval", "0.1")


def test_metrics_replace_nothing_that_is_no_file(
    cache: Path, programs: Path, tmp_path: Path
) -> None:
    """As `/dev/stdout`, by one who may."""
    answers(programs, "smartctl", of_smartctl(20))
    os.mkfifo(tmp_path / "pipe")
    error = error_of("doctor", cache, "--metrics", tmp_path / "pipe")
    assert "pipe is no regular file" in error
    assert (tmp_path / "pipe").is_fifo()


def test_doctor_writes_metrics_of_the_drives_for_prometheus(
    cache: Path, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "kvstore.prom"

    def told(status: int = 0) -> dict[str, float]:
        assert main(["doctor", str(cache), "--metrics", str(file)]) == status
        families = parser.text_string_to_metric_families(file.read_text())
        samples = [sample for family in families for sample in family.samples]
        assert all(sample.labels == {"drive": "/dev/nvme9n1"} for sample in samples)
        return {sample.name: sample.value for sample in samples}

    answers(programs, "smartctl", of_smartctl(20))
    written = LOG["data_units_written"] * drives.UNIT
    of_life = {"kvstore_drive_used_ratio": 0.2, "kvstore_drive_written_bytes": written}
    assert told() == of_life | {"kvstore_drive_left_seconds": 4 * 8760 * 3600}
    answers(programs, "smartctl", of_smartctl(1))
    assert told() == of_life | {"kvstore_drive_used_ratio": 0.01}
    # A drive that does not answer any more is not told as it was before.
    answers(programs, "smartctl", "not JSON")
    capsys.readouterr()
    assert told(1) == {}
    assert "tells of no drive: /dev/nvme9n1 does not tell smartctl" in capsys.readouterr().err
    capsys.readouterr()
    assert str(tmp_path / "none" / "file") in error_of(
        "doctor", cache, "--metrics", tmp_path / "none" / "file"
    )
    assert "--metrics" in error_of("doctor", "http://127.0.0.1:1/metrics", "--metrics", file)
