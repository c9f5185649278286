"""`kvstore config`: a configuration explained, what will fail, and what is generated from it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

import kvstore
from kvstore import plugins
from kvstore.config import Config, read_toml
from kvstore.config.describe import reference, sample
from kvstore.config.values import without_passwords
from kvstore.errors import PathUnusableError
from kvstore.gate import Gate
from kvstore.tiers.codec import Codec
from kvstore.tiers.remote.record import RECORD_BYTES
from tests.store.support import small
from tests.tools.support import command, error_of, json_of, run
from tests.world.share import SERVERS, ShareServer, ShareTier

PAGE = Path(__file__).resolve().parents[2] / "docs/configuration.md"


def written(folder: Path, text: str, name: str = "kvstore.toml") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def toml(**more: str) -> str:
    lines = {"cpu_bytes_to_use": '"1MiB"', "chunk_bytes": "4096", "identity": "{}", **more}
    return "\n".join(f"{key} = {value}" for key, value in lines.items() if value)


def disk(path: Path, size: object = "1MiB") -> str:
    return f'[{{type = "disk", path = "{path}", capacity_bytes = "{size}"}}]'


def checked(folder: Path, status: int = 0, /, **more: str) -> str:
    """What is told of a configuration that has more than it needs."""
    return run("config", "check", written(folder, toml(**more)), status=status)


def vllm(**extra: Any) -> dict[str, Any]:
    """What vLLM is given."""
    told = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.vllm"}
    return told | {"kv_role": "kv_both", "kv_connector_extra_config": {"host": "1MiB", **extra}}


def test_the_page_of_the_documentation_is_that_of_the_code() -> None:
    assert PAGE.read_text().endswith("\n" + reference())


def test_sizes_are_told_in_bytes_and_in_the_chunks_that_the_engine_makes_of_them(
    tmp_path: Path,
) -> None:
    tier = f"""
        [[tiers]]
        type = "disk"
        path = "{tmp_path}/kv"
        capacity_bytes = "4MiB"
        segment_bytes = "1MiB"
    """
    told = run("config", "check", written(tmp_path, toml() + tier))
    assert "1MiB" in told
    assert "1,048,576 bytes, 256 chunks" in told
    assert "4,194,304 bytes, 4 segments of 247 chunks: 988" in told
    assert "deadline_s" not in told
    assert told.endswith("kvstore.toml: can be used here\n")


async def test_the_chunks_told_are_those_of_a_real_store(tmp_path: Path) -> None:
    values = small(tmp_path / "kv", rows=13, disk=64)
    values["tiers"][0]["path"] = str(values["tiers"][0]["path"])
    file = written(tmp_path, json.dumps(values), "kvstore.json")
    told = {line["key"]: line for line in json_of("config", "check", file)["values"]}
    async with kvstore.open(values) as store:
        stats = store.stats()
    assert told["cpu_bytes_to_use"]["text"].endswith(f", {stats.rows} chunks")
    assert told["tiers[0].capacity_bytes"]["text"].endswith(f": {stats.tiers[0].room:,}")
    assert told["deadline_s"]["given"]
    assert not told["lease_s"]["given"]


def test_what_vllm_is_given_may_be_checked_as_it_is(tmp_path: Path) -> None:
    told = vllm(host="1GiB", disk=str(tmp_path), disk_bytes="1GiB", blocks_per_chunk=2)
    file = written(tmp_path, json.dumps(told), "vllm.json")
    shown = run("config", "check", file, "--chunk-bytes", "2MiB", "--all")
    assert "1,073,741,824 bytes, 512 chunks" in shown
    assert "tiers[0].io_threads" in shown


@pytest.mark.parametrize(
    "around",
    [
        {"backend_name": "kvstore", "interface_v1": 1, "kvstore": ...},
        {"type": "plugin", "class_name": "KVStoreL2Adapter", "adapter_params": ...},
    ],
)
def test_what_sglang_and_lmcache_are_given_may_be_checked_as_it_is(
    tmp_path: Path, around: dict[str, Any]
) -> None:
    its = {"host": "1MiB", "disk": str(tmp_path), "disk_bytes": "1GiB"}
    told = {key: its if value is ... else value for key, value in around.items()}
    run("config", "check", written(tmp_path, json.dumps(told), "a.json"))
    its["host"] = "much"
    file = written(tmp_path, json.dumps(told), "a.json")
    assert "host = 'much'" in error_of("config", "check", file)


def test_what_is_no_table_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("kvstore", "adapter_params", "kv_connector_extra_config"):
        for value in (None, 5, "x"):
            file = written(tmp_path, json.dumps({name: value}), "a.json")
            assert f"{name} must be a table of keys" in error_of("config", "check", file)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"automatic_identity": "no"}, "automatic_identity = 'no': must be true or false"),
        ({"offload_prompt_only": "false"}, "offload_prompt_only = 'false': must be true or false"),
        ({"secondary_tiers": []}, "secondary_tiers belong to vLLM's own tiering"),
        ({"chunk_bytes": "1MiB"}, "unknown key chunk_bytes = '1MiB': vLLM decides it"),
        ({"keep_events": True}, "unknown key keep_events = True: vLLM decides it"),
        ({"sync_load_budget_bytes": -1}, "sync_load_budget_bytes = -1: must be a whole number of"),
        ({"sync_load_budget_bytes": "1MiB"}, "sync_load_budget_bytes = '1MiB': must be a whole"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk = 0: must be a whole number of at least 1"),
        ({"blocks_per_chunk": 2.5}, "blocks_per_chunk = 2.5: must be a whole number"),
        ({"encryption_keys": "env:"}, "encryption_keys = 'env:': must be the path of a file, env:"),
        ({"block_size": "x"}, "block_size = 'x': must be a whole number of at least 1"),
        (
            {"block_size": 32, "blocks_per_chunk": 2},
            "block_size and blocks_per_chunk: only one of them is allowed",
        ),
    ],
)
def test_what_vllm_refuses_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    file = written(tmp_path, json.dumps(vllm(**extra)), "vllm.json")
    assert message in error_of("config", "check", file)


OURS = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm"}
BY_HAND = {"automatic_identity": False, "identity": {"model": "m"}}
DISK = {"disk": "kv", "disk_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("connector", "extra", "message"),
    [
        ("KVStoreConnector", {}, None),
        ("KVStoreConnector", OURS | DISK, None),
        ("KVStoreConnector", {"spec_name": "Nope"}, "spec_name = 'Nope': allowed are KVStoreOff"),
        ("KVStoreConnector", {"spec_name": None}, "spec_name = None: allowed are KVStoreOff"),
        ("KVStoreConnector", {"spec_module_path": "anything"}, None),
        ("KVStoreConnector", DISK | {"automatic_identity": False}, "false needs identity"),
        ("OffloadingConnector", OURS, None),
        ("OffloadingConnector", OURS | DISK | BY_HAND, None),
        ("OffloadingConnector", {}, "spec_name is missing: allowed are KVStoreOffloadingSpec"),
        ("OffloadingConnector", {"spec_name": OURS["spec_name"]}, "spec_module_path is missing"),
        ("OffloadingConnector", OURS | DISK, "tiers need KVStoreConnector, or automatic_identity"),
        ("OffloadingConnector", OURS | DISK | BY_HAND | {"disk_codec": "g"}, "codecs need KVStore"),
    ],
)
def test_a_connector_of_vllm_must_find_ours_and_tell_it_enough(
    tmp_path: Path, connector: str, extra: dict[str, Any], message: str | None
) -> None:
    told = {**vllm(**extra), "kv_connector": connector}
    ours = told.pop("kv_connector_module_path")
    for module in (None, ours):
        its = told if module is None else {**told, "kv_connector_module_path": module}
        file = written(tmp_path, json.dumps(its), "vllm.json")
        if (module is None) != (connector == "KVStoreConnector"):
            done = command("config", "check", file)
            assert done.returncode == (2 if message else 0)
            assert message is None or message in done.stderr
        else:
            allowed = " is missing" if module is None else " = 'kvstore.vllm': allowed are none"
            assert f"kv_connector_module_path{allowed}" in error_of("config", "check", file)


def test_shares_are_shown_as_they_are_written(tmp_path: Path) -> None:
    shown = checked(tmp_path, tenants="{alice = {guaranteed = 0.3}}")
    assert 'alice = {"guaranteed": 0.3' in shown
    assert "Share" not in shown


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "key", "below", "said"),
    [
        (open_to_all, "tiers", "kv", "may be written by every user (mode 0777): chmod go-w"),
        (Path.touch, "tiers", "", "tiers[0].path: {} is a file, not a folder"),
        (
            lambda odd: odd.symlink_to("nothing"),
            "tiers",
            "",
            "tiers[0].path: {} is a symbolic link",
        ),
        (Path.mkdir, "tiers", "x" * 300, "WRONG tiers[0].path: File name too long"),
        (os.mkfifo, "record_trace", "", "WRONG record_trace: "),
        (lambda odd: odd.symlink_to("other"), "record_trace", "", "WRONG record_trace: "),
    ],
)
def test_a_path_that_is_odd_is_told_before_it_is_refused(
    tmp_path: Path, make: Callable[[Path], None], key: str, below: str, said: str
) -> None:
    make(odd := tmp_path / "odd")
    value = disk(odd / below) if key == "tiers" else f'"{odd}"'
    assert said.format(odd) in checked(tmp_path, 1, **{key: value})


@pytest.mark.parametrize("opened", ["*/lane-0", "*"])
async def test_a_folder_in_a_cache_that_others_may_write_to_is_told_before_a_server_refuses_it(
    tmp_path: Path, opened: str
) -> None:
    values = small(tmp_path / "kv", rows=13, disk=64)
    values["tiers"][0]["path"] = str(values["tiers"][0]["path"])
    async with kvstore.open(values):
        pass
    file = written(tmp_path, json.dumps(values), "kvstore.json")
    run("config", "check", file)
    [folder] = (tmp_path / "kv").glob(opened)
    folder.chmod(0o777)
    with pytest.raises(PathUnusableError, match="chmod go-w"):
        await kvstore.open(values)
    told = run("config", "check", file, status=1)
    assert f"{folder} may be written by every user (mode 0777): chmod" in told
    other = written(tmp_path, json.dumps({**values, "namespace": "other"}), "other.json")
    run("config", "check", other)


@pytest.mark.parametrize(
    ("key", "value"),
    [("kv_connector", "Nope"), ("kv_role", "kv_bot"), ("kv_connector_module_path", "kvstore")],
)
def test_names_that_vllm_would_not_find_are_refused(tmp_path: Path, key: str, value: str) -> None:
    run("config", "check", written(tmp_path, json.dumps(vllm()), "vllm.json"))
    file = written(tmp_path, json.dumps({**vllm(), key: value}), "vllm.json")
    told = error_of("config", "check", file).lower().replace(value.lower(), value)
    assert f"{key} = {value!r}: allowed are kv" in told


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cpu_bytes_to_use": '"64TiB"'}, "WRONG cpu_bytes_to_use: "),
        ({"chunk_bytes": ""}, "WRONG chunk_bytes: missing key chunk_bytes"),
        ({"identity": "", "tiers": '[{type = "disk", path = "/kv", capacity_bytes = 1000}]'},
         "WRONG identity: missing key identity"),
        ({"tiers": '[{type = "disk", path = "/kv", capacity_bytes = "64MiB", '
                   'segment_bytes = "256MiB"}]'},
         "WRONG tiers[0].capacity_bytes: smaller than segment_bytes (256.0 MiB)"),
        ({"tiers": '[{type = "disk", path = "/kv", capacity_bytes = "900000TB"}]'},
         "WARNING tiers[0].capacity_bytes: 818545.2 TiB are wanted on the drive of"),
        ({"control": '"0.0.0.0:9999"'}, "WRONG control: must be a path, or a port of 127.0.0.1"),
        ({"control": '"/nowhere/socket"'}, "WRONG control: the folder /nowhere does not exist"),
        ({"control": '"/tmp/socket"', "control_token_file": '"/nowhere"'},
         "WRONG control_token_file: No such file or directory"),
        ({"tiers": '[{type = "disk", path = "/kv", capacity_bytes = 1000}]'},
         "WRONG tiers[0].capacity_bytes: smaller than one segment, of "),
        ({"tiers": '[{type = "disk", path = "/kv", capacity_bytes = "1MiB", segment_bytes = 1}]'},
         "WRONG tiers[0].capacity_bytes: segment_bytes is less than one chunk"),
        ({"control_token_file": '"HERE/file"'},
         "WRONG control_token_file: control_token_file belongs to control"),
        ({"control": f'"/tmp/{"x" * 120}"'}, "WRONG control: the path of a socket has at most 107"),
        ({"control": '"HERE/file"'}, "WRONG control: there is a file that is no socket"),
        ({"tiers": '[{type = "object", url = "file:below"}]'}, "WRONG tiers[0]: url: must be s3://"),
        ({"tiers": '[{type = "object", url = "file://HERE/file"}]'},
         "/file is a file, not a folder"),
        ({"record_trace": '"/tmp"'}, "WRONG record_trace: Is a directory"),
        ({"record_trace": '"HERE/file"'}, "WRONG record_trace: exists and is not a recording"),
        ({"identity": '{slot_bytes = 5}'}, "WRONG identity: slot_bytes is a name that kvstore"),
        ({"namespace": '"x/y"'}, "WRONG namespace: namespace name 'x/y': allowed are"),
        ({"tiers": '[{type = "redis", url = "nothing"}]'}, "WRONG tiers[0]: url"),
        ({"encryption_keys": '"/nowhere"'}, "WRONG encryption_keys: /nowhere: the keys cannot be"),
        ({"encryption_keys": '"env:NO_KEYS"'}, "WRONG encryption_keys: the variable NO_KEYS"),
    ],
)  # fmt: skip
def test_what_will_fail_is_told_before_it_does(
    tmp_path: Path, more: dict[str, str], message: str
) -> None:
    written(tmp_path, "root:x:0:0\n" * 64, "file")
    told = checked(
        tmp_path, 1, **{key: text.replace("HERE", str(tmp_path)) for key, text in more.items()}
    )
    assert message in told
    refused = not message.startswith("WARNING")
    assert told.endswith(f"kvstore.toml: can{'not' if refused else ''} be used here\n")


def test_a_size_that_the_file_says_otherwise_and_a_directory_that_is_missing_are_told(
    tmp_path: Path,
) -> None:
    share = tmp_path / "share"
    file = written(tmp_path, toml(tiers=f'[{{type = "object", url = "{share.as_uri()}"}}]'))
    assert "will be made, " in run("config", "check", file)
    share.mkdir()
    assert "exists, " in run("config", "check", file)
    told = run("config", "check", file, "--chunk-bytes", "3MiB", status=1)
    assert "WARNING chunk_bytes: counts, and not the 3145728 of --chunk-bytes" in told
    assert told.endswith("can be used here\n")


def test_tiers_on_one_drive_are_counted_together(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).free * 2 // 3
    one, two = (disk(tmp_path / name, size).strip("[]") for name in ("a", "b"))
    checked(tmp_path, tiers=f"[{one}]")
    told = checked(tmp_path, 1, tiers=f"[{one}, {two}]")
    assert "WARNING tiers[1].capacity_bytes: " in told
    assert told.endswith("kvstore.toml: can be used here\n")


def test_a_cache_of_the_same_name_that_is_of_another_model_is_told(tmp_path: Path) -> None:
    ours = {"tiers": disk(tmp_path / "kv", "64MiB"), "namespace": '"ours"'}
    checked(tmp_path, **ours)
    kvstore.open_sync(read_toml(tmp_path / "kvstore.toml")).close()
    checked(tmp_path, **ours)
    told = checked(tmp_path, 1, **ours, identity='{model = "another"}')
    assert "WRONG namespace: " in told
    assert "model is None there and 'another' here" in told
    checked(tmp_path, 1, **ours, chunk_bytes="8192")
    # What a server adds to the identity that knows the size itself is not known here.
    checked(tmp_path, 1, **ours, chunk_bytes="")
    run("config", "check", tmp_path / "kvstore.toml", "--chunk-bytes", "4096")


def test_a_store_is_checked_with_its_codec(tmp_path: Path) -> None:
    Gate("int8", "bfloat16", {}, {}).write(tmp_path / "gate")
    least = 16 * (Codec.coded_bytes(4096) + RECORD_BYTES)

    def check(capacity: int, status: int) -> str:
        tier = f'[{{type = "simulated", capacity_bytes = {capacity}}}]'
        return checked(tmp_path, status, tiers=tier, store_codec=f'"{tmp_path}/gate"')

    kinds = patch.dict(plugins._kinds.classes, {ShareTier.name: ShareTier})
    with kinds, patch.dict(SERVERS, {"share": ShareServer(Random(0))}):
        check(least, 0)
        told = check(least - 1, 1)
    assert f"must be 0, or {least} at least, which is room for 16" in told


def test_odd_files_end_no_check(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(0o700)
    (tmp_path / "kv" / "gone.safetensors").symlink_to(tmp_path / "nothing")
    checked(tmp_path, tiers=disk(tmp_path / "kv"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "cpu_bytes_to_use = 1\nwhat = 2", "unknown key what = 2"),
        ("a.toml", "cpu_bytes_to_use =", "a.toml: not TOML"),
        ("a.json", "{", "a.json: not JSON"),
        ("a.json", "[1]", "must be a table of keys"),
        ("a.json", '{"host": "lots"}', "host = 'lots'"),
    ],
)
def test_what_is_no_configuration_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    assert message in error_of("config", "check", written(tmp_path, text, name))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("none.toml", "none.json"):
        told = error_of("config", "check", tmp_path / name)
        assert f"{name}: cannot be read (No such file" in told


def test_without_a_file_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)
    assert "set KVSTORE_CONFIG" in error_of("config", "check")
    monkeypatch.setenv("KVSTORE_CONFIG_HOST", "1MiB")
    monkeypatch.setenv("KVSTORE_CONFIG_CHUNK_BYTES", "4KiB")
    assert "1,048,576 bytes, 256 chunks" in run("config", "check")


def test_a_password_is_not_printed(tmp_path: Path) -> None:
    tier = '[{type = "redis", url = "redis://me:s3cret@host:6379/0"}]'
    told = checked(tmp_path, 1, tiers=tier)
    assert "redis://***@host:6379/0" in told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:pa/ss@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:a b@c@host", "redis://***@host"),
        ("file:///data/a@b/c", "file:///data/a@b/c"),
        ("file://me:secret@nas/kv", "file://***@nas/kv"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
    ],
)
def test_whatever_a_password_contains_is_hidden(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


def test_the_schema_and_the_sample_are_printed(tmp_path: Path) -> None:
    file = written(tmp_path, run("config", "sample"))
    assert Path(file).read_text().strip() == sample().strip()
    Config.from_toml(file)
    schema: dict[str, Any] = json.loads(run("config", "schema"))
    assert schema["properties"]["host"]["description"].startswith("short for")
