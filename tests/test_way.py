"""The way of one key, traced: the functions that docs/design.md lists, and no way back up.

Layers call downwards: an interface calls the engine and the core, the engine calls the core, all
call tiers and policies. What calls upwards is listed here, with the reason.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore
from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from tests.patience import until
from tests.store.support import keys_of, payloads, small

HOME = Path(kvstore.__file__).resolve().parent.parent
DESIGN = HOME / "docs" / "design.md"

LAYERS = {
    "kvstore/vllm": 5,
    "kvstore/api": 4,
    "kvstore/connector": 4,
    "kvstore/engine": 3,
    "kvstore/core": 2,
    "tiers": 1,
    "policies": 1,
}

UPWARDS = {
    # A step has begun: what nobody asks for any more lapses.
    ("Driver._step", "Store._expire"),
    ("Stepper._poll", "KVStoreManager._expire"),
    # A decorator lets one thread at a time into a manager.
    ("_in_turn.<locals>.taking_turns", "*"),
    # A policy asks for each candidate whether it may leave.
    ("*", "Victims.protection.<locals>.protected"),
    ("*", "Victims.find_one.<locals>.first"),
    ("*", "_nobody"),
    # A tier that closes goes through the order that it was handed, in a thread of its own.
    ("DiskTier.close.<locals>.order_of", "ColdestFirst.__iter__"),
    # A server alone knows where in a prompt a key belongs.
    ("*", "_place_in.<locals>.<lambda>"),
    ("*", "Entrance._enter_one_by_one.<locals>.whole"),
}

KEYS = keys_of("a", 40)


class Trace:
    """What was entered, as ``Class.method``, and the calls that went up a layer."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self.upwards: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        layer = _layer(frame)
        if layer is None:
            return
        name = frame.f_code.co_qualname
        self.entered.add(".".join(name.split(".")[:2]))
        # A coroutine is resumed by whoever awaits it, not called.
        caller = frame.f_back
        if caller is None or frame.f_code.co_flags & 0x80:
            return
        above = _layer(caller)
        if above is not None and layer > above:
            self.upwards.add((caller.f_code.co_qualname, name))

    @property
    def unexpected(self) -> set[tuple[str, str]]:
        return {
            (caller, name)
            for caller, name in self.upwards
            if not {(caller, name), ("*", name), (caller, "*")} & UPWARDS
        }


def _layer(frame: FrameType) -> int | None:
    path = frame.f_code.co_filename
    if not path.startswith(f"{HOME}/"):
        return None
    inside = path[len(str(HOME)) + 1 :]
    inside = re.sub(r"^kvstore/(tiers|policies)/", r"\1/", inside)
    return next((layer for name, layer in LAYERS.items() if inside.startswith(f"{name}/")), None)


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def told() -> list[str]:
    """The functions of the list, in its order."""
    walk = DESIGN.read_text().split("### The way of one key")[1].split("\n### ")[0]
    return [f"{cls}.{name}" for cls, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", walk)]


def below(core: Any) -> bytes:
    """A key that the disk alone has."""
    found: bytes = next(key for key in core.tiers[0].entries if key not in core.chunks)
    return found


def config(path: Path) -> dict[str, Any]:
    """Eight rows, and a disk of two segments, which the keys fill."""
    told = small(path, rows=8, disk=16)
    told["tiers"][0]["capacity_bytes"] = 2 * told["tiers"][0]["segment_bytes"]
    return told


async def test_an_asyncio_store_goes_the_way_that_is_told(tmp_path: Path) -> None:
    with traced() as trace:
        async with kvstore.open(config(tmp_path / "cache")) as store:
            for start in range(0, len(KEYS), 8):
                part = KEYS[start : start + 8]
                await store.put(part, payloads(part))
                await store.flush()
            async with store.get([below(store._core)]) as chunks:
                assert len(chunks) == 1
    base = {"Tier.read": "DiskTier.read", "Tier.write": "DiskTier.write"}
    assert [name for name in told() if base.get(name, name) not in trace.entered] == []
    assert trace.unexpected == set()


def through(manager: Any, request: Callable[[str], Any], steps: Callable[[], None]) -> None:
    """Store more than host memory holds, then load what the disk alone has."""
    core = manager.stepper.core if hasattr(manager, "stepper") else manager._core
    for number, start in enumerate(range(0, len(KEYS), 8)):
        keys, context = KEYS[start : start + 8], request(f"store {number}")
        manager.on_new_request(context)
        out = manager.prepare_store(keys, context)
        manager.complete_store(set(out.keys_to_store), context)
        manager.on_request_finished(context)
        while core.unsaved:
            steps()
    key, context = below(core), request("load")
    manager.on_new_request(context)

    def found() -> bool:
        answer = manager.lookup(key, context)
        if getattr(answer, "name", "") == "HIT" or answer is True:
            return True
        steps()
        return False

    until(found, "it is never a hit")
    manager.prepare_load([key], context)
    manager.complete_load([key], context)
    manager.on_request_finished(context)


def test_a_manager_goes_the_same_way(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with traced() as trace:
        manager = KVStoreManager(config(tmp_path / "cache"), steady=True)
        request.addfinalizer(manager.shutdown)
        through(manager, ReqContext, manager.on_schedule_end)
    assert {"Core.prepare_load", "Grants.grant", "DiskTier.read"} <= trace.entered
    assert trace.unexpected == set()


def test_the_manager_of_vllm_goes_the_same_way(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    from kvstore.vllm.layout import worker_region
    from tests.vllm.parts import make_spec

    disk = {"type": "disk", "path": str(tmp_path / "cache"), "capacity_bytes": "1MiB"}
    spec = make_spec(
        {"cpu_bytes_to_use": 8 * 4096, "tiers": [disk | {"segment_bytes": 16 * 4096 + 2**14}]}, 4096
    )
    worker_region(spec.config.engine_id, 1, spec.region_shape)
    with traced() as trace:
        manager = spec.get_manager()
        request.addfinalizer(manager.shutdown)
        end = base.ScheduleEndContext([], ())
        through(manager, base.ReqContext, lambda: manager.on_schedule_end(end))
    assert {"Core.prepare_load", "Grants.grant", "DiskTier.read"} <= trace.entered
    assert trace.unexpected == set()
