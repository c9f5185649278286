"""The configuration refuses what it cannot use, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.sizes import format_size, parse_size

DISK = {"type": "disk", "path": "/somewhere", "capacity_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        ("10mb", 10_000_000),
        ("4096", 4096),
        (" 2 KiB ", 2048),
        (7, 7),
        (8.0, 8),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_people_write_them(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "bad", ["", "GiB", "1 apple", "-1", -1, 1.5, True, None, [], "1e9", "1,5GB"]
)
def test_other_sizes_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"size|allowed"):
        parse_size(bad)


def test_sizes_are_shown_as_people_read_them() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]


def test_a_whole_configuration_is_read() -> None:
    config = Config.from_mapping(
        {
            "cpu_bytes_to_use": "1GiB",
            "chunk_bytes": "2MiB",
            "identity": {"model": "m"},
            "deadline_s": 1,
            "tiers": [{**DISK, "segment_bytes": "64MiB", "io": "buffered", "lane": 3}],
        }
    )
    assert (config.cpu_bytes_to_use, config.chunk_bytes) == (2**30, 2 * 2**20)
    assert config.deadline_s == 1.0
    (disk,) = config.tiers
    assert (disk.path, disk.capacity_bytes, disk.lane) == (Path("/somewhere"), 2**30, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpu_byte": 1}, "unknown key cpu_byte = 1; allowed are: cpu_bytes_to_use,"),
        ({}, "missing key cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use = 'much': allowed are.*\"64GiB\""),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use = 0: must be at least 1"),
        ({"eviction_policy": "best"}, "eviction_policy = 'best': unknown policy; known are:.*lru"),
        ({"store_threshold": 2}, "store_threshold = 2: must be 0 or 1"),
        ({"deadline_s": 0}, "deadline_s = 0: must be a number of seconds above 0"),
        ({"deadline_s": float("nan")}, "deadline_s = nan"),
        ({"keep_events": "yes"}, "keep_events = 'yes': must be true or false"),
        ({"identity": "m"}, "identity = 'm': must be a table"),
        ({"tiers": DISK}, "tiers = .*must be a list"),
        ({"tiers": [{"type": "tape"}]}, r"tiers\[0\].type = 'tape': must be one of: disk"),
        ({"tiers": [{**DISK, "pth": 1}]}, r"unknown key tiers\[0\].pth = 1; allowed are: path"),
        ({"tiers": [{"type": "disk", "path": "/x"}]}, r"missing key tiers\[0\].capacity_bytes"),
        ({"tiers": [DISK, {**DISK, "io": "magic"}]}, r"tiers\[1\].io = 'magic': must be one of"),
        ({"tiers": [{**DISK, "io_threads": 0}]}, r"tiers\[0\].io_threads = 0: .*from 1 to 64"),
        ({"tiers": [{**DISK, "lane": 64}]}, r"tiers\[0\].lane = 64: .*from 0 to 63"),
        ({"tiers": [{**DISK, "capacity_bytes": -5}]}, r"tiers\[0\].capacity_bytes = -5"),
        ({"tiers": [{**DISK, "path": ""}]}, r"tiers\[0\].path = ''"),
    ],
)
def test_a_bad_value_is_refused_with_its_key_its_value_and_what_is_allowed(
    values: dict[str, Any], message: str
) -> None:
    whole = values if not values or "cpu_byte" in values else {"cpu_bytes_to_use": 1, **values}
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping(whole)


def test_toml_is_read_and_bad_toml_is_refused_by_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        'cpu_bytes_to_use = "1GiB"\n[[tiers]]\ntype = "disk"\n'
        'path = "/somewhere"\ncapacity_bytes = "2GiB"\n'
    )
    assert Config.from_toml(file).tiers[0].capacity_bytes == 2 * 2**30
    file.write_text("cpu_bytes_to_use = ")
    with pytest.raises(ConfigError, match=r"kvstore\.toml: not TOML"):
        Config.from_toml(file)
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read"):
        Config.from_toml(tmp_path / "nothing.toml")
