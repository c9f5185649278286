"""World: servers, operators and an enemy over one disk, under one seed, and a model that judges."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import hashlib
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

import kvstore
from kvstore import plugins
from kvstore.config import Config
from kvstore.control.commands import Commands
from kvstore.core.statistics import Ages
from kvstore.engine.engine import Engine
from kvstore.errors import KVStoreError, LaneBusyError, PathUnusableError
from kvstore.gate import Gate
from kvstore.maintenance.bundle import export_bundle, import_bundle
from kvstore.maintenance.offline import compact, purge
from kvstore.maintenance.survey import Progress, survey, verify
from kvstore.policies.shares import tenant_keys
from kvstore.tiers import Tier
from kvstore.tiers.codec import CODECS, DTYPES, GROUP_BYTES, Codec
from kvstore.tiers.disk.peers import PeerLanes
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.volume import Volume
from kvstore.tiers.disk.watch import Watch
from kvstore.tiers.keys import id_of
from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.record import RECORD_BYTES
from kvstore.tiers.remote.sweeper import PARTS
from kvstore.tools.upkeep import run_gc
from kvstore.types import Completion, Move, Op
from tests.world.files import PAGE, Damage, Files
from tests.world.kernel import DeadlockError, Kernel, Loop, Process
from tests.world.machine import alive
from tests.world.share import SERVERS, ShareServer, ShareTier

__all__ = ["ACTS", "BrokenError", "World"]

_Act = TypeVar("_Act")

CHUNK = PAGE
DISK = Path("/sim/kv")

ACTS = (
    "put", "get", "get_into", "look", "prefetch", "pin", "demote", "remove", "flush", "reset",
    "windows", "control", "heal", "kill", "end", "freeze", "operate", "trouble", "relieve", "jump",
    "rot", "litter", "net", "cut_power", "remove_old",
)  # fmt: skip
"""The names of all acts that a world can do without."""

NET_TROUBLES = ("away", "frozen", "lost", "delay", "later", "amnesia", "rot")
"""What happens to stores."""

MOST_SECONDS, MOST_SWITCHES = 600.0, 2_000_000
"""In so many seconds of the world, and switches of threads, something is done."""

NOTHING_TO_DO = (
    "no namespace", "no kvstore namespace", "no chunk to export", "reset meanwhile",
    "is of other weights",
)  # fmt: skip
"""What operators may be told where nothing is wrong."""

SECRETS: list[bytes] = []
"""The keys of this world's servers, the newest first, where chunks are encrypted."""

KEYS = f"{__name__}:secrets"

STORY = 400
"""Acts that are kept to be told when a seed fails."""


def secrets() -> dict[str, list[bytes]]:
    """What a key management service tells."""
    return {"*": SECRETS}


class BrokenError(AssertionError):
    """A promise was broken."""


class World:
    """One seed.

    Args:
        without: acts that nobody does, by their names: "reset", "kill", "rot" and so on.
        often: acts that are done ten times as often.
        only: the one kind of trouble that there is; by default the seed says.
        shape: attributes that the seed does not decide: "server", "roomy" and so on.

    Attributes:
        acts: how many there were.
        labels: by namespace and epoch, the label of the weights of its servers.
        generation: which namespace new servers use. Where there is a store, a server that starts
            after a reset has to have another identity: see stores.md.
        removed: keys that no process finds until they are put again.
        stored: keys that are promised to be found, with their label; see `Server._put`.
    """

    def __init__(
        self,
        seed: int,
        without: Collection[str] = (),
        *,
        often: Collection[str] = (),
        only: str | None = None,
        shape: Mapping[str, bool] = {},
    ) -> None:
        # Imported before anything is replaced: what it imports would keep the replacements.
        from tests.world.scheduler import Scheduler

        self.scheduler: type[Server] = Scheduler
        self.seed = seed
        self.without, self.often = frozenset(without), frozenset(often)
        self.rng = rng = random.Random(seed)
        self.kernel = Kernel(rng)
        self.files = Files(self.kernel, rng)
        self.files.on_rename = self._renamed
        self.acts = 0
        self.skew = 0.0
        self.labels: dict[tuple[int, int, int], int] = {}
        self.fleeting: set[tuple[int, int, int]] = set()
        """Those of `labels` that are not durable."""
        self._moved_by: dict[tuple[int, int, int], Process] = {}
        self.next_label = 0
        self.generation = 0
        self.stored: dict[bytes, int] = {}
        self.removed: set[bytes] = set()
        self.puts: dict[bytes, int] = {}
        # By process and key.
        self._uses: Counter[tuple[int, bytes]] = Counter()
        self._writes: Counter[tuple[int, bytes]] = Counter()
        self.hurt = self.littered = False
        """Bytes on disk were damaged by other hands than those of a server."""
        self.story: deque[str] = deque(maxlen=STORY)
        self._moved = (self.kernel.now, 0)
        self.counts: dict[str, int] = {}

        def likely(name: str, chance: float) -> bool:
            return shape.get(name, rng.random() < chance)

        self.slots = rng.choice([1, 1, 2, 3])
        if shape.get("alone"):
            self.slots = 1
        self.servers: list[Server | None] = [None] * self.slots
        self.roomy = likely("roomy", 0.4)
        self.share = likely("share", 0.8)
        self.server = ShareServer(rng) if likely("server", 0.35) else None
        self.hosts = self.server is not None and likely("hosts", 0.5)
        """Each server has a disk of its own."""
        self.alone = self.slots == 1 and self.server is None and likely("alone", 0.8)
        """One server at a time, always with the same lane."""
        self.prompts = rng.randrange(3, 12)
        self.depth = rng.randrange(2, 14)
        self.slots_of_segment = per = rng.randrange(3, 12)
        segment = 4096 + -(-per * 128 // 4096) * 4096 + per * CHUNK
        most = self.prompts * self.depth
        segments = -(-2 * most // per) + 3 if self.roomy else rng.randrange(2, 8)
        self.segment_bytes, self.capacity = segment, segment * segments
        self.disk: dict[str, Any] = {
            "type": "disk",
            "lane": 0 if self.alone else None,
            "capacity_bytes": self.capacity,
            "segment_bytes": segment,
            "io": rng.choice(["buffered", "direct"]),
            "io_threads": rng.choice([1, 2, 4]),
            "share": self.share,
            "flow": "write-through"
            if self.roomy
            else rng.choice(["write-through", "write-through", "demote", "exclusive"]),
            "eviction_policy": rng.choice(["lru", "arc", "sieve", "s3-fifo", "hit-density"]),
            "compaction_rate": rng.choice([0, 0, "1MiB"]),
        }
        self.config: dict[str, Any] = {
            "chunk_bytes": CHUNK,
            "cpu_bytes_to_use": CHUNK * rng.randrange(4, 40),
            "deadline_s": rng.choice([0.2, 1.0, 5.0]),
            "lease_s": 5.0,
        }
        # Dice of their own: the worlds of a seed are those of before.
        aside = random.Random(seed)
        if shape.get("tenants", aside.random() < 0.25):
            self.config["tenants"] = {
                "tenant-0": {"guaranteed": 0.3, "weight": 2.0},
                "tenant-1": {"guaranteed": 0.2, "maximal": 0.5},
            }
        self.encrypted = shape.get("encrypted", aside.random() < 0.25)
        if self.encrypted:
            SECRETS[:] = [aside.randbytes(32)]
            self.config["encryption_keys"] = KEYS
        self.codec: Codec | None = None
        if shape.get("coded", aside.random() < 0.25):
            self.codec = Codec(aside.choice(DTYPES))
            # A file that is there; what is in it, `read_gate` tells.
            self.config["disk_codec"] = __file__
        self.bound = 0
        """Chunks that the store of a model may hold; 0 if there is no limit."""
        if self.server is not None:
            SERVERS["share"] = self.server
            if self.codec is not None and aside.random() < 0.5:
                self.config["store_codec"] = __file__
            if shape.get("bound", aside.random() < 0.5):
                self.bound = aside.randrange(PARTS, 3 * PARTS)
        self.enemy: Enemy
        self.schedulers = rng.choice([0.0, 0.3, 1.0])
        """How many of the servers are driven as vLLM drives them."""
        self.bundles: dict[Path, int] = {}
        """Files that operators have exported, and the label of what is in them."""
        self.printed: dict[int, Any] = {}
        """By process, what a command has told in JSON."""
        self.importing: dict[int, tuple[int, int]] = {}
        """By process, whose disk it imports to, and chunks of which label."""
        self.inline = rng.choice([0, 2 * CHUNK, 256 * 1024])
        """Copies up to this size are made without a thread."""
        some = ("bad", "descriptors", "lock", "list", "threads", "short", "rot")
        self.only = only or (rng.choice(some) if rng.random() < 0.33 else None)
        """The one kind of trouble that there is in this world."""
        self.calm = self.only is None and likely("calm", 0.25)
        """Nothing goes wrong in this world but kills."""

    # -- what others tell --------------------------------------------------------------------

    def content(self, key: bytes, label: int) -> bytes:
        """The bytes of a key for a server whose weights have this label."""
        numbers = hashlib.blake2b(key + b"@%d" % label).digest()
        if self.codec is not None:
            # Numbers from 1 to 2, as the codec leaves them.
            mixed = np.frombuffer(2 * numbers, np.uint16) & 0x7F | 0x3F80
            memory, coded = (
                memoryview(bytearray(mixed.tobytes())),
                memoryview(bytearray(GROUP_BYTES)),
            )
            self.codec.encode(memory, coded)
            memory[:] = coded
            self.codec.decode(memory, len(memory))
            numbers = bytes(memory)
        return numbers * (CHUNK // len(numbers))

    def _gate(self, path: Path) -> Gate:
        assert self.codec is not None
        return Gate(CODECS[0], self.codec.dtype, {"model": "sim"}, {})

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        thread = self.kernel.current
        who = "world" if thread is None else str(thread.process)
        self.story.append(f"{self.kernel.now - 1000:10.4f} {who}: {text}")

    def act(self, name: str, text: str = "") -> None:
        """Count an act."""
        if self.kernel.over:
            return
        self.acts += 1
        self._moved = (self.kernel.now, self.kernel.switches)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.tell(f"{name} {text}")

    def server_of(self, slot: int) -> Server:
        """Start a server of one kind or the other."""
        kind = self.scheduler if self.rng.random() < self.schedulers else Server
        return kind(self, slot)

    def chosen(self, acts: Mapping[_Act, float]) -> tuple[list[_Act], list[float]]:
        """Acts and their weights, without those that this world does without."""
        kept = {
            act: weight * (10 if name in self.often else 1)
            for act, weight in acts.items()
            if (name := getattr(act, "__name__", "").strip("_")) not in self.without
        }
        return list(kept), list(kept.values())

    def keys(self, prompt: int) -> list[bytes]:
        """The keys of a prompt, in order."""
        keys = [b"prompt-%03d-%03d" % (prompt, at) for at in range(self.depth)]
        if "tenants" in self.config:
            public, own = "public", f"tenant-{prompt % 4}"
            keys = tenant_keys(public, keys[: prompt % 3]) + tenant_keys(own, keys[prompt % 3 :])
        self._uses.update((self.kernel.process.pid, key) for key in keys)
        return keys

    def _count_writes(self, keys: Sequence[bytes]) -> None:
        """A process writes a chunk to its tiers when it was used, and not for ever."""
        pid = self.kernel.process.pid
        self._writes.update((pid, key) for key in keys)
        for key in keys:
            writes, uses = self._writes[pid, key], self._uses[pid, key]
            if writes > 8 + 2 * uses:
                raise BrokenError(f"{key!r} was used {uses} times and written {writes} times")

    def disk_of(self, slot: int) -> Path:
        """Where a server has its disk tier."""
        return Path(f"{DISK}-{slot}") if self.hosts else DISK

    def config_of(self, slot: int) -> dict[str, Any]:
        """The configuration of a server that starts now."""
        tiers: list[dict[str, Any]] = [{**self.disk, "path": self.disk_of(slot)}]
        if not self.roomy and self.rng.random() < (0.7 if self.only == "descriptors" else 0.3):
            most = self.capacity // self.segment_bytes
            tiers[0]["capacity_bytes"] = self.segment_bytes * self.rng.randrange(1, most + 1)
        if self.server is not None:
            size = CHUNK
            if self.codec is not None and "store_codec" in self.config:
                size = self.codec.coded_bytes(CHUNK)
            capacity = self.bound * (size + RECORD_BYTES)
            tiers.append({"type": "simulated", "url": "share", "capacity_bytes": capacity})
        identity = {"model": "sim", "generation": self.generation}
        return {**self.config, "identity": identity, "tiers": tiers}

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Expect these keys no more; None: none at all."""
        if keys is None:
            self.stored.clear()
            self.removed.clear()
        else:
            for key in keys:
                self.stored.pop(key, None)

    def puts_of(self, keys: Sequence[bytes]) -> dict[bytes, int | None]:
        """How often each of these keys has been put."""
        return {key: self.puts.get(key) for key in keys}

    def are_put(self, keys: Sequence[bytes]) -> None:
        """Expect that these may be found, from before they are put."""
        for key in keys:
            self.puts[key] = self.puts.get(key, 0) + 1
        self.removed.difference_update(keys)

    def are_removed(self, before: Mapping[bytes, int | None]) -> None:
        """Expect that no process finds these keys, but those put since `before`."""
        self.removed.update(key for key, puts in before.items() if self.puts.get(key) == puts)

    @property
    def troubled(self) -> bool:
        """Whether calls of the file system may fail at present."""
        away = self.server is not None and self.server.present
        failing = self.files.damage.present or self.files.size < 1 << 40
        return away or failing or bool(self.kernel.threads_fail)

    @property
    def misses_descriptors(self) -> bool:
        """Whether nothing but a lack of descriptors makes calls fail at present."""
        fails = self.files.damage.fails
        alone = len(fails) == 1 and fails.get("open", (0.0, 0))[1] == errno.EMFILE
        return alone and not self.files.damage.bad and self.files.size == 1 << 40

    @property
    def wears_out(self) -> bool:
        """Whether nothing but bad blocks makes calls fail at present."""
        damage = self.files.damage
        away = self.server is not None and self.server.present
        return bool(damage.bad) and not (
            damage.fails or away or self.hurt or self.kernel.threads_fail
        )

    def happened(self, *acts: str) -> list[int]:
        """How often there was each of these acts."""
        return [self.counts.get(act, 0) for act in acts]

    def lane_bytes(self) -> dict[str, int]:
        """The size of the segments of each lane, by its folder."""
        lanes: dict[str, int] = {}
        for path, inode in self.files.walk():
            if path.endswith(".safetensors"):
                lane = path.rpartition("/")[0]
                lanes[lane] = lanes.get(lane, 0) + len(inode.data)
        return lanes

    def label_of(self, generation: int, slot: int, epoch: int) -> int | None:
        """The weights of an epoch of a disk; None if nobody has opened it since."""
        return self.labels.get((generation, slot if self.hosts and epoch else 0, epoch))

    def _open_for_import(self, config: Config) -> kvstore.SyncStore:
        """Operators import what is of the weights that the servers have by then."""
        slot, label = self.importing.pop(self.kernel.process.pid)
        store = kvstore.open_sync(config)
        (disk, *_) = store._running.store._assembly.tiers
        assert isinstance(disk, DiskTier)
        if self.label_of((config.identity or {})["generation"], slot, disk.epoch) != label:
            store.close()
            raise KVStoreError("the bundle is of other weights")
        return store

    def _print(self, report: Any) -> None:
        self.printed[self.kernel.process.pid] = report

    def place(self, server: Server, epoch: int) -> tuple[int, int, int]:
        """What servers have in common that share chunks."""
        return (server.generation, server.slot if self.hosts and epoch else 0, epoch)

    def entered(self, epoch: int) -> None:
        """A server has moved its disk to another epoch, for the weights that it has now."""
        process = self.kernel.process
        for one in self.servers:
            if one is not None and one.process is process:
                other = self.labels.setdefault(self.place(one, epoch), one.label)
                self.fleeting.discard(self.place(one, epoch))
                # One that was reset again since it moved the epoch moves it again.
                moved = self._moved_by.get(self.place(one, epoch))
                if other != one.label and moved is not process:
                    raise BrokenError(f"epoch {epoch} is of weights {other} and of {one.label}")

    def standing_epochs(self) -> dict[tuple[int, int], int]:
        """The epoch of each namespace on disk, by its generation and slot."""
        there = {path: bytes(inode.data) for path, inode in self.files.walk()}
        found = {}
        for path, data in there.items():
            folder, _, name = path.rpartition("/")
            described = there.get(f"{folder}/namespace.json")
            if name == "epoch" and described and data.strip().isdigit():
                with contextlib.suppress(ValueError, KeyError):
                    generation = int(json.loads(described)["identity"]["generation"])
                    slot = int(folder.split("/")[2].rpartition("-")[2]) if self.hosts else 0
                    found[generation, slot] = int(data)
        return found

    def _renamed(self, target: str, data: bytes) -> None:
        """Who opens the disk from now on joins the epoch that was moved, of whoever moved it."""
        if target.endswith("/epoch"):
            before = set(self.labels)
            self.entered(int(data))
            # Until it is durable, a power cut takes it back.
            new = self.labels.keys() - before
            self.fleeting |= new
            self._moved_by.update(dict.fromkeys(new, self.kernel.process))

    # -- the course of it --------------------------------------------------------------------

    def run(self, acts: int) -> None:
        """Let everybody act.

        Raises:
            AssertionError: if a promise was broken, with the seed and the last acts.
        """
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(
                alive(self.kernel, self.files, self.rng, lambda: self.skew, self.servers.clear)
            )
            enter = Volume.enter_epoch

            def enter_epoch(volume: Volume, epoch: int) -> None:
                self.entered(epoch)
                enter(volume, epoch)

            kinds = plugins._kinds.classes
            stack.enter_context(patch.dict(kinds, {ShareTier.name: ShareTier}))
            leave = Ages.leave

            def evicted(ages: Ages, keys: Sequence[bytes]) -> None:
                # Where a disk cannot grow at present, new chunks displace old ones.
                self.forget(keys)
                leave(ages, keys)

            perform = Engine._perform

            async def performed(engine: Engine, move: Move) -> Completion:
                if move.op is Op.CASCADE:
                    self._count_writes(move.keys)
                return await perform(engine, move)

            stack.enter_context(patch.object(Engine, "_perform", performed))
            stack.enter_context(patch.object(Volume, "enter_epoch", enter_epoch))
            stack.enter_context(patch("kvstore.assembly.control_of", _controlled))
            stack.enter_context(patch("kvstore.gate.read_gate", self._gate))
            stack.enter_context(patch.object(Ages, "leave", evicted))
            stack.enter_context(patch("kvstore.api.put.COPY_INLINE_BYTES", self.inline))
            stack.enter_context(patch("kvstore.api.sync._RUNNING", set()))
            stack.enter_context(
                patch("kvstore.maintenance.bundle.open_sync", self._open_for_import)
            )
            stack.enter_context(patch("kvstore.maintenance.bundle.HOST_BYTES", 8 * CHUNK))
            stack.enter_context(patch("kvstore.tools.upkeep.print_json", self._print))
            self.kernel.on_exit = self.files.leave_process
            listener.tell = self.tell
            try:
                enemy = self.enemy = Enemy(self)
                process = self.kernel.spawn("enemy", enemy.main)
                process.name = "enemy"
                self._until(lambda: self.acts >= acts)
                enemy.stop = True
                self._until(lambda: not enemy.living)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise BrokenError(
                    f"seed {self.seed}, act {self.acts}: {type(error).__name__}: {error}"
                ) from error

    def left_open(self, process: Process) -> list[int]:
        """The files that a process has open, but for those that garbage alone refers to."""
        for generation in range(3):
            if not self.files.fds_of(process):
                break
            # What an error refers to may be part of a cycle, a young one mostly.
            gc.collect(generation)
        return self.files.fds_of(process)

    def _until(self, done: Callable[[], bool]) -> None:
        def watched() -> bool:
            seconds = self.kernel.now - self._moved[0]
            if seconds > MOST_SECONDS or self.kernel.switches - self._moved[1] > MOST_SWITCHES:
                raise BrokenError(
                    f"nothing was done in {seconds:.0f} s, "
                    f"{self.kernel.switches - self._moved[1]} switches of threads"
                )
            return done()

        self._moved = (self.kernel.now, self.kernel.switches)
        self.kernel.run(watched)
        if not done():
            raise DeadlockError("nobody can go on")


LOOK_SECONDS = 60
"""Seconds in which a process finds what others hold, although files cannot be opened at times."""


class Server:
    """A process with a store, and clients that use it."""

    store: kvstore.Store

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot = world, slot
        self.label = -1
        self.generation = world.generation
        self.stopping = False
        self.resets = self.resetting = self.sizes = 0
        """How often it was reset, and its disk got another size."""
        self.sizing = 0
        """Commands under way that give its disk another size."""
        self.opened = False
        self.expected: dict[bytes, int] = {}
        world.servers[slot] = self
        self.process: Process = world.kernel.spawn(f"server-{slot}", self.main)

    def main(self) -> None:
        Loop().run_until_complete(self.serve())
        # Nothing refers to it any more, as at the end of a process.
        self.__dict__.pop("store", None)
        self._gone()

    def _gone(self) -> None:
        """The process ends: nothing may be open any more."""
        self.world.servers[self.slot] = None
        left = self.world.left_open(self.process)
        if left:
            paths = sorted({self.world.files._fds[fd].path for fd in left})
            raise BrokenError(f"{len(left)} files are left open after the end: {paths}")

    async def serve(self) -> None:
        world = self.world
        troubled, lacks = world.troubled, world.misses_descriptors
        fine = not troubled or lacks
        before, config = world.happened("trouble", "relieve"), world.config_of(self.slot)
        try:
            store = await kvstore.open(config)
        except KVStoreError as error:
            world.act("not opened", str(error))
            busy = isinstance(error, LaneBusyError) and world.alone
            if not (busy or troubled or world.troubled or world.hurt):
                raise
            return
        self.store = store
        self._hear_resets()
        if fine and before == world.happened("trouble", "relieve"):
            self._check_size(config["tiers"][0]["capacity_bytes"])
        epoch = self._epoch()
        if not self._learn_label(epoch):
            await store.close()
            world.act("closed", "its weights are old")
            return
        self.opened = True
        world.act("opened", f"epoch {epoch}, label {self.label}: {store.description}")
        if world.roomy and world.share and not world.hosts:
            await self._check_stored(LOOK_SECONDS if lacks or world.misses_descriptors else 0)
        if world.alone and not world.hurt:
            back = [key for key in world.removed if store.contains([key]) == [True]]
            if back:
                raise BrokenError(f"chunks that were removed are there again: {back}")
        clients = [
            asyncio.ensure_future(self._client()) for _ in range(world.rng.choice([1, 2, 4]))
        ]
        try:
            while not self.stopping:
                done, _ = await asyncio.wait(clients, timeout=0.5)
                for one in done:
                    one.result()
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await self._commands().end()
            await store.close()
        world.act("closed")

    def _learn_label(self, epoch: int) -> bool:
        """A process that starts has the weights of the epoch that it joins.

        Returns:
            False if its weights are older: there was a reset while it started, and with a store
            other weights are another identity.
        """
        world = self.world
        if world.server is not None and epoch:
            return False
        place = world.place(self, epoch)
        if place not in world.labels:
            world.labels[place], world.next_label = world.next_label, world.next_label + 1
        self.label = world.labels[place]
        return True

    @property
    def _tier(self) -> DiskTier:
        (disk, *_) = self.store._assembly.tiers
        assert isinstance(disk, DiskTier)
        return disk

    def _epoch(self) -> int:
        return self._tier.epoch

    def _check_size(self, capacity: int) -> None:
        """Its lane keeps within a capacity that was lowered, but for files that are damaged."""
        if not self.world.hurt:
            lane = str(self._tier.volumes[0].lane.folder)
            size = self.world.lane_bytes().get(lane, 0)
            if size > capacity:
                raise BrokenError(f"{lane} has {size} bytes of the {capacity} that it may have")

    async def _check_stored(self, seconds: float) -> None:
        """What was promised to be on disk is found by a process that opens it.

        Where files cannot be opened for lack of descriptors, the first look at the lanes of other
        processes may miss some. Later ones find them.

        Args:
            seconds: how long they may take for that.
        """
        world, epoch, label = self.world, self._epoch(), self.label
        until = world.kernel.now + seconds
        while self._epoch() == epoch and self.label == label:
            kept = [key for key, its in world.stored.items() if its == label]
            there = self.store.contains(kept)
            lost = [key for key, held in zip(kept, there, strict=True) if not held]
            if not lost:
                return
            if world.kernel.now >= until:
                raise BrokenError(
                    f"{len(lost)} of {len(kept)} chunks are gone that were durable: {lost[:3]}"
                )
            await asyncio.sleep(1)

    async def _client(self) -> None:
        world, rng = self.world, self.world.rng
        acts = {
            self._put: 30.0, self._get: 30, self._get_into: 10, self._look: 15, self._prefetch: 3,
            self._pin: 3, self._demote: 3, self._remove: 2, self._flush: 2, self._reset: 0.4,
            self._windows: 3, self._control: 4, self._heal: 3,
        }  # fmt: skip
        names, weights = world.chosen(acts)
        while True:
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * rng.choice([0.001, 0.05, 1.0]))
            (one,) = rng.choices(names, weights)
            keys = world.keys(rng.randrange(world.prompts))
            keys = keys[: rng.randrange(1, len(keys) + 1)]
            troubled, troubles = world.troubled, world.counts.get("trouble")
            try:
                await one(keys)
            except TimeoutError:
                world.act("timeout", f"{one.__name__}: {len(keys)} from {keys[0]!r}")
            except KVStoreError as error:
                world.act("refused", f"{one.__name__}: {error}")
                troubled |= world.troubled or troubles != world.counts.get("trouble")
                if not self.stopping and not troubled and not world.hurt:
                    raise

    def _timeout(self) -> float | None:
        rng = self.world.rng
        return rng.choice([None, None, None, 0.01, 0.5, 5.0])

    def _check(self, keys: Sequence[bytes], found: Sequence[Any], label: int, call: str) -> None:
        for key, one in zip(keys, found, strict=False):
            if bytes(one) == self.world.content(key, label):
                continue
            whose = [
                f"{other!r} of label {its}"
                for its in range(self.world.next_label)
                for prompt in range(self.world.prompts)
                for other in self.world.keys(prompt)
                if bytes(one) == self.world.content(other, its)
            ]
            raise BrokenError(
                f"{call}: wrong bytes for {key!r} of label {label}: "
                f"{', '.join(whose) or repr(bytes(one)[:16])}"
            )

    # -- what a client does --------------------------------------------------------------------

    async def _put(self, keys: list[bytes]) -> None:
        world, label = self.world, self.label
        durable = world.rng.random() < (0.8 if world.wears_out else 0.4)
        wait = world.rng.random() < 0.8
        era, troubled = self.resets, world.troubled
        retired, knows = world.happened("retire"), self._knows_keys()
        data = [world.content(key, label) for key in keys]
        world.are_put(keys)
        done = await self.store.put(keys, data, durable=durable, wait=wait, timeout=self._timeout())
        world.act("put", f"{done} of {len(keys)} from {keys[0]!r}, durable {durable}, {label}")
        well = era == self.resets and not (troubled or world.troubled or world.hurt)
        if durable and well and knows and retired == world.happened("retire"):
            for key in keys[:done]:
                world.stored[key] = label
            self._perhaps_killed()
        # The end of a prompt that is larger than the disk, or than what it was set to, is not kept.
        if durable and wait and done < len(keys) and world.wears_out:
            await self._insist(keys[done if world.roomy and not self.sizes else 0])

    def _knows_keys(self) -> bool:
        """Whether it has forgotten what is under keys that were retired."""
        if not self.world.encrypted:
            return True
        tiers, core = self.store._assembly.tiers, self.store._core
        peers = [tier._known for tier in tiers if isinstance(tier, PeerLanes)]
        sealer = self._tier.sealer
        assert sealer is not None
        ring = sealer.keys
        followers: list[DiskTier | Watch] = [self._tier]
        followers += [watch for one in peers for watch in one.watches]
        looking = self._tier._unchecked or any(one.looks or one.places.changed for one in peers)
        return (
            ring.ids() == {id_of(secret) for secret in SECRETS}
            and all(one._keys_seen == ring.changes for one in followers)
            and not (looking or self.store._driver.engine.ended or core._ended or core._news)
        )

    async def _insist(self, key: bytes) -> None:
        """A few bad blocks keep a chunk from the others for a moment only."""
        world = self.world
        resets = self.resets
        for _ in range(10):
            await asyncio.sleep(1.0)
            world.are_put([key])
            done = await self.store.put([key], [world.content(key, self.label)], durable=True)
            world.act("put again", f"{done}, {key!r}")
            # While a lane becomes smaller, what it moves may meet the bad blocks, too.
            if done or self.resets != resets or self.sizing or not world.wears_out:
                return
        raise BrokenError(f"{len(world.files.damage.bad)} bad blocks keep {key!r} from the disk")

    def _perhaps_killed(self) -> None:
        """Now and then a process is killed just when it has promised something."""
        world = self.world
        if world.rng.random() < 0.03 and "kill" not in world.without:
            world.kernel.spawn("reaper", lambda: world.enemy.kill(self.process))

    async def _get(self, keys: list[bytes]) -> None:
        world = self.world
        async with self.store.get(keys, timeout=self._timeout()) as chunks:
            label = self.label
            found = [bytes(chunks[at]) for at in range(len(chunks))]
            self._check(keys, found, label, "get")
            if world.rng.random() < 0.3:
                await asyncio.sleep(world.rng.random())
                again = [bytes(chunks[at]) for at in range(len(chunks))]
                self._check(keys, again, label, "get, in a lease")
        world.act("get", f"{len(found)} of {len(keys)} from {keys[0]!r}, {label}")

    async def _get_into(self, keys: list[bytes]) -> None:
        buffers = [bytearray(CHUNK) for _ in keys]
        era, label = self.resets, self.label
        done = await self.store.get_into(keys, buffers, timeout=self._timeout())
        if era == self.resets:
            self._check(keys, buffers[:done], label, "get_into")
        self.world.act("get_into", f"{done} of {len(keys)}")

    async def _look(self, keys: list[bytes]) -> None:
        found = self.store.lookup_prefix(keys)
        self.world.act("lookup", f"{found} of {len(keys)} from {keys[0]!r}")
        begun = self.world.kernel.now
        while found is None:
            await asyncio.sleep(0.05)
            found = self.store.lookup_prefix(keys)
            waited = self.world.kernel.now - begun
            if waited > 120 and not self.world.troubled and not self.process.frozen_until:
                raise BrokenError(f"lookup has no answer after {waited:.0f} s")

    async def _prefetch(self, keys: list[bytes]) -> None:
        self.world.act("prefetch", str(self.store.prefetch(keys)))

    async def _pin(self, keys: list[bytes]) -> None:
        host = self.world.rng.random() < 0.5
        pinned = self.store.pin(keys, self.world.rng.random() * 20, host=host)
        self.world.act("pin", str(pinned))

    async def _demote(self, keys: list[bytes]) -> None:
        if self.world.rng.random() < 0.5:
            self.store.unpin(keys, cold=True)
        self.world.act("demote", str(self.store.demote(keys)))

    async def _remove(self, keys: list[bytes]) -> None:
        self.world.forget(keys)
        before, resets = self.world.puts_of(keys), self.resets - self.resetting
        try:
            done = await self.store.remove(keys, timeout=self._timeout())
        except KVStoreError as error:
            if resets == self.resets or "could not be erased" not in str(error):
                raise
            # A store has them under the names of before, by which this server asks no more.
            self.world.act("remove", f"{len(keys)} from {keys[0]!r}, and a reset meanwhile")
            return
        self.world.forget(keys)
        self.world.are_removed(before)
        self._perhaps_killed()
        self.world.act("remove", f"{done} of {len(keys)} from {keys[0]!r}")

    async def _flush(self, keys: list[bytes]) -> None:
        self.world.act("flush", str(await self.store.flush(self._timeout())))

    def _hear_resets(self) -> None:
        """What a control server resets is of other weights from then on, and not before."""
        commands = self._commands()
        forget = commands._reset

        def reset() -> None:
            assert forget is not None
            self._new_weights()
            forget()

        commands._reset = reset

    def _new_weights(self) -> int:
        """The server has other weights from now on; returns their label."""
        world = self.world
        self.resets += 1
        self.label, world.next_label = world.next_label, world.next_label + 1
        if world.server is not None:
            # What the store has is found again by whoever starts with the same identity, also
            # where the disk could not be cleared.
            world.generation = max(world.generation, self.generation + 1)
        return self.label

    async def _reset(self, keys: list[bytes]) -> None:
        world = self.world
        label = self._new_weights()
        world.act("reset", f"label {label} begins")
        self.resetting += 1
        try:
            await self.store.reset(self._timeout())
            self.resetting -= 1
        finally:
            # Also where the wait was given up: the reset itself goes on.
            world.tell(f"reset: label {label} ends")

    async def _heal(self, keys: list[bytes]) -> None:
        """A value of a store that was found damaged is replaced by the next write."""
        world, tier = self.world, self.store._assembly.tiers[-1]
        if not isinstance(tier, ShareTier):
            return
        if world.bound:
            await self._check_share(tier)
        every = [key for prompt in range(world.prompts) for key in world.keys(prompt)]
        damaged = [key for key in tier.damaged(every) if self.store.contains([key]) == [False]]
        if not damaged or world.troubled:
            return
        key = world.rng.choice(sorted(damaged))
        before = self.resets, world.happened("trouble", "net")
        if await self.store.resolve([key]) or not tier.met(key):
            return
        world.are_put([key])
        refused = self._refused()
        await self.store.put([key], [world.content(key, self.label)])
        there = self.store.contains([key]) == [True] and await self.store.flush()
        world.act("heal", repr(key))
        if (
            there
            and before == (self.resets, world.happened("trouble", "net"))
            and tier.damaged([key])
            and refused == self._refused()
            and not self.stopping
        ):
            raise BrokenError(f"the value of {key!r} was found damaged, put, and is damaged still")

    async def _check_share(self, tier: ShareTier) -> None:
        """A store that was swept has no more than it may, and what came since."""
        world, server = self.world, tier.server
        before, stored = world.happened("net", "relieve", "freeze"), server.stored
        well = not (server.present or server.delay)
        await tier.sweep()
        since, there = server.stored - stored, tier.held()
        world.tell(f"the store was swept: {there} chunks")
        if (
            well
            and before == world.happened("net", "relieve", "freeze")
            and there > world.bound - world.bound // PARTS + since
        ):
            raise BrokenError(f"a store of {world.bound} chunks has {there}, {since} of them new")

    def _refused(self) -> int:
        """Chunks that the last tier did not take, as it rests for a while after it has failed."""
        last = self.store.stats().tiers[-1]
        return last.refused + last.failed_writes

    async def _windows(self, keys: list[bytes]) -> None:
        count, era = 0, self.resets
        async with self.store.windows(keys, self.world.rng.randrange(1, 4)) as windows:
            async for chunks in windows:
                if era != self.resets:
                    break
                found = [bytes(chunks[at]) for at in range(len(chunks))]
                self._check(keys[count:], found, self.label, "windows")
                count += len(found)
        self.world.act("windows", f"{count} of {len(keys)}")

    def _commands(self) -> Commands:
        commands = self.store._assembly.commands
        assert commands is not None
        return commands

    async def _control(self, keys: list[bytes]) -> None:
        """What an operator asks a server for while it serves."""
        world, rng = self.world, self.world.rng
        command = rng.choice(["prefetch", "retain", "release", "demote", "remove", "settings"])
        if "reset" not in world.without and rng.random() < 0.03:
            command = "reset"
        if world.encrypted and rng.random() < 0.1:
            command = "reencrypt"
            if len(SECRETS) < 5:
                SECRETS.insert(0, rng.randbytes(32))
            if rng.random() < 0.3:
                del SECRETS[1:]
                world.act("retire")
                world.stored.clear()
        body: dict[str, Any] = {"keys": [key.hex() for key in keys]}
        if command == "retain":
            body |= {"seconds": rng.random() * 20, "host": rng.random() < 0.5}
        elif command == "settings":
            body = self._settings()
        elif command in ("reset", "reencrypt"):
            body = {}
        dry = rng.random() < 0.2
        if command == "remove" and not dry:
            world.forget(keys)
        capacity = body.get("tiers", {}).get("0", {}).get("capacity_bytes")
        sized = capacity is not None and not dry
        self.sizes += sized
        self.sizing += sized
        try:
            told = body | ({"dry_run": True} if dry else {})
            await self._carry_out(command, keys, told, capacity)
        finally:
            self.sizing -= sized

    async def _carry_out(
        self, command: str, keys: list[bytes], body: dict[str, Any], capacity: int | None
    ) -> None:
        world, rng = self.world, self.world.rng
        before = world.puts_of(keys)
        sizes, resets = self.sizes, self.resets
        try:
            told = await self._commands().run(command, body)
        except KVStoreError as error:
            if "does that already" not in str(error):
                raise
            told = {"refused": str(error)}
        job = self._commands().job(told.get("job", -1))
        if job is None:
            world.act("control", f"{command}: {told}")
            return
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random())
            job.cancel()
        begun = world.kernel.now
        while not job.ended.is_set():
            await asyncio.sleep(0.05)
            calm = not (world.troubled or self.process.frozen_until or world.hurt)
            if calm and world.kernel.now - begun > 120:
                raise BrokenError(f"a job does not end: {job.told()}")
        if command == "remove":
            world.forget(keys)
            if job.state == "done":
                world.are_removed(before)
        # Another client may have asked for another size meanwhile.
        latest = (sizes, resets) == (self.sizes, self.resets)
        if capacity is not None and job.state == "done" and latest:
            self._check_size(capacity)
        world.act("control", f"{command}: {job.told()}")

    def _settings(self) -> dict[str, Any]:
        """New settings of host memory, the disk, or both."""
        world, rng = self.world, self.world.rng
        policies = ["lru", "arc", "sieve", "s3-fifo", "hit-density"]
        host: dict[str, Any] = {}
        disk: dict[str, Any] = {}
        if rng.random() < 0.5:
            host["bytes"] = CHUNK * rng.randrange(1, world.config["cpu_bytes_to_use"] // CHUNK + 1)
        if rng.random() < 0.3:
            host["eviction_policy"] = rng.choice(policies)
        if rng.random() < 0.5:
            disk["capacity_bytes"] = rng.randrange(world.segment_bytes, world.capacity + 1)
        if rng.random() < 0.3:
            disk["eviction_policy"] = rng.choice(policies)
        if rng.random() < 0.3 or not (host or disk):
            disk["compaction_rate"] = rng.choice([0, "1MiB"])
        return {"host": host, "tiers": {"0": disk} if disk else {}}


def _controlled(
    config: Config, tiers: Sequence[Tier], region: PinnedRegion, description: str
) -> tuple[None, Commands]:
    """Every server takes the commands of a control server, which itself is not there."""
    return None, Commands(config, tiers, region.rows, region.row_bytes, description)


class Enemy:
    """Starts servers, kills them, and does to the disk what happens to disks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stop = False
        self.living = True

    def main(self) -> None:
        world, rng, kernel = self.world, self.world.rng, self.world.kernel
        sound = world.calm or world.only is not None
        of_net = world.only in NET_TROUBLES
        acts = {
            self._start: 30, self._kill: 6, self._end: 6, self._freeze: 3, self._operate: 8,
            self._trouble: 0 if world.calm or of_net else 5, self._relieve: 6, self._jump: 1,
            self._rot: 0 if sound else 1, self._litter: 0 if sound else 0.5,
            self._net: 0 if world.server is None or (sound and not of_net) else 5,
            self._cut_power: 0 if sound else 1.5, self._remove_old: 0.5 if world.server else 0,
        }  # fmt: skip
        names, weights = world.chosen(acts)
        self._start()
        while not self.stop:
            kernel.sleep(rng.random() * rng.choice([0.01, 0.2, 2.0]))
            (one,) = rng.choices(names, weights)
            one()
            self._check_sizes()
        self._finish()
        self.living = False

    def _living(self) -> list[Server]:
        return [one for one in self.world.servers if one is not None]

    def _start(self) -> None:
        world = self.world
        free = [slot for slot, one in enumerate(world.servers) if one is None]
        if free:
            slot = world.rng.choice(free)
            world.server_of(slot)
            world.act("start", f"server-{slot}")

    def _kill(self) -> None:
        world = self.world
        others = [one for one in world.kernel.processes if one.name != "enemy"]
        if others:
            self.kill(world.rng.choice(others))

    def kill(self, process: Process) -> None:
        """Kill a process, if it is still there."""
        world = self.world
        if not process.alive:
            return
        world.act("kill", str(process))
        world.kernel.kill(process)
        for slot, one in enumerate(world.servers):
            if one is not None and one.process is process:
                world.servers[slot] = None

    def _end(self) -> None:
        its = self._living()
        if its:
            self.world.rng.choice(its).stopping = True

    def _freeze(self) -> None:
        world = self.world
        its = self._living()
        if its:
            one = world.rng.choice(its).process
            one.frozen_until = world.kernel.now + world.rng.random() * 20
            world.act("freeze", str(one))

    def _trouble(self) -> None:
        world, rng = self.world, self.world.rng
        damage = world.files.damage
        kind = rng.choice([
            "read", "write", "sync", "open", "full", "short", "slow", "rename", "list", "lock",
            "stat", "unlink", "allocate", "utime", "threads", "bad", "descriptors",
        ])  # fmt: skip
        kind = world.only or kind
        if kind == "full":
            world.files.size = world.files.used + rng.randrange(0, 4 * world.segment_bytes)
        elif kind == "short":
            damage.short = 0.3
        elif kind == "bad":
            its = [one for path, one in world.files.walk() if path.endswith(".safetensors")]
            blocks = world.segment_bytes - CHUNK * world.slots_of_segment
            # Sometimes those that are written next, rather than some that hold a chunk already.
            free = rng.random() < 0.5
            slots = [
                (inode, first, first + CHUNK)
                for inode in its
                for first in range(blocks, world.segment_bytes, CHUNK)
                if not (free and any(inode.data[first : first + CHUNK]))
            ]
            damage.bad = rng.sample(slots, min(2, len(slots)))
        elif kind == "descriptors":
            damage.fails["open"] = (0.1, errno.EMFILE)
        elif kind == "threads":
            world.kernel.threads_fail = rng.choice([0.05, 0.3, 1.0])
        elif kind == "slow":
            for call in ("read", "write"):
                damage.slow[call] = rng.choice([0.01, 0.3, 3.0])
        else:
            number = {"allocate": 28, "open": rng.choice([5, 24])}.get(kind, 5)
            damage.fails[kind] = (rng.choice([0.02, 0.3, 1.0]), number)
            # A chunk whose record or bytes could not be read may be dropped.
            world.forget()
        world.act("trouble", kind)
        if rng.random() < 0.5:
            # What is opened meets it, too.
            self._kill()
            self._start()

    def _net(self) -> None:
        """Trouble with the store and the way to it."""
        world, rng = self.world, self.world.rng
        server = world.server
        assert server is not None
        kind = rng.choice(NET_TROUBLES)
        kind = world.only if world.only in NET_TROUBLES else kind
        if kind in ("away", "frozen"):
            setattr(server, kind, True)
        elif kind == "amnesia":
            server.values.clear()
            server.rotted.clear()
        elif kind == "rot":
            for name in rng.sample(sorted(server.values), min(3, len(server.values))):
                value, since = server.values[name]
                damaged = bytearray(value[: rng.choice([0, len(value) - 1, len(value)])])
                if damaged:
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                server.values[name] = (bytes(damaged), since)
                server.rotted.add(name)
        else:
            setattr(server, kind, rng.choice([0.1, 0.5, 2.0]) if kind != "lost" else 0.2)
        world.act("net", kind)

    def _litter(self) -> None:
        """What strangers do in the folder of a cache."""
        world, rng = self.world, self.world.rng
        lanes = [(path, one) for path, one in world.files.walk() if "lane-" in path and one.is_dir]
        if not lanes or world.troubled:
            return
        path, lane = rng.choice(lanes)
        segments = [name for name in lane.entries if name.endswith(".safetensors")]
        kind = rng.choice(["file", "gone", "cut", "longer"])
        files = world.files
        if kind == "file" or not segments:
            fd = files.open(f"{path}/{rng.choice(['core.123', 'segment-99.safetensors'])}", 0o102)
            files.pwrite(fd, b"rubbish", 0)
            files.close(fd)
        else:
            name = rng.choice(segments)
            if kind == "gone":
                files.unlink(f"{path}/{name}")
            else:
                fd = files.open(f"{path}/{name}", 2)
                size = files.fstat(fd).st_size
                files.ftruncate(fd, size + 5000 if kind == "longer" else rng.randrange(size + 1))
                files.close(fd)
        world.hurt = world.littered = True
        world.forget()
        world.act("litter", f"{kind} in {path}")

    def _relieve(self) -> None:
        world = self.world
        if world.server is not None:
            world.server.heal()
        # Blocks that are bad stay so for longer.
        stays = world.wears_out and world.rng.random() < (0.95 if world.only == "bad" else 0.8)
        if world.troubled and not stays:
            self._mend()
            world.act("relieve")
            world.forget()

    def _mend(self) -> None:
        """The system works again."""
        world = self.world
        world.files.damage = Damage()
        world.files.size = 1 << 40
        world.kernel.threads_fail = 0.0

    def _jump(self) -> None:
        world = self.world
        world.skew += world.rng.choice([-7200, -10, -1, 1, 10, 7200])
        world.act("jump", f"clock {world.skew:+}")

    def _rot(self) -> None:
        world, rng = self.world, self.world.rng
        its = [(path, one) for path, one in world.files.walk() if path.endswith(".safetensors")]
        if its:
            path, inode = rng.choice(its)
            at = rng.randrange(len(inode.data)) if inode.data else 0
            if inode.data:
                inode.data[at] ^= 1 << rng.randrange(8)
            world.hurt = True
            world.forget()
            world.act("rot", f"{path} byte {at}")

    def _cut_power(self) -> None:
        world = self.world
        world.act("power cut")
        for process in list(world.kernel.processes):
            if process.name != "enemy":
                self.kill(process)
        world.files.cut_power()
        world.bundles.clear()
        standing = world.standing_epochs()
        for generation, slot, epoch in world.fleeting:
            if epoch > standing.get((generation, slot), 0):
                del world.labels[generation, slot, epoch]
        world.fleeting.clear()
        world.hurt = True
        world.forget()

    def _operate(self) -> None:
        world, rng = self.world, self.world.rng
        what = rng.choice([
            self._verify, self._verify, self._survey, self._compact, self._purge, self._export,
            self._import, self._gc,
        ])  # fmt: skip
        world.kernel.spawn("operator", lambda: self._operator(what))

    def _operator(self, what: Callable[[], None]) -> None:
        world = self.world
        troubled = world.troubled
        try:
            what()
        except (KVStoreError, OSError) as error:
            world.act("operator refused", f"{what.__name__}: {error}")
            there = "kv" in world.files.top.entries["sim"].entries
            if (
                there
                and not (troubled or world.troubled or world.hurt)
                and not any(text in str(error) for text in NOTHING_TO_DO)
            ):
                raise
        left = world.left_open(world.kernel.process)
        if left:
            raise BrokenError(f"{what.__name__} leaves {len(left)} files open")

    def _disk(self) -> Path:
        return self.world.disk_of(self.world.rng.randrange(self.world.slots))

    def _verify(self) -> None:
        world = self.world
        troubled = world.troubled
        keys = KEYS if world.encrypted else None
        faults = [one for one in verify(self._disk(), keys) if not isinstance(one, Progress)]
        world.act("verify", f"{len(faults)} faults")
        if faults and not (troubled or world.troubled or world.hurt):
            raise BrokenError(f"verify finds {faults[0]} on a sound disk")

    def _survey(self) -> None:
        found = survey(self._disk())
        self.world.act("survey", f"{sum(len(each.lanes) for each in found)} lanes")

    def _compact(self) -> None:
        world = self.world
        troubled = world.troubled
        done = compact(self._disk())
        world.act("compact", "; ".join(each.refused or each.failed or "done" for each in done))
        faults = [fault for each in done if each.result for fault in each.result.faults]
        if faults and not (troubled or world.troubled or world.hurt):
            raise BrokenError(f"compact finds {faults[0]} on a sound disk")

    def _purge(self) -> None:
        rng = self.world.rng
        keys = self.world.keys(rng.randrange(self.world.prompts))
        self.world.forget(keys)
        done = purge(self._disk(), key=rng.choice(keys))
        self.world.forget(keys)
        self.world.act("purge", f"{sum(each.chunks for each in done)} chunks")

    def _gc(self) -> None:
        """Empty all namespaces but two, and those that a server has open."""
        world, rng = self.world, self.world.rng
        troubled, slot = world.troubled, rng.randrange(world.slots)
        keepers = self._keepers(slot)
        if not keepers:
            world.forget()
        options = {"path": world.disk_of(slot), "keep": 2, "dry_run": rng.random() < 0.1}
        run_gc(argparse.Namespace(**options, yes=True, json=True, strict_modes=False))
        if not keepers & self._keepers(slot):
            world.forget()
        report = world.printed.pop(world.kernel.process.pid)
        world.act("gc", f"{len(report['emptied'])} emptied, {len(keepers)} open")
        faults = [fault for lane in report["lanes"] for fault in lane["faults"]]
        if faults and not (troubled or world.troubled or world.hurt):
            raise BrokenError(f"gc finds {faults[0]} on a sound disk")

    def _remove_old(self) -> None:
        """Remove the folders of namespaces that nobody opens again, as operators do with `rm`."""
        world = self.world
        if world.troubled or any(one.name == "operator" for one in world.kernel.processes):
            return
        least = min((one.generation for one in self._living()), default=world.generation)
        tree = list(world.files.walk())
        old = [
            path.removesuffix("/namespace.json")
            for path, inode in tree
            if path.endswith("/namespace.json")
            and json.loads(bytes(inode.data))["identity"]["generation"] < least
        ]
        for path, inode in reversed(tree):
            if any(path == folder or path.startswith(folder + "/") for folder in old):
                (world.files.rmdir if inode.is_dir else world.files.unlink)(path)
        world.act("rm", f"{len(old)} namespaces before generation {least}")

    def _keepers(self, slot: int) -> set[Process]:
        """Who has the newest namespace of a disk open."""
        world = self.world
        return {
            one.process
            for one in self._living()
            if one.opened and not one.stopping and one.generation == world.generation
            if not world.hosts or one.slot == slot
        }

    def _export(self) -> None:
        """Write a bundle, and note of which weights it is."""
        world, rng = self.world, self.world.rng
        slot = rng.randrange(world.slots)
        namespace = rng.choice(survey(world.disk_of(slot)))
        file = Path(f"/sim/bundle-{rng.randrange(3)}")
        world.bundles.pop(file, None)
        done = export_bundle(namespace.path, file, replace=True)
        generation = namespace.identity.get("generation", -1)
        label = world.label_of(generation, slot, namespace.epoch)
        if label is not None:
            world.bundles[file] = label
        world.act("export", f"{done.chunks} chunks of label {label}")

    def _import(self) -> None:
        """Store a bundle, where the weights are those that it is of."""
        world, rng = self.world, self.world.rng
        if not world.bundles or world.alone:
            return
        slot, (file, label) = rng.randrange(world.slots), rng.choice(sorted(world.bundles.items()))
        world.importing[world.kernel.process.pid] = (slot, label)
        world.forget()
        keys = KEYS if world.encrypted else None
        try:
            done = import_bundle(
                file, world.disk_of(slot), capacity_bytes=world.capacity, keys=keys
            )
        except KVStoreError as error:
            # Other lanes would have to give way.
            if "give at least" not in str(error):
                raise
            world.act("import", "refused")
            return
        finally:
            world.forget()
        world.act("import", f"{done.stored} of {done.chunks} chunks of label {label}")

    def _check_sizes(self) -> None:
        """The files of a lane keep within its capacity, but for what strangers have put there."""
        world = self.world
        if world.littered:
            return
        for lane, size in world.lane_bytes().items():
            if size > world.capacity:
                raise BrokenError(f"{lane} has {size} bytes of {world.capacity}")

    def _finish(self) -> None:
        """End everything in order, with a disk that works, and look once more."""
        world, kernel = self.world, self.world.kernel
        self._mend()
        if world.server is not None:
            world.server.heal()
        end = kernel.now + 500
        for _ in range(2):
            while len(kernel.processes) > 1:
                for one in self._living():
                    one.stopping = True
                kernel.sleep(0.5)
                if kernel.now > end:
                    raise BrokenError(f"does not end: {kernel.processes}")
            self._start()
            kernel.sleep(1)
        for one in self._living():
            one.stopping = True
        while len(kernel.processes) > 1:
            kernel.sleep(0.5)
        if world.files.top.entries["sim"].entries:
            with contextlib.suppress(PathUnusableError):
                self._verify()
