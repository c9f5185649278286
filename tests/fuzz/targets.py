"""What reads bytes from outside: files of others, configurations and requests.

Each target gets choices, makes an input of them, and lets the product read it. Only what is
documented may be raised: any other exception ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import lzma
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import kvstore
from kvstore.config import Config
from kvstore.config.model import read_environment, read_toml
from kvstore.control.commands import Commands
from kvstore.core.hints import read_hints
from kvstore.errors import KVStoreError, TraceError
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.maintenance.offline import purge
from kvstore.maintenance.survey import verify
from kvstore.observe.recording import MAGIC, encode_request
from kvstore.simulation.trace import read_trace
from kvstore.sizes import parse_size
from kvstore.tiers.disk.epoch import read_epoch
from kvstore.tiers.disk.namespace import read_namespace
from kvstore.tiers.remote.record import decode, encode, seed_of
from tests.fuzz.choices import Choices, damaged, edited
from tests.store.support import keys_of, payloads, small

__all__ = ["TARGETS", "Target"]

KEYS = keys_of("fuzz", 6)


class Target(ABC):
    """Something that reads what others have written. One object for many inputs."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kvstore-fuzz-")
        self.folder = Path(self._scratch.name)

    @abstractmethod
    def read(self, choices: Choices) -> None:
        """Make an input, and let it be read."""

    def close(self) -> None:
        """Remove what it needed."""
        self._scratch.cleanup()


class _Cache(Target):
    """A file of a cache on disk is damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.path = self.folder / "cache"
        with kvstore.open_sync(small(self.path, disk=16)) as store:
            store.put(KEYS, payloads(KEYS), durable=True)
        (self.namespace,) = (path.parent for path in self.path.glob("*/namespace.json"))
        (self.segment,) = self.path.glob("*/lane-*/segment-*.safetensors")
        self.sound = self.file.read_bytes()

    @property
    def file(self) -> Path:
        return self.segment

    def _damage(self, choices: Choices) -> None:
        self.file.write_bytes(damaged(self.sound, choices))


class Segment(_Cache):
    """A segment: judged by what inspects it, what opens it, and what is served then."""

    def read(self, choices: Choices) -> None:
        self._damage(choices)
        list(verify(self.path))
        with kvstore.open_sync(small(self.path, disk=64)) as store:
            there = [key for key in KEYS if store.contains([key])[0]]
            for key, right in zip(there, payloads(there), strict=True):
                with store.get([key]) as chunks:
                    assert not len(chunks) or bytes(chunks[0]) == right, "another's bytes"
        purge(self.path, key=KEYS[0])
        for path in self.segment.parent.glob("segment-*"):
            if path != self.segment:
                path.unlink()


class Namespace(_Cache):
    """The file that says whose a namespace is."""

    @property
    def file(self) -> Path:
        return self.namespace / "namespace.json"

    def read(self, choices: Choices) -> None:
        if choices.next(2):
            told = edited(json.loads(self.sound), choices)
            self.file.write_text(json.dumps(told), errors="replace")
        else:
            self._damage(choices)
        with contextlib.suppress(KVStoreError):
            read_namespace(self.namespace)
        list(verify(self.path))
        purge(self.path, dry_run=True)


class Epoch(_Cache):
    """The file with the epoch of a namespace."""

    @property
    def file(self) -> Path:
        file = self.namespace / "epoch"
        if not file.exists():
            file.write_text("7\n")
        return file

    def read(self, choices: Choices) -> None:
        if choices.next(2):
            self.file.write_bytes(choices.rest(70))
        else:
            self._damage(choices)
        with contextlib.suppress(KVStoreError):
            assert 0 <= read_epoch(self.namespace) < 2**32
        list(verify(self.path))


class Bundle(_Cache):
    """A bundle that is imported."""

    @property
    def file(self) -> Path:
        bundle = self.folder / "bundle.safetensors"
        if not bundle.exists():
            export_bundle(self.path, bundle)
        return bundle

    def read(self, choices: Choices) -> None:
        room = 8 + int.from_bytes(self.sound[:8], "little")
        if choices.next(2):
            told = json.dumps(edited(json.loads(self.sound[8:room]), choices)).encode()
            self.file.write_bytes(len(told).to_bytes(8, "little") + told + self.sound[room:])
        else:
            self._damage(choices)
        with tempfile.TemporaryDirectory(dir=self.folder) as fresh:
            try:
                done = import_bundle(self.file, Path(fresh) / "cache", capacity_bytes=2**20)
            except KVStoreError:
                return
            assert done.stored <= done.chunks


class Trace(Target):
    """A trace, of each format, compressed or not."""

    TEXTS: tuple[list[Any], ...] = (
        [{"timestamp": 0, "hash_ids": [1, 2, 3]}, {"timestamp": 5, "hash_ids": [1, 2, "x"]}],
        [{"block_tokens": 16}, [0, 9, 9, -1, 0, 4], [7, 9, 9, 0, 2, 3]],
    )

    def read(self, choices: Choices) -> None:
        lines = edited(self.TEXTS[choices.next(2)], choices)
        lines = lines if isinstance(lines, list) else [lines]
        raw = b"\n".join(json.dumps(line).encode() for line in lines)
        name = "trace.jsonl"
        if choices.next(4) == 1:
            raw, name = lzma.compress(raw, preset=0), "trace.jsonl.xz"
        elif choices.next(4) == 1:
            header = json.dumps(edited({"chunk_bytes": 4096}, choices)).encode()
            raw = MAGIC + header + b"\n"
            raw += b"".join(encode_request(1.5 * at, [KEYS[:at], KEYS]) for at in range(3))
        file = self.folder / name
        file.write_bytes(damaged(raw, choices) if raw and choices.next(2) else raw)
        with contextlib.suppress(TraceError):
            read_trace(file, limit=1000)


class Configuration(Target):
    """A configuration: as a table, as TOML, and from the environment."""

    TOML = 'host = "64MiB"\n[[tiers]]\ntype = "disk"\npath = "/x"\ncapacity_bytes = "1GiB"\n'

    VARIABLES: ClassVar = {
        "KVSTORE_CONFIG_HOST": "64MiB",
        "KVSTORE_CONFIG_TIERS": '[{type = "disk", path = "/x", capacity_bytes = "1GiB"}]',
        "KVSTORE_CONFIG_DEADLINE_S": "0.5",
        "KVSTORE_CONFIG_KEEP_EVENTS": "true",
    }

    def __init__(self) -> None:
        super().__init__()
        disk = {"type": "disk", "path": str(self.folder / "c"), "capacity_bytes": "1GiB"}
        self.sound = {
            "cpu_bytes_to_use": "64MiB",
            "chunk_bytes": 4096,
            "identity": {"model": "m", "tp": 1},
            "eviction_policy": {"name": "hit-density", "whole_stores": False},
            "admission": ["doorkeeper"],
            "tiers": [disk | {"io": "direct"}, {"type": "object", "url": f"file://{self.folder}"}],
            "deadline_s": 0.5,
            "pinned_share": 0.25,
            "control": str(self.folder / "ctl.sock"),
        }

    def read(self, choices: Choices) -> None:
        kind = choices.next(4)
        with contextlib.suppress(KVStoreError):
            if kind == 1:
                file = self.folder / "kvstore.toml"
                file.write_bytes(damaged(self.TOML.encode(), choices))
                Config.from_mapping(read_toml(file))
            elif kind == 2:
                told = edited(self.VARIABLES, choices)
                if isinstance(told, dict):
                    Config.from_mapping(read_environment({k: str(v) for k, v in told.items()}))
            else:
                Config.from_mapping(edited(self.sound, choices))
        with contextlib.suppress(ValueError):
            parse_size(choices.rest(12).decode("latin-1"))


class Control(Target):
    """The body of a request to the control server, of a store that serves."""

    BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
        ("prefetch", {"keys": [KEYS[0].hex(), KEYS[1].hex()]}),
        ("retain", {"keys": [KEYS[0].hex()], "seconds": 5, "host": True}),
        ("release", {"tokens": [1, 2, 3], "model": "m", "cache_salt": "s", "cold": True}),
        ("demote", {"keys": [key.hex() for key in KEYS], "dry_run": True}),
        ("remove", {"keys": [KEYS[2].hex()], "dry_run": False}),
        ("reset", {"dry_run": True}),
        (
            "settings",
            {
                "host": {"bytes": 4 * 4096, "eviction_policy": "arc"},
                "tiers": {"0": {"capacity_bytes": "2MiB", "eviction_policy": "lru"}},
            },
        ),
        ("settings", {"tiers": {"0": {"compaction_rate": "1MiB"}}}),
    )

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        config = small(self.folder / "cache", disk=64, control=str(self.folder / "ctl.sock"))
        self._opening = kvstore.open(config)
        self._store = self._run(self._opening.__aenter__)
        commands = self._store._assembly.commands
        assert isinstance(commands, Commands)
        commands.name_keys(lambda tokens, fields: KEYS[: len(tokens)])
        self._commands = commands
        self._run(lambda: self._store.put(KEYS, payloads(KEYS)))

    def _run(self, call: Callable[[], Any]) -> Any:
        return self._loop.run_until_complete(call())

    def read(self, choices: Choices) -> None:
        command, body = self.BODIES[choices.next(len(self.BODIES))]
        given = edited(body, choices)
        if not isinstance(given, dict):
            return

        with contextlib.suppress(KVStoreError):
            self.ask(command, json.loads(json.dumps(given)))

    def ask(self, command: str, body: dict[str, Any]) -> str:
        """Give a command; returns how its job has ended."""

        async def asking() -> str:
            told = await self._commands.run(command, body)
            json.dumps(told)
            job = self._commands.job(told.get("job", -1))
            if job is None:
                return "dry run"
            await asyncio.wait_for(job.ended.wait(), 60)
            assert job.state in ("done", "failed"), job.told()
            error = job.told()["error"] or ""
            assert "Error(" not in error, error
            return job.state

        ended: str = self._run(asking)
        return ended

    def close(self) -> None:
        self._run(lambda: self._opening.__aexit__(None, None, None))
        self._loop.close()
        super().close()


class Hints(Target):
    """The hints of a request: what is wrong is ignored, and counted."""

    PARAMS: ClassVar = {"kvstore": {"retain_s": 300, "demote": True, "prefetch_after_s": 50}}
    ACTIONS: ClassVar = [
        {"action_type": "retain", "action_version": "1.0", "payload": {"ttl_s": 300}},
        {"action_type": "prefetch", "action_version": "1", "payload": {"after_s": 3}},
    ]

    def read(self, choices: Choices) -> None:
        actions = edited(self.ACTIONS, choices)
        if isinstance(actions, list):
            actions = [SimpleNamespace(**e) if isinstance(e, dict) else e for e in actions]
        _, taken, ignored = read_hints(
            edited(self.PARAMS, choices), SimpleNamespace(actions=actions)
        )
        assert taken >= 0
        assert ignored >= 0


class Record(Target):
    """The record of a value in a store."""

    def read(self, choices: Choices) -> None:
        seed = seed_of("place")
        sound = encode(KEYS[0], 4096, bytes(16), seed)
        found = damaged(sound, choices)
        assert decode(found, KEYS[0], 4096, seed) is None or found == sound


TARGETS: dict[str, type[Target]] = {
    "segment": Segment,
    "namespace": Namespace,
    "epoch": Epoch,
    "bundle": Bundle,
    "trace": Trace,
    "configuration": Configuration,
    "control": Control,
    "hints": Hints,
    "record": Record,
}
