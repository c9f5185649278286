"""What reads bytes from outside raises nothing but what is documented; a few inputs of each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvstore
from kvstore.config import Config
from kvstore.config.model import read_environment, read_toml
from kvstore.core.hints import read_hints
from kvstore.errors import ConfigError, ForeignFileError, TraceError
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.observe.recording import MAGIC
from kvstore.simulation.trace import read_trace
from tests.fuzz.__main__ import NAMES
from tests.fuzz.choices import Choices
from tests.fuzz.targets import TARGETS, Configuration, Control, Hints, Trace
from tests.store.support import keys_of, payloads, small

INPUTS = {"segment": 12, "bundle": 20, "namespace": 40}


def test_each_target_has_its_name_on_the_command_line() -> None:
    assert list(NAMES) == list(TARGETS)


def test_what_is_not_damaged_is_taken(tmp_path: Path) -> None:
    """Or every input would be refused for the same reason, and nothing behind it be reached."""
    target = Configuration()
    file = tmp_path / "kvstore.toml"
    file.write_text(target.TOML)
    for values in (target.sound, read_toml(file), read_environment(target.VARIABLES)):
        assert Config.from_mapping(values).tiers
    for number, lines in enumerate(Trace.TEXTS):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps(line) for line in lines))
        assert read_trace(file).requests
    hints = [SimpleNamespace(**action) for action in Hints.ACTIONS]
    assert read_hints(Hints.PARAMS, SimpleNamespace(actions=hints))[1:] == (5, 0)
    control = Control()
    try:
        for command, body in Control.BODIES:
            assert control.ask(command, body) in ("done", "dry run")
    finally:
        target.close()
        control.close()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_a_documented_error(name: str) -> None:
    rng = random.Random(name)
    target = TARGETS[name]()
    try:
        for _ in range(INPUTS.get(name, 200)):
            target.read(Choices(rng.randbytes(rng.choice((0, 8, 40, 200)))))
    finally:
        target.close()


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("size", ["Infinity", "NaN", "-1", "0", "null", DEEP])
def test_a_recording_with_chunks_of_no_size_is_named(size: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(MAGIC + f'{{"chunk_bytes": {size}}}\n'.encode())
    with pytest.raises(TraceError, match="its header is damaged"):
        read_trace(file)


@pytest.mark.parametrize("offsets", [[0, float("inf")], [float("-inf"), 0], [0], {}])
def test_a_bundle_with_chunks_that_are_nowhere_is_named(offsets: object, tmp_path: Path) -> None:
    keys, file = keys_of("bundle", 2), tmp_path / "bundle"
    with kvstore.open_sync(small(tmp_path / "cache", disk=16)) as store:
        store.put(keys, payloads(keys), durable=True)
    export_bundle(tmp_path / "cache", file)
    sound = file.read_bytes()
    room = 8 + int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8:room])
    header[keys[0].hex()]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + sound[room:])
    with pytest.raises(ForeignFileError, match="no bundle of kvstore"):
        import_bundle(file, tmp_path / "other")


@pytest.mark.parametrize("value", ["(" * 5000, "{[]: 1}", "-" * 100_000 + "1"])
def test_a_policy_with_a_strange_parameter_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="eviction_policy"):
        Config.from_mapping(
            {"cpu_bytes_to_use": "1MiB", "eviction_policy": f"hit-density(whole_stores={value})"}
        )
