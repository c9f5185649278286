"""Whatever is given as a configuration is used or refused with a `ConfigError`: nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import Config, DiskConfig, KVStoreError
from kvstore.errors import ConfigError
from kvstore.sizes import parse_size

INNER_KEYS = st.sampled_from(["type", "path", "capacity_bytes", "io", "lane"])

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=8)
    | st.builds(object)
    | st.sampled_from(["64GiB", "1.5 TB", "lru", "disk", "/cache", "auto", 10**400, -(10**400)]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | INNER_KEYS, inner)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from([field.name for field in attrs.fields(Config)])
DISK_KEYS = st.sampled_from([field.name for field in attrs.fields(DiskConfig)])


def said(values: dict[str, Any]) -> Config | str:
    """The configuration, or the reason why it is none."""
    try:
        return Config.from_mapping(values)
    except ConfigError as refusal:
        return str(refusal)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS | st.text(max_size=8), ANYTHING, max_size=4))
def test_any_mapping_is_a_configuration_or_is_refused(values: dict[str, Any]) -> None:
    config = said({"cpu_bytes_to_use": "1GiB", **values})
    if isinstance(config, str):
        assert config, "a refusal gives its reason"
    else:
        assert config == Config.from_mapping(
            attrs.asdict(config, recurse=False) | {"tiers": config.tiers}
        )


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(DISK_KEYS | st.text(max_size=8), ANYTHING, max_size=4))
def test_any_table_is_a_disk_tier_or_is_refused(values: dict[str, Any]) -> None:
    tier = {"type": "disk", "path": "/cache", "capacity_bytes": 1, **values}
    config = said({"cpu_bytes_to_use": "1GiB", "tiers": [tier]})
    if isinstance(config, str):
        assert "tiers[0]." in config
    else:
        (disk,) = config.tiers
        assert isinstance(disk, DiskConfig)
        assert disk.capacity_bytes >= 1


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"\d{0,4}\.?\d{0,4} ?[a-zA-Z]{0,3}"))
def test_any_text_is_a_size_or_is_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError as refusal:
        said = str(refusal)
    else:
        said = "allowed are" if size >= 0 else "a negative size"
    assert "allowed are" in said


@pytest.mark.parametrize(
    "values",
    [
        {"namespace": "../outside"},
        {"namespace": ".hidden"},
        {"namespace": "a/b"},
        {"namespace": "n" * 300},
        {"tiers": [{"type": "disk", "path": "/dev/null", "capacity_bytes": "1MiB"}]},
        {"tiers": [{"type": "disk", "path": "/proc/kvstore", "capacity_bytes": "1MiB"}]},
        {"tiers": [{"type": "disk", "path": "/" + "n" * 300, "capacity_bytes": "1MiB"}]},
        {"cpu_bytes_to_use": "1000TiB"},
        {"chunk_bytes": "1TiB"},
    ],
    ids=repr,
)
async def test_what_only_shows_at_opening_is_refused_there(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    config = {
        "cpu_bytes_to_use": "1MiB",
        "chunk_bytes": 4096,
        "identity": {"model": "m"},
        "tiers": [{"type": "disk", "path": tmp_path / "cache", "capacity_bytes": "1MiB",
                   "segment_bytes": "64KiB"}],
        **values,
    }  # fmt: skip
    with pytest.raises(KVStoreError) as refusal:
        async with kvstore.open(config):
            pass
    assert str(refusal.value)
    assert not (tmp_path / "outside").exists()


PLAIN = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": 4096, "identity": {}}


async def test_a_segment_larger_than_the_tier_is_refused_with_both_keys(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": tmp_path, "capacity_bytes": "1MiB", "segment_bytes": "2MiB"}
    with pytest.raises(ConfigError, match=r"capacity_bytes = 1048576: .*segment_bytes"):
        async with kvstore.open({**PLAIN, "tiers": [tier]}):
            pass


async def test_a_tier_smaller_than_one_chunk_in_a_segment_is_refused(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": tmp_path, "capacity_bytes": 8192}
    with pytest.raises(ConfigError, match=r"capacity_bytes = 8192: smaller than one segment of"):
        async with kvstore.open({**PLAIN, "tiers": [tier]}):
            pass


@pytest.mark.parametrize(
    ("capacity", "chunk", "paths", "segments", "size"),
    [
        ("4GiB", 4096, 1, 16, 2**28),
        ("64MiB", 4096, 1, 8, 2**23),
        ("64MiB", 4096, 2, 16, 2**22),
        ("5MiB", 2**20, 1, 4, 2**20 + 8192),
    ],
)
async def test_a_small_disk_is_cut_into_eight_segments_by_itself(
    tmp_path: Path, capacity: str, chunk: int, paths: int, segments: int, size: int
) -> None:
    folders = [tmp_path / f"disk-{number}" for number in range(paths)]
    tier = {"type": "disk", "path": folders, "capacity_bytes": capacity}
    config = {**PLAIN, "cpu_bytes_to_use": "8MiB", "chunk_bytes": chunk, "tiers": [tier]}
    async with kvstore.open(config) as store:
        room = store.stats().tiers[0].room
        assert await store.put([b"key"], [b"x" * chunk]) == 1
    files = [file for folder in folders for file in folder.rglob("*.safetensors")]
    assert all(0.9 * size < file.stat().st_size <= size for file in files)
    assert files
    assert room >= 0.97 * segments * ((size - 4096) // (chunk + 128))


async def test_a_segment_smaller_than_a_chunk_is_refused(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": tmp_path, "capacity_bytes": "1MiB", "segment_bytes": 100}
    with pytest.raises(ConfigError, match=r"segment_bytes = 100: .*at least one chunk"):
        async with kvstore.open({**PLAIN, "tiers": [tier]}):
            pass
