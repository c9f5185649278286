"""Scheduler: a server of the world that uses kvstore as vLLM's scheduler does, step by step.

Transfers between device and host memory take some steps; resets, aborts and failures come in
between. What a load finds in its rows when it ends has to be what was there when it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.errors import KVStoreError, LaneBusyError
from kvstore.testing.manager import stored_in
from tests.world.world import CHUNK, BrokenError, Server, World

__all__ = ["Scheduler"]

MOST_REQUESTS = 6

MOST_DRAIN = 60.0
"""Seconds after the last store in which a server may have work."""


@dataclass
class Transfer:
    """A copy between device and host memory."""

    who: ReqContext
    keys: list[bytes]
    rows: list[int]
    label: int
    load: bool
    steps: int


class Scheduler(Server):
    """A process with a manager, and requests that come, wait, load, store and go."""

    def __init__(self, world: World, slot: int) -> None:
        self.manager: KVStoreManager | None = None
        self._requests: dict[str, tuple[ReqContext, list[bytes]]] = {}
        self._transfers: list[Transfer] = []
        self._number = 0
        super().__init__(world, slot)

    def main(self) -> None:
        world = self.world
        troubled = world.troubled
        try:
            manager = self.manager = KVStoreManager(world.config_of(self.slot), steady=True)
        except KVStoreError as error:
            world.act("scheduler not opened", str(error))
            busy = isinstance(error, LaneBusyError) and world.alone
            if not (busy or troubled or world.troubled or world.hurt):
                raise
            self._gone()
            return
        engine: Any = manager.stepper.engine._engine
        if not self._learn_label(int(engine._tiers[0].epoch)):
            self.stopping = True
        world.act("scheduler opened", f"label {self.label}: {manager.description}")
        while not self.stopping:
            self._step(manager)
            world.kernel.sleep(world.rng.random() * world.rng.choice([0.002, 0.02, 0.2]))
        if world.rng.random() < 0.5:
            self._drain(manager)
        manager.shutdown()
        world.act("scheduler closed")
        self.manager = None
        self._gone()

    def _drain(self, manager: KVStoreManager) -> None:
        """Go on until nothing is pending, as a server does that is paused or ends in order."""
        world = self.world
        begun = world.kernel.now
        while manager.has_pending_work():
            manager.on_schedule_end(computes=False)
            world.kernel.sleep(0.05)
            if world.kernel.now - begun > MOST_DRAIN and not self.process.frozen_until:
                raise BrokenError(f"work is pending for {MOST_DRAIN} s without a store")
        world.act("scheduler drained")

    def _step(self, manager: KVStoreManager) -> None:
        world, rng = self.world, self.world.rng
        if len(self._requests) < MOST_REQUESTS and rng.random() < 0.6:
            self._number += 1
            who = ReqContext(f"r{self._number}")
            keys = world.keys(rng.randrange(world.prompts))
            manager.on_new_request(who)
            self._requests[who.req_id] = (who, keys[: rng.randrange(1, len(keys) + 1)])
        for name, (who, keys) in list(self._requests.items()):
            if any(one.who is who for one in self._transfers):
                if rng.random() < 0.02:
                    # An abort; its transfers end later.
                    self._finish(manager, name, "aborted")
                continue
            self._serve(manager, name, who, keys)
        for one in list(self._transfers):
            one.steps -= 1
            if one.steps <= 0:
                self._transfers.remove(one)
                self._end(manager, one)
        if rng.random() < 0.004 and "reset" not in world.without:
            world.act("scheduler reset", f"label {self._new_weights()}")
            manager.reset()
        manager.on_schedule_end(computes=rng.random() < 0.5)

    def _serve(
        self, manager: KVStoreManager, name: str, who: ReqContext, keys: list[bytes]
    ) -> None:
        """Look a request up, and let it load or compute."""
        world, rng = self.world, self.world.rng
        found = manager.lookup_prefix(keys, who)
        if found is None:
            if rng.random() < 0.01:
                self._finish(manager, name, "given up")
            return
        world.act("scheduler lookup", f"{found} of {len(keys)} from {keys[0]!r}")
        if found and rng.random() < 0.9:
            some = keys[:found]
            rows = list(manager.prepare_load(some, who).block_ids)
            self._begin(Transfer(who, some, rows, self.label, True, rng.randrange(4)))
            return
        granted = manager.prepare_store(keys, who)
        if granted is not None and granted.keys_to_store:
            some, rows = list(granted.keys_to_store), stored_in(granted)
            world.are_put(some)
            self._begin(Transfer(who, some, rows, self.label, False, rng.randrange(4)))
            return
        self._finish(manager, name, "done")

    def _begin(self, one: Transfer) -> None:
        used = {row for other in self._transfers for row in other.rows}
        if not one.load and used & set(one.rows):
            raise BrokenError(f"rows {used & set(one.rows)} are in use, and are given to a store")
        self._move(one, 0, CHUNK // 2)
        self._transfers.append(one)

    def _end(self, manager: KVStoreManager, one: Transfer) -> None:
        rng = self.world.rng
        self._move(one, CHUNK // 2, CHUNK)
        if one.load:
            manager.complete_load(one.keys, one.who)
        else:
            manager.complete_store(one.keys, one.who, rng.random() < 0.9)
        kind = "load" if one.load else "store"
        self.world.act(f"scheduler {kind}", f"{len(one.keys)} from {one.keys[0]!r}, {one.label}")
        if one.who.req_id in self._requests:
            self._finish(manager, one.who.req_id, "done")

    def _move(self, one: Transfer, start: int, end: int) -> None:
        """Copy a part of each row to or from the device."""
        assert self.manager is not None
        for key, row in zip(one.keys, one.rows, strict=True):
            place, right = self.manager.region.row(row), self.world.content(key, one.label)
            if not one.load:
                place[start:end] = right[start:end]
            elif bytes(place[:CHUNK]) != right:
                raise BrokenError(f"row {row} does not hold {key!r} of label {one.label} in a load")

    def _finish(self, manager: KVStoreManager, name: str, how: str) -> None:
        who, _ = self._requests.pop(name)
        manager.on_request_finished(who)
        if how != "done":
            self.world.act("scheduler request", how)
