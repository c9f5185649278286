"""A world around the core: rows and slots with contents, a server, a faulty engine.

The world performs moves the way an engine would, in any order, late or never,
with blocks that fail, and checks after each act the promises that the core
makes. It is driven by a seeded generator or by hypothesis.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvstore.core import Core, HostPool, TierDirectory
from kvstore.core.chunk import FILLING, READY
from kvstore.types import Completion, Move, Op, TierOpening
from policies import create_policy

GARBAGE = b"garbage"


def chain(prompt: int, length: int) -> list[bytes]:
    """Keys of a prompt: prompts share prefixes as numbers share high bits."""
    return [
        f"{prompt >> max(0, 6 - depth // 2):04x}-{depth:04d}".encode() + b"\0\0\0\0"
        for depth in range(length)
    ]


@dataclass
class Client:
    """One request of the server."""

    id: str
    keys: list[bytes]
    state: str = "asking"
    first_none: float | None = None
    loaded: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)


class World:
    def __init__(
        self,
        rows: int = 12,
        slots: int = 24,
        segment_slots: int = 8,
        tiers: int = 1,
        policy: str = "lru",
        deadline: float = 1.0,
        ceiling: float = 5.0,
        lease: float = 3.0,
    ) -> None:
        self.rows = [GARBAGE] * rows
        self.row_owner: list[object | None] = [None] * rows
        self.slots = [[GARBAGE] * slots for _ in range(tiers)]
        self.max_slots = slots
        self.segment_slots = segment_slots
        directories = [
            TierDirectory(
                index,
                TierOpening(f"t{index}", "disk", [], segment_slots, [0], slots // segment_slots),
                create_policy(policy, slots),
                max_rows_in_flight=rows,
            )
            for index in range(tiers)
        ]
        self.core = Core(
            HostPool(rows, create_policy(policy, rows)),
            directories,
            deadline=deadline,
            ceiling=ceiling,
            lease=lease,
        )
        self.now = 0.0
        self.moves: list[Move] = []
        self.done: list[Completion] = []
        self.clients: dict[str, Client] = {}
        self.next_client = 0
        self.polled = False
        self.hits_this_step: set[bytes] = set()
        self.core.poll(self.now)

    # -- acts ----------------------------------------------------------------------

    def arrive(self, prompt: int, length: int) -> Client:
        client = Client(f"r{self.next_client}", chain(prompt, length))
        self.next_client += 1
        self.clients[client.id] = client
        self.core.on_new_request(client.id)
        return client

    def step(self, seconds: float) -> None:
        """The edge between two steps."""
        self.now += seconds
        for move in self.core.flush(self.now):
            self._start(move)
        done, self.done = self.done, []
        self.core.poll(self.now, done)
        self.hits_this_step.clear()

    def ask(self, client: Client) -> int | None:
        """Look the client's prefix up; on an answer, load what is there."""
        answer = self.core.lookup_prefix(client.keys, client.id)
        if answer is None:
            if client.first_none is None:
                client.first_none = self.now
            waited = self.now - client.first_none
            limit = self.core.line.ceiling + self.core.line.deadline
            assert waited <= limit + 3.0, f"{client} defers for {waited} s"
            return None
        client.first_none = None
        self.hits_this_step.update(client.keys[:answer])
        return answer

    def load(self, client: Client, count: int) -> None:
        keys = client.keys[:count]
        client.rows = self.core.prepare_load(keys, client.id)
        client.loaded = keys
        client.state = "loading"
        for key, row in zip(keys, client.rows, strict=True):
            assert self.rows[row] == key, f"row {row} holds {self.rows[row]!r}, not {key!r}"

    def finish_load(self, client: Client) -> None:
        for key, row in zip(client.loaded, client.rows, strict=True):
            assert self.rows[row] == key, f"row {row} was rewritten while it was read"
        self.core.complete_load(set(client.loaded), client.id)
        client.state = "computing"

    def store(self, client: Client) -> None:
        grant = self.core.prepare_store(client.keys, client.id)
        if grant is None:
            return
        expected = [key for key in client.keys if key in set(grant.keys)]
        assert grant.keys == expected, "a store is granted in prefix order"
        for row in grant.rows:
            assert self.row_owner[row] is None, f"row {row} is in use by {self.row_owner[row]}"
            self.row_owner[row] = client.id
            self.rows[row] = GARBAGE
        client.stored, client.rows = grant.keys, grant.rows
        client.state = "storing" if grant.keys else "done"

    def finish_store(self, client: Client, ok: bool) -> None:
        for key, row in zip(client.stored, client.rows, strict=True):
            assert self.row_owner[row] == client.id
            self.row_owner[row] = None
            if ok:
                self.rows[row] = key
        self.core.complete_store(set(client.stored), client.id, ok)
        client.state = "done"

    def leave(self, client: Client) -> None:
        self.core.on_request_finished(client.id)
        if client.state in ("asking", "computing", "done"):
            del self.clients[client.id]

    def complete(self, index: int, failures: set[int], late: bool = False) -> None:
        """The engine ends a move; `failures` are positions that failed."""
        move = self.moves.pop(index)
        slots = self.slots[move.tier]
        ok = [position not in failures for position in range(len(move.keys))]
        segments: list[int] = []
        if move.op is Op.GROW and not failures:
            used = self.core.tiers[move.tier].segments
            segments = [used]
        elif move.op is Op.CLEAR:
            segments = list(range(self.core.tiers[move.tier].segments))
            for slot in range(self.max_slots):
                slots[slot] = GARBAGE
        for position, (key, row, slot) in enumerate(
            zip(move.keys, move.rows, move.slots, strict=True)
        ):
            if move.op is Op.PROMOTE:
                assert self.row_owner[row] == ("move", move.id)
                self.row_owner[row] = None
                if slots[slot] != key:
                    ok[position] = False
                self.rows[row] = key if ok[position] else GARBAGE
            else:
                slots[slot] = self.rows[row] if ok[position] else GARBAGE
                assert not ok[position] or slots[slot] == key, "a row changed while it was copied"
        self.done.append(Completion(move.id, ok, segments, "injected" if failures else None))

    def reset(self) -> None:
        """As a server does it: with no transfer between device and host under way."""
        if any(c.state in ("loading", "storing") for c in self.clients.values()):
            return
        self.core.reset()
        self.hits_this_step.clear()
        for client in self.clients.values():
            client.state, client.first_none = "asking", None

    # -- checks ----------------------------------------------------------------------

    def check(self) -> None:
        core, pool = self.core, self.core.pool
        used = [chunk.row for chunk in pool.chunks.values()]
        assert len(set(used)) == len(used), "two chunks in one row"
        assert len(used) + pool.free + pool.held == pool.rows, "rows leaked or over budget"
        assert len(pool.policy) == len(pool.chunks)
        busy = 0
        for key, chunk in pool.chunks.items():
            assert chunk.key == key
            assert chunk.status >= FILLING
            busy += chunk.status != READY
            if chunk.status >= READY:
                assert self.rows[chunk.row] == key, "a ready chunk without its bytes"
                assert chunk.waiters is None
        assert busy == pool.busy
        for key in self.hits_this_step:
            chunk = pool.chunks.get(key)
            assert chunk is not None and chunk.status >= READY, "a hit left within its step"
        for tier in core.tiers:
            slots = [*tier.entries.values(), *tier.writing.values()]
            assert len(set(slots)) == len(slots), "two keys in one slot"
            assert all(0 <= slot < self.max_slots for slot in slots), "over the disk budget"
            assert len(tier.policy) == len(tier.entries)
            if not tier.clearing:
                ready = tier.segments * self.segment_slots
                assert len(slots) + tier.free == ready, "slots leaked"
            assert tier.rows_in_flight <= tier.max_rows_in_flight + sum(
                len(move.rows) for move, _ in tier.in_flight.values() if move.op is Op.PROMOTE
            )
        for request in core.line.waiting.values():
            assert request.pending == sum(c.status == FILLING for c in request.leases.values())

    def settle(self) -> None:
        """Everybody goes home, the engine ends all: nothing may stay pinned or waiting."""
        for client in list(self.clients.values()):
            if client.state == "loading":
                self.finish_load(client)
            elif client.state == "storing":
                self.finish_store(client, True)
            self.leave(client)
        for _ in range(200):
            while self.moves:
                self.complete(0, set())
            self.step(10 * self.core.line.lease + 1)
            if not self.moves and not self.done:
                break
        self.check()
        assert self.core.in_flight == 0
        assert self.core.waiting == 0
        assert self.core.pool.busy == 0, "a pin leaked"
        assert self.core.pool.held == 0
        assert not self.core._requests, "a request was never forgotten"

    def _start(self, move: Move) -> None:
        for key, row in zip(move.keys, move.rows, strict=True):
            owner = self.row_owner[row]
            assert owner is None, f"row {row} is in use by {owner}"
            if move.op is Op.PROMOTE:
                self.row_owner[row] = ("move", move.id)
                self.rows[row] = GARBAGE
            else:
                assert self.rows[row] == key, "a copy of bytes that are not the key's"
        self.moves.append(move)


def random_act(world: World, rng: random.Random) -> None:
    """One act of the server, the engine or the clock, followed by the checks."""
    roll = rng.random()
    clients = list(world.clients.values())
    if roll < 0.06 and len(clients) < 8:
        world.arrive(rng.randrange(64), rng.randrange(1, 2 * len(world.rows)))
    elif roll < 0.55 and clients:
        act_of_client(world, rng.choice(clients), rng)
    elif roll < 0.75 and world.moves:
        index = rng.randrange(len(world.moves))
        size = len(world.moves[index].keys)
        failures: set[int] = set()
        if rng.random() < 0.1:
            failures = {p for p in range(max(size, 1)) if rng.random() < 0.5}
        world.complete(index, failures)
    elif roll < 0.7505:
        world.reset()
    else:
        world.step(rng.choice((0.0, 0.001, 0.01, 0.1, 1.0)))


def act_of_client(world: World, client: Client, rng: random.Random) -> None:
    """What a server might do next with this request."""
    roll = rng.random()
    if client.state == "asking":
        answer = world.ask(client)
        if answer and roll < 0.8:
            world.load(client, answer)
        elif answer == 0 and roll < 0.8:
            client.state = "computing"
        elif roll > 0.97:
            world.leave(client)
    elif client.state == "loading":
        world.finish_load(client)
    elif client.state == "computing":
        if roll < 0.8:
            world.store(client)
        else:
            world.leave(client)
    elif client.state == "storing":
        world.finish_store(client, ok=roll < 0.95)
    else:
        world.leave(client)
