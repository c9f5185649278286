"""The configuration: what may be said, and what is refused with a reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvstore import Config, DiskConfig, TierConfig
from kvstore.config.describe import json_schema, keys_of, sample
from kvstore.config.values import SCHEMAS
from kvstore.core import Flow
from kvstore.errors import ConfigError
from kvstore.plugins import Choice
from kvstore.policies import filter_names, policy_names
from kvstore.sizes import format_size, parse_size

GIB = 2**30

DISK = {"type": "disk", "path": "/cache", "capacity_bytes": "1TiB"}
STORE = {"type": "object", "url": "file:///cache"}


def config(**values: Any) -> Config:
    return Config.from_mapping({"cpu_bytes_to_use": "1GiB", **values})


def disk(**values: Any) -> DiskConfig:
    (tier,) = config(tiers=[{**DISK, **values}]).tiers
    assert isinstance(tier, DiskConfig)
    return tier


# -- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12345, 12345),
        (2.0, 2),
        ("0", 0),
        ("4096", 4096),
        ("512 B", 512),
        ("64GiB", 64 * GIB),
        ("64 gib", 64 * GIB),
        (" 1.5 TB ", 1_500_000_000_000),
        ("1.5KiB", 1536),
        ("3mb", 3_000_000),
        ("64Gi", 64 * GIB),
        ("64G", 64 * 10**9),
        ("2 k", 2000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_a_number_or_text_with_a_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "64 GiBs", "-1", "1e9", "1,5GiB", "1 000", "0x10", "½GiB", "1.", ".5GiB", "∞",
     1.5, float("nan"), float("inf"), True, None, [1], b"1", "9" * 400 + ".5", -1],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(ValueError, match=r"allowed are bytes or text such as|cannot be negative"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * GIB, "1.5 GiB"),
     (5000 * GIB, "4.9 TiB"), (10**16, "9094.9 TiB")],
)  # fmt: skip
def test_a_size_is_written_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


# -- what may be said ------------------------------------------------------------------------


def test_host_memory_is_all_that_must_be_said() -> None:
    plain = config()
    assert plain.cpu_bytes_to_use == GIB
    assert plain.tiers == ()
    assert str(plain.host_policy).startswith("hit-density")
    assert plain.chunk_bytes is None


def test_everything_may_be_said() -> None:
    whole = config(
        eviction_policy="lru",
        store_threshold=1,
        tiers=[{**DISK, "eviction_policy": "lru", "segment_bytes": "64MiB", "io": "direct",
                "io_threads": 2, "lane": 3, "share": False}],
        chunk_bytes="2MiB",
        identity={"model": "m", "layers": 32},
        namespace="mine",
        deadline_s=1,
        max_wait_s=2.5,
        lease_s=3,
        write_queue_bytes="64MiB",
        shutdown_timeout_s=4,
        keep_events=True,
    )  # fmt: skip
    (tier,) = whole.tiers
    assert tier == DiskConfig(Path("/cache"), 2**40, "lru", 64 * 2**20, "direct", 2, 3, share=False)
    assert (whole.chunk_bytes, whole.namespace) == (2 * 2**20, "mine")
    assert (whole.deadline_s, whole.max_wait_s, whole.lease_s) == (1.0, 2.5, 3.0)
    assert (whole.write_queue_bytes, whole.shutdown_timeout_s) == (64 * 2**20, 4.0)
    assert whole.keep_events
    assert whole.identity == {"model": "m", "layers": 32}


def test_a_path_may_begin_at_home_and_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert disk(path="~/cache").path == Path("/home/somebody/cache")
    assert disk(path="relative").path == Path.cwd() / "relative"
    assert disk(path=Path("/other")).path == Path("/other")


def test_several_tiers_keep_their_order() -> None:
    tiers = config(tiers=[{**DISK, "path": f"/{name}"} for name in "abc"]).tiers
    assert [str(tier.path) for tier in tiers if isinstance(tier, DiskConfig)] == ["/a", "/b", "/c"]


def test_keys_of_somebody_else_are_left_alone() -> None:
    values = {"cpu_bytes_to_use": 1, "spec_name": "Other"}
    assert Config.from_mapping(values, ignore=("spec_name",)).cpu_bytes_to_use == 1
    assert values == {"cpu_bytes_to_use": 1, "spec_name": "Other"}


def test_it_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        config().cpu_bytes_to_use = 1  # type: ignore[misc]


def test_from_python_it_is_checked_in_the_same_way() -> None:
    direct = Config(
        cpu_bytes_to_use="1GiB",
        tiers=[DiskConfig("/cache", "1TiB")],
    )
    assert direct == config(tiers=[DISK])
    with pytest.raises(ConfigError, match="cpu_bytes_to_use = 'much'"):
        Config(cpu_bytes_to_use="much")
    with pytest.raises(ConfigError, match="io_threads = 0"):
        DiskConfig(Path("/cache"), 1, io_threads=0)
    with pytest.raises(ConfigError, match="lease_s = -1"):
        Config(cpu_bytes_to_use=1, lease_s=-1)


def test_a_policy_may_have_parameters() -> None:
    told = config(eviction_policy={"name": "lru"}).eviction_policy
    assert told == "lru"
    narrow = config(eviction_policy={"name": "s3-fifo", "small": 0.2}).eviction_policy
    assert narrow == Choice("s3-fifo", (("small", 0.2),))
    assert str(narrow) == "s3-fifo(small=0.2)"


def test_a_choice_of_what_cannot_be_a_value_is_a_text() -> None:
    assert Choice.parse("lru(a={[]:1})") == Choice("lru", (("a", "{[]:1}"),))


@pytest.mark.parametrize("parts", [(0.1, 0.2, 0.3, 0.3), (0.2, 0.2, 0.2, 0.3), (0.01, 0.33, 0.56)])
def test_nine_tenths_may_be_guaranteed_however_they_are_divided(parts: Sequence[float]) -> None:
    tenants = config(
        tenants={f"t{n}": {"guaranteed": part} for n, part in enumerate(parts)}
    ).tenants
    assert tenants is not None
    assert tenants.guaranteed == pytest.approx(0.9)


def test_filters_may_be_one_or_several() -> None:
    reuse = Choice("reuse", (("threshold", 3),))
    assert config(admission="reuse").admission == (Choice("reuse"),)
    assert config(admission={"name": "reuse", "threshold": 3}).admission == (reuse,)
    both = disk(admission=["doorkeeper", {"name": "reuse", "threshold": 3}]).admission
    assert both == (Choice("doorkeeper"), reuse)


def test_bytes_among_parameters_may_be_sizes() -> None:
    (budget,) = disk(admission={"name": "endurance", "bytes_per_day": "2TiB"}).admission
    assert budget == Choice("endurance", (("bytes_per_day", 2 * 2**40),))


def test_a_store_threshold_is_a_filter() -> None:
    assert config(store_threshold=0).host_filters == ()
    assert config(store_threshold=1).host_filters == ()
    both = config(store_threshold=3, admission="doorkeeper").host_filters
    assert both == (Choice("reuse", (("threshold", 3),)), Choice("doorkeeper"))


def test_a_tier_has_a_flow() -> None:
    assert disk().flow is Flow.WRITE_THROUGH
    assert disk(flow="demote").flow is Flow.DEMOTE
    assert disk(flow=Flow.EXCLUSIVE).flow is Flow.EXCLUSIVE


# -- what is refused -------------------------------------------------------------------------

KNOWN_POLICIES = f"known are: {', '.join(policy_names())}"
KNOWN_FILTERS = f"known are: {', '.join(filter_names())}"

REFUSED: list[tuple[dict[Any, Any], str, str]] = [
    (
        {"cpu_bytes": 1},
        "unknown key cpu_bytes = 1",
        "mean cpu_bytes_to_use? allowed are: cpu_bytes",
    ),
    ({7: 1}, "unknown key 7 = 1", "allowed are: cpu_bytes_to_use"),
    ({"dedline_s": 1}, "unknown key dedline_s = 1", "did you mean deadline_s?"),
    ({"Spans": True}, "unknown key Spans = True", "did you mean spans?"),
    ({"disk_byte": 1}, "unknown key disk_byte = 1", "did you mean disk_bytes?"),
    ({"disk": "/x", "disk_byte": 1}, "unknown key disk_byte = 1", "did you mean disk_bytes?"),
    (
        {"flow": "demote"},
        "unknown key flow; it is a key of a tier",
        '"capacity_bytes": ..., "flow"',
    ),
    ({"cpu_bytes_to_use": "64 Gigs"}, "cpu_bytes_to_use = '64 Gigs'", '"64GiB"'),
    ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use = 0", "at least 1 byte"),
    ({"cpu_bytes_to_use": -5}, "cpu_bytes_to_use = -5", "negative"),
    ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use = True", '"64GiB"'),
    ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use = None", '"64GiB"'),
    ({"cpu_bytes_to_use": 2**70}, f"cpu_bytes_to_use = {2**70}", "at most"),
    ({"eviction_policy": "mru"}, "eviction_policy = 'mru'", KNOWN_POLICIES),
    ({"eviction_policy": 3}, "eviction_policy = 3", KNOWN_POLICIES),
    ({"eviction_policy": ["lru"]}, "eviction_policy = ['lru']", KNOWN_POLICIES),
    ({"eviction_policy": {}}, "eviction_policy = {}", "needs a name; known are: "),
    ({"eviction_policy": {"name": "lru", "size": 3}}, "eviction_policy = {'name': 'lru'", "'size'"),
    ({"admission": "magic"}, "admission = 'magic'", KNOWN_FILTERS),
    ({"admission": 3}, "admission = 3", KNOWN_FILTERS),
    ({"admission": ["reuse", "magic"]}, "admission = ['reuse', 'magic']", KNOWN_FILTERS),
    ({"admission": {"name": "reuse", "threshold": "2"}}, "admission = {", "threshold"),
    ({"admission": {"name": "reuse", "treshold": 2}}, "admission = {", "threshold"),
    ({"store_threshold": -1}, "store_threshold = -1", "a whole number from 0 to 1000"),
    ({"store_threshold": True}, "store_threshold = True", "a whole number from 0 to 1000"),
    ({"demote_ahead": 0.6}, "demote_ahead = 0.6", "from 0 to 0.5"),
    ({"demote_ahead": "5%"}, "demote_ahead = '5%'", "from 0 to 0.5"),
    ({"demote_ahead": float("nan")}, "demote_ahead = nan", "from 0 to 0.5"),
    ({"record_trace": ""}, "record_trace = ''", "path of a file"),
    ({"record_trace_bytes": "1KiB"}, "record_trace_bytes = '1KiB'", "at least 1048576 bytes"),
    ({"chunk_bytes": 0}, "chunk_bytes = 0", "at least 1 byte"),
    ({"chunk_bytes": "big"}, "chunk_bytes = 'big'", '"64GiB"'),
    ({"identity": "llama"}, "identity = 'llama'", "must be a table"),
    ({"identity": {1: 2}}, "identity = {1: 2}", "must be a table"),
    ({"identity": {"when": {1, 2}}}, "identity = {'when': {1, 2}}", "text, numbers"),
    ({"identity": {"x": float("nan")}}, "identity = {'x': nan}", "text, numbers"),
    ({"namespace": ""}, "namespace = ''", "name of a folder"),
    ({"namespace": 5}, "namespace = 5", "name of a folder"),
    ({"deadline_s": 0}, "deadline_s = 0", "above 0"),
    ({"deadline_s": "2s"}, "deadline_s = '2s'", "number of seconds"),
    ({"max_wait_s": float("nan")}, "max_wait_s = nan", "above 0"),
    ({"max_wait_s": 1e30}, "max_wait_s = 1e+30", "at most 1000000000"),
    ({"max_wait_s": 10**400}, "max_wait_s = 1000", "number of seconds"),
    ({"lease_s": float("inf")}, "lease_s = inf", "above 0"),
    ({"shutdown_timeout_s": False}, "shutdown_timeout_s = False", "number of seconds"),
    ({"write_queue_bytes": 0}, "write_queue_bytes = 0", "at least 1 byte"),
    ({"keep_events": 1}, "keep_events = 1", "true or false"),
    ({"tiers": DISK}, "tiers = {'type': 'disk'", "must be a list"),
    ({"tiers": "disk"}, "tiers = 'disk'", "must be a list"),
    ({"tiers": [DISK, "disk"]}, "tiers[1] = 'disk'", "must be a table of keys"),
    ({"tiers": [DISK, DISK]}, "tiers[1].path = '/cache'", "a folder of its own"),
    (
        {"tiers": [DISK, {**DISK, "path": "/x/../cache"}]},
        "tiers[1].path = '/x/../cache'",
        "a folder of its own",
    ),
    ({"tiers": [{"path": "/cache"}]}, "missing key tiers[0].type", "must be one of disk"),
    *(
        ({"tiers": [{**STORE, **more}]}, "tiers[0].type = 'object'", "are not for a store")
        for more in ({"flow": "exclusive"}, {"eviction_policy": "arc"})
    ),
    ({"tiers": [{**DISK, "type": "tape"}]}, "tiers[0].type = 'tape'", "must be one of: disk"),
]

REFUSED_DISK: list[tuple[dict[str, Any], str, str]] = [
    ({"capacity": 1}, "unknown key tiers[0].capacity = 1", "did you mean capacity_bytes?"),
    ({"zone": 1}, "unknown key tiers[0].zone = 1", "; allowed are: path, capacity_bytes"),
    ({"capacity_bytes": "lots"}, "tiers[0].capacity_bytes = 'lots'", '"64GiB"'),
    ({"capacity_bytes": 0}, "tiers[0].capacity_bytes = 0", "at least 1 byte"),
    ({"path": ""}, "tiers[0].path = ''", "path of a folder"),
    ({"path": 5}, "tiers[0].path = 5", "path of a folder"),
    ({"path": "file:///nvme/kv"}, "tiers[0].path = <str that may hold", "no address"),
    ({"path": "$HOME/kv"}, "tiers[0].path = '$HOME/kv'", "no variable"),
    ({"path": "~nobody-here/kv"}, "tiers[0].path = '~nobody-here/kv'", "user that is unknown"),
    ({"path": ["/a", "/b/../a"]}, "tiers[0].path = ['/a', '/b/../a']", "different ones"),
    ({"path": "a\0b"}, "tiers[0].path = 'a\\x00b'", "path of a folder"),
    ({"path": "\ud800"}, "tiers[0].path = '\\ud800'", "path of a folder"),
    ({"eviction_policy": "mru"}, "tiers[0].eviction_policy = 'mru'", KNOWN_POLICIES),
    ({"segment_bytes": "0"}, "tiers[0].segment_bytes = '0'", "at least 1 byte"),
    ({"io": "magic"}, "tiers[0].io = 'magic'", "must be one of: auto"),
    ({"io": None}, "tiers[0].io = None", "must be one of: auto"),
    ({"io_threads": 0}, "tiers[0].io_threads = 0", "from 1 to 64"),
    ({"io_threads": 65}, "tiers[0].io_threads = 65", "from 1 to 64"),
    ({"io_threads": 2.0}, "tiers[0].io_threads = 2.0", "a whole number"),
    ({"lane": -1}, "tiers[0].lane = -1", "from 0 to 63"),
    ({"lane": "0"}, "tiers[0].lane = '0'", "a whole number"),
    ({"share": "yes"}, "tiers[0].share = 'yes'", "true or false"),
    ({"flow": "sideways"}, "tiers[0].flow = 'sideways'", "write-through, demote, exclusive"),
    ({"flow": None}, "tiers[0].flow = None", "write-through, demote, exclusive"),
    ({"admission": "magic"}, "tiers[0].admission = 'magic'", KNOWN_FILTERS),
]


@pytest.mark.parametrize(("values", "named", "allowed"), REFUSED)
def test_a_bad_value_is_refused_with_its_key_and_what_is_allowed(
    values: dict[str, Any], named: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.from_mapping({"cpu_bytes_to_use": "1GiB", **values})
    assert str(refusal.value).startswith(named)
    assert allowed in str(refusal.value)


@pytest.mark.parametrize(("values", "named", "allowed"), REFUSED_DISK)
def test_a_bad_value_of_a_tier_is_refused_with_its_place(
    values: dict[str, Any], named: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        disk(**values)
    assert str(refusal.value).startswith(named)
    assert allowed in str(refusal.value)


@pytest.mark.parametrize(
    "value", [10**5000, "x" * 10_000, [[0] * 1000] * 10], ids=["number", "text", "list"]
)
def test_a_value_that_is_too_long_to_repeat_is_cut_short(value: object) -> None:
    with pytest.raises(ConfigError, match="^keep_events = ") as refusal:
        config(keep_events=value)
    assert len(str(refusal.value)) < 300


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^missing key cpu_bytes_to_use$"):
        Config.from_mapping({})
    with pytest.raises(ConfigError, match=r"^missing key tiers\[0\]\.path, capacity_bytes$"):
        config(tiers=[{"type": "disk"}])
    with pytest.raises(ConfigError, match=r"^missing key tiers\[1\]\.capacity_bytes$"):
        config(tiers=[DISK, {"type": "disk", "path": "/x"}])


@pytest.mark.parametrize("values", [None, 5, "cpu_bytes_to_use", [1], [("cpu_bytes_to_use", 1)]])
def test_what_is_no_table_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="must be a table of keys"):
        Config.from_mapping(values)


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use"):
        Config.from_mapping({"cpu_bytes_to_use": "?"})


# -- TOML ------------------------------------------------------------------------------------


def test_toml_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        """
        cpu_bytes_to_use = "64GiB"
        chunk_bytes = "2MiB"
        deadline_s = 1

        [identity]
        model = "llama"

        [[tiers]]
        type = "disk"
        path = "/cache"
        capacity_bytes = "1TiB"
        """
    )
    assert Config.from_toml(file) == config(
        cpu_bytes_to_use="64GiB",
        chunk_bytes="2MiB",
        deadline_s=1.0,
        identity={"model": "llama"},
        tiers=[DISK],
    )
    assert Config.from_toml(str(file)) == Config.from_toml(file)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cpu_bytes_to_use = ", "not TOML"),
        (b"\xff\xfe\x00", "not TOML"),
        (b"cpu_bytes_to_use = " + b"9" * 5000, "not TOML"),
        (b"cpu_bytes_to_use = " + b"[" * 5000 + b"]" * 5000, "not TOML"),
        (b"cpu_bytes_to_use = 1\nwhat = 2\n", "unknown key what = 2"),
        (b"", "missing key cpu_bytes_to_use"),
    ],
)
def test_bad_toml_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        Config.from_toml(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        Config.from_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_toml(tmp_path)


# -- the environment -------------------------------------------------------------------------


def test_the_environment_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('cpu_bytes_to_use = "1GiB"\ndeadline_s = 3\n[identity]\nmodel = "one"\n')
    told = Config.from_environment(
        {
            "KVSTORE_CONFIG": str(file),
            "KVSTORE_CONFIG_IDENTITY": '{model = "two"}',
            "KVSTORE_CONFIG_LEASE_S": "1.5",
            "KVSTORE_CONFIG_NAMESPACE": "2024",
            "KVSTORE_CONFIG_SPANS": "true",
            "KVSTORE_CONFIG_RECOMPUTE_S": "auto",
            "KVSTORE_CONFIG_EVICTION_POLICY": "{name = 's3-fifo', small = 0.2}",
            "KVSTORE_CONFIG_DISK": '"/cache"',
            "KVSTORE_CONFIG_DISK_BYTES": "1TiB",
            "KVSTORE_CONFIGURATION": "not ours",
        }
    )
    assert told == config(
        deadline_s=3,
        identity={"model": "two"},
        lease_s=1.5,
        namespace="2024",
        spans=True,
        eviction_policy={"name": "s3-fifo", "small": 0.2},
        tiers=[DISK],
    )


def test_a_variable_takes_the_place_of_what_means_the_same_in_the_file(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole.toml", tmp_path / "short.toml"
    whole.write_text(
        'cpu_bytes_to_use = "1GiB"\n[[tiers]]\ntype = "disk"\npath = "/old"\ncapacity_bytes = 9\n'
    )
    short.write_text('host = "1GiB"\ndisk = "/old"\ndisk_bytes = 9\n')
    for file, variables in (
        (whole, {"HOST": "2GiB", "DISK": "/cache", "DISK_BYTES": "1TiB"}),
        (short, {"CPU_BYTES_TO_USE": "2GiB", "TIERS": '[{type = "disk", path = "/cache", '
                 'capacity_bytes = "1TiB"}]'}),
        (short, {"HOST": "2GiB", "DISK": '["/cache"]', "DISK_BYTES": "1TiB"}),
    ):  # fmt: skip
        named = {f"KVSTORE_CONFIG_{name}": value for name, value in variables.items()}
        told = Config.from_environment({"KVSTORE_CONFIG": str(file), **named})
        assert told == Config.from_mapping({"cpu_bytes_to_use": 2 * GIB, "tiers": [DISK]})
    alone = {"KVSTORE_CONFIG": "", "KVSTORE_CONFIG_HOST": "1GiB"}
    assert Config.from_environment(alone) == config()


def test_a_password_in_an_address_is_not_shown() -> None:
    told = config(tiers=[{"type": "redis", "url": "redis://me:s3cret@host:6379/0"}])
    assert "s3cret" not in repr(told)
    assert "redis://***@host:6379/0" in repr(told)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no configuration: give one, or set KVSTORE_CONFIG to the path of one"),
        ({"KVSTORE_CONFIG": "/none.toml"}, "/none.toml: cannot be read"),
        (
            {"KVSTORE_CONFIG_HOTS": "1GiB"},
            "unknown variable KVSTORE_CONFIG_HOTS: did you mean host?",
        ),
        ({"KVSTORE_CONFIG_DEADLINE_S": "1"}, "missing key cpu_bytes_to_use"),
        ({"KVSTORE_CONFIG_HOST": "lots"}, "host = 'lots'"),
        ({"KVSTORE_CONFIG_HOST": "1", "KVSTORE_CONFIG_SPANS": "yes"}, "spans = 'yes'"),
        ({"KVSTORE_CONFIG_HOST": "1", "KVSTORE_CONFIG_LEASE_S": "-1"}, "lease_s = -1"),
    ],
)
def test_an_environment_that_cannot_be_used(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.from_environment(variables)
    assert str(refusal.value).startswith(message)


# -- the schema ------------------------------------------------------------------------------

ACCEPTED: list[dict[str, Any]] = [
    {"host": "1GiB", "disk": "/cache", "disk_bytes": 5},
    {"cpu_bytes_to_use": 1, "tiers": [DISK, {"type": "object", "url": "file:///x"}]},
    {"cpu_bytes_to_use": "1 gi", "recompute_s": 0, "eviction_policy": {"name": "lru"}},
    {"cpu_bytes_to_use": 1, "admission": [], "identity": {}, "recompute_s": "auto"},
    {"cpu_bytes_to_use": 1, "chunk_bytes": None, "admission": ["reuse", {"name": "doorkeeper"}]},
    {"cpu_bytes_to_use": 1, "tiers": [{**DISK, "path": ["/a", "/b"], "lane": 3, "flow": "demote"}]},
]


@pytest.mark.parametrize("values", ACCEPTED)
def test_the_schema_accepts_what_is_accepted(values: dict[str, Any]) -> None:
    Config.from_mapping(values)
    jsonschema.validate(values, json_schema())


def test_the_schema_refuses_what_is_refused_but_for_names_and_rules_of_several_keys() -> None:
    """Names of plugins, sizes that are too large as text, and what JSON cannot say are let pass."""
    schema = jsonschema.Draft202012Validator(json_schema())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    whole = [({"cpu_bytes_to_use": 1, **values}, named) for values, named, _ in REFUSED]
    tiers = [
        ({"cpu_bytes_to_use": 1, "tiers": [{**DISK, **values}]}, named)
        for values, named, _ in REFUSED_DISK
    ]
    passed = [
        named
        for values, named in whole + tiers
        if all(isinstance(key, str) for key in values) and schema.is_valid(values)
    ]
    plugins = ("eviction_policy", "admission", "path", "type")
    unsayable = re.compile(r"= (nan|inf|1000|2\.0|'0'|'1KiB'|\{'x': nan|\{1: 2)|\{1, 2\}")
    for named in passed:
        key = named.split(" = ")[0].rpartition(".")[2]
        assert key in plugins or unsayable.search(named), named
    assert len(passed) < 30 < len(whole + tiers) - len(passed)


def test_every_key_has_a_text_and_a_schema() -> None:
    for cls in (Config, DiskConfig, TierConfig):
        for name, key in keys_of(cls).items():
            assert key.text, name
            assert key.converter in SCHEMAS or name in ("type", "tiers"), name


def test_the_sample_sets_each_key_once_and_its_defaults_are_true() -> None:
    lines = sample().splitlines()
    commented = [line.removeprefix("# ") for line in lines if re.match(r"# \w+ = (?!\.\.\.)", line)]
    plain = "\n".join(lines)
    assert Config.from_mapping(tomllib.loads(plain)) == Config.from_mapping(
        tomllib.loads("\n".join(line[2:] if line[2:] in commented else line for line in lines))
    )
    for name in [*keys_of(Config), *keys_of(DiskConfig)]:
        assert any(re.match(rf"(# )?{name} = |\[\[{name}\]\]", line) for line in lines), name


def test_the_default_policy_of_host_memory_depends_on_what_is_below() -> None:
    assert config().host_policy == Choice("hit-density", (("whole_stores", True),))
    assert config(tiers=[DISK]).host_policy == "lru"
    assert config(eviction_policy="arc", tiers=[DISK]).host_policy == "arc"


def test_a_tier_may_lie_on_several_disks() -> None:
    (tier,) = config(tiers=[{**DISK, "path": ["/one", "/two"]}]).tiers
    assert tier.paths == (Path("/one"), Path("/two"))
    tier = disk(path=["/one"])
    assert tier.path == Path("/one")


@pytest.mark.parametrize("path", [[], ["/one", "/one"], ["/one", ""], [3]])
def test_a_list_of_paths_must_name_different_folders(path: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].path = "):
        config(tiers=[{**DISK, "path": path}])


def test_two_tiers_cannot_share_one_of_their_paths() -> None:
    with pytest.raises(ConfigError, match="each tier needs a folder of its own"):
        config(tiers=[{**DISK, "path": ["/one", "/two"]}, {**DISK, "path": "/two"}])


def test_short_keys_stand_for_host_memory_and_one_disk(tmp_path: Path) -> None:
    config = Config.from_mapping({"host": "1MiB", "disk": str(tmp_path), "disk_bytes": "1GiB"})
    (tier,) = config.tiers
    assert isinstance(tier, DiskConfig)
    assert (config.cpu_bytes_to_use, tier.paths, tier.capacity_bytes) == (
        2**20,
        (tmp_path,),
        2**30,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "lots"}, "host = 'lots'"),
        ({"host": 1, "cpu_bytes_to_use": 1}, "host is short for cpu_bytes_to_use"),
        ({"host": 1, "disk": "/x"}, "missing key disk_bytes"),
        ({"host": 1, "disk_bytes": 1}, "missing key disk"),
        ({"host": 1, "disk": "/x", "disk_bytes": "much"}, "disk_bytes = 'much'"),
        ({"host": 0}, "host = 0: must be at least 1"),
        ({"host": 1, "disk": "/x", "disk_bytes": 0}, "disk_bytes = 0: must be at least 1"),
        ({"host": 1, "disk": 5, "disk_bytes": 1}, "disk = 5: must be the path of a folder"),
        ({"host": 1, "tenants": {"a\ud800": {}}}, r"tenants = .*must be text in UTF-8"),
        (
            {"host": 1, "tiers": [{"type": "object", "url": "file:///x", "parameters": {}}]},
            "has no parameter 'parameters'",
        ),
        ({"host": 1, "disk": "/x", "disk_bytes": 1, "tiers": []}, "describe it in tiers"),
    ],
)
def test_short_keys_that_say_too_little_or_too_much(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping(values)
