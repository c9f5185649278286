"""Faults of one line each, which the tests have to find: see `tests.mutation.__main__`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong line.

    Attributes:
        path: of the module. old: the text to be replaced, which the module has once. new: instead.
        what: what is wrong then.
        unfound: why no test finds it; empty where one has to.
    """

    path: str
    old: str
    new: str
    what: str
    unfound: str = ""

    @property
    def room(self) -> str:
        """The part of the product that it is in: "core", "disk", "stores" or "connector"."""
        for start, room in _ROOMS.items():
            if self.path.startswith(start):
                return room
        raise AssertionError(f"{self.path} is in no room")

    @property
    def name(self) -> str:
        """Tells it from all others, and does not change with its place in the table."""
        return f"{self.path}: {self.what}"

    def applied(self, text: str) -> str:
        """The module `text` with the fault in it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


_ROOMS = {
    "kvstore/core/": "core",
    "tiers/disk/": "disk",
    "tiers/sealing": "disk",
    "tiers/keys": "disk",
    "kvstore/gate": "disk",
    "kvstore/maintenance/": "disk",
    "tiers/remote/": "stores",
    "kvstore/connector/": "connector",
}


def _in(path: str, *faults: tuple[str, str, str]) -> Iterator[Fault]:
    for what, old, new in faults:
        yield Fault(path, old, new, what)


FAULTS = (
    # -- core --------------------------------------------------------------------------------
    *_in(
        "kvstore/core/host.py",
        (
            "withheld rows are still counted",
            "self.rows -= count",
            "self.rows -= 0",
        ),
        (
            "chunks that were not filling count as filled",
            "self.busy -= filled",
            "self.busy -= len(chunks)",
        ),
        (
            "the policy keeps a chunk whose bytes never came",
            "del self.chunks[chunk.key]\n        self.policy.remove(chunk.key)\n",
            "del self.chunks[chunk.key]\n",
        ),
        (
            "a row is free while a second transfer still holds it",
            "if not self._held[row]:",
            "if True:",
        ),
        (
            "a reset frees rows that are being read or written",
            "self._held.update(rows_in_flight)",
            "self._held.update(())",
        ),
        (
            "a reset gives back rows that were withheld",
            "kept = self._held.keys() | set(self._withheld)",
            "kept = self._held.keys()",
        ),
        (
            "a chunk with a second reader counts as free",
            "self.busy -= len(free)",
            "self.busy -= len(chunks)",
        ),
        (
            "a chunk that is used while it leaves is not given back to the policy",
            "        self._copied.pop(chunk.key, None)\n        self.policy.insert(chunk.key)",
            "        self._copied.pop(chunk.key, None)",
        ),
        (
            "a chunk that answered hit in this step may leave in it",
            "if chunk.step != step and not (uncopied",
            "if not (uncopied",
        ),
        (
            "of each eviction one row is lost",
            "self._free += [chunk.row for chunk in gone]",
            "self._free += [chunk.row for chunk in gone[1:]]",
        ),
    ),
    *_in(
        "kvstore/core/tier_only.py",
        (
            "a job that was refused ends as whole",
            "            job.whole = False\n            target.count",
            "            target.count",
        ),
        (
            "a chunk that was not written counts as stored",
            "self._storing.pop(key)\n            self._chunk_ended(job, ok, now)",
            "self._storing.pop(key)\n            self._chunk_ended(job, True, now)",
        ),
    ),
    *_in(
        "kvstore/core/lookup.py",
        (
            "a chunk that is still arriving is a hit",
            "chunk.state >= READY and request.state is not _WAITING",
            "request.state is not _WAITING",
        ),
        (
            "a chunk that is being removed is a hit",
            "if self._hidden and key in self._hidden and request.state",
            "if not self._hidden and request.state is None and request.state",
        ),
        (
            "a request may be deferred again after its deadline",
            "(key in request.tried or self._queue.overdue(request, self._now))",
            "key in request.tried",
        ),
        (
            "a request waits for a tier that does not answer",
            "self._tiers[chunk.origin].health.hopeless",
            "not self._tiers",
        ),
        (
            "hits are not kept until the step ends",
            "self._pool.keep(keys[kept:])",
            "self._pool.keep(())",
        ),
        (
            "contains says yes for a chunk that is being removed",
            "yield key not in self._hidden and (ready",
            "yield (ready",
        ),
    ),
    *_in(
        "kvstore/core/promotion.py",
        (
            "a prefix of one more than host memory is waited for",
            "if len(leases) + len(missing) >= rows and",
            "if len(leases) + len(missing) > rows and",
        ),
        (
            "chunks under way are not counted against the share of their tier",
            "left[tier.number] -= 1",
            "left[tier.number] -= 0",
        ),
        (
            "a prefix is cut short before rows were missing for two steps",
            "if request.stuck != pool.step - 1:",
            "if request.stuck == pool.step:",
        ),
        (
            "one tier may fill host memory",
            "most = rows - share * len(tiers)",
            "most = rows",
        ),
        (
            "what could not have been computed by now is left to the server",
            "> lacking * compute:",
            "< lacking * compute:",
        ),
    ),
    *_in(
        "kvstore/core/removal.py",
        (
            "a chunk that is being written is removed only from where it was",
            "if key in index.reading or key in index.writing:",
            "if key in index.reading:",
        ),
        (
            "a chunk that is being removed is still copied",
            "pool.dequeue(chunk, target.number)",
            "target.queued",
        ),
        (
            "a removal ends while records are still to be erased",
            "if not (key in self._places or hidden.recorded):",
            "if key not in self._places:",
        ),
    ),
    *_in(
        "kvstore/core/eviction.py",
        (
            "a hit of this step is removed in it",
            "if not free or chunk.step == self._pool.step:",
            "if not free:",
        ),
    ),
    *_in(
        "kvstore/core/transfers.py",
        (
            "a move that a reset has overtaken counts like all others",
            "overtaken = move.id in self.orphans",
            "overtaken = move.id in ()",
        ),
        (
            "a second reset holds rows of the first again",
            "for id, move in self.moves.items() if id not in self.orphans for row",
            "for id, move in self.moves.items() for row",
        ),
        (
            "a chunk with wrong bytes is tried again instead of forgotten",
            "perhaps_whole=place in unread",
            "perhaps_whole=True",
        ),
        (
            "one transfer that ends frees the rows of others",
            "self._pool.release_held((rows.pop(),))",
            "self._pool.release_held((rows.pop(), *rows))",
        ),
    ),
    *_in(
        "kvstore/core/cascade.py",
        (
            "of each copy one chunk stays pinned",
            "move.keys[::-1])))",
            "move.keys[:0:-1])))",
        ),
        (
            "chunks that find no room behind a long prompt displace its head",
            "fitting = [chunk for chunk in chunks if chunk.depth < most]",
            "fitting = chunks",
        ),
        (
            "what another process has stored meanwhile is written again",
            "if chunk.key in target.entries:\n",
            "if chunk.key in ():\n",
        ),
        (
            "a chunk whose copy was called off is copied",
            "if not chunk.unsaved & bit:",
            "if not bit:",
        ),
        (
            "chunks that a neighbour has on the same disk are written again",
            "chunks = [chunk for chunk in chunks if chunk.key not in peer.entries]",
            "chunks = [chunk for chunk in chunks if chunk.key]",
        ),
    ),
    *_in(
        "kvstore/core/residency/base.py",
        (
            "a chunk with wrong bytes stays in the index",
            "if not perhaps_whole or not self.index.unread(key):",
            "if not self.index.unread(key):",
        ),
    ),
    *_in(
        "kvstore/core/residency/owned.py",
        (
            "slots that cannot be written are used again at once",
            "self.slots.set_aside(slots, now)",
            "self.slots.give(slots)",
        ),
        (
            "an exclusive tier keeps what it gave",
            "            self.forget(tail_first)",
            "            pass",
        ),
        (
            "uses are recorded while compaction moves the records",
            "if self.health.alive and not self.compactor.moving:",
            "if self.health.alive:",
        ),
        (
            "compaction begins amid other moves",
            "idle = not (self.in_flight or self.queued or self.slots.growing) or self.surplus > 0",
            "idle = True",
        ),
        (
            "a segment that was removed during a reset is still counted",
            "elif move.op is Op.SHRINK and completion.error is None:",
            "elif move.op is Op.SHRINK and completion.error is not None:",
        ),
    ),
    *_in(
        "kvstore/core/residency/slots.py",
        (
            "a disk with bad spots loses all its slots",
            "most = min(MOST_ASIDE, max(1, total // 8, min(FEW_ASIDE, total // 2)))",
            "most = total",
        ),
        (
            "a segment that is in use counts as empty",
            "return free + self._aside_in(segment) == self.segment_slots",
            "return free + self._aside_in(segment) <= self.segment_slots",
        ),
        (
            "compaction takes the room that new chunks need",
            "enough = self.free - its_free >= live + self._headroom + max(size // 2, 1)",
            "enough = self.free - its_free >= live",
        ),
        (
            "a segment that came during a reset is forgotten",
            "self._segments.update(segments)",
            "self._segments.update(())",
        ),
        (
            "a run of free slots goes across two segments",
            "if slot == run_end and slot % self._segment_slots:",
            "if slot == run_end:",
        ),
        (
            "free slots of two segments are merged",
            "if end % self._segment_slots:",
            "if end:",
        ),
        (
            "slots of a segment that is being emptied are used again",
            "slots = [slot for slot in slots if slot not in gone]",
            "slots = list(slots)",
        ),
    ),
    *_in(
        "kvstore/core/residency/breaker.py",
        (
            "what fails is tried again as often as at first",
            "self._first if self._proved else min(2 * self._pause, self._last)",
            "self._first",
        ),
        (
            "failures of attempts made before prolong the pause",
            "State.OPEN and now < self._retry_at:\n            return False\n        closed",
            "None and now < self._retry_at:\n            return False\n        closed",
        ),
    ),
    *_in(
        "kvstore/core/residency/compactor.py",
        (
            "a chunk that came back to another slot loses that when its old copy fails",
            "here = index.entries.get(key) == source",
            "here = key in index.entries",
        ),
        (
            "a slot is given back while a read of it goes on",
            "if here and key in index.reading:",
            "if here and key in ():",
        ),
    ),
    *_in(
        "kvstore/core/residency/index.py",
        (
            "a slot that is being read may be given to others",
            "if key in reading or key in pinned:\n                aside.add(key)",
            "if key in pinned:\n                aside.add(key)",
        ),
        (
            "pins on a tier do not count",
            "protected if reading or pinned else _nobody",
            "protected if reading else _nobody",
        ),
    ),
    *_in(
        "kvstore/core/residency/remote.py",
        (
            "a late answer hides what was copied to the store meanwhile",
            "[key for key in lacking if key not in entries and key not in writing]",
            "list(lacking)",
        ),
    ),
    *_in(
        "kvstore/core/residency/remote_answers.py",
        (
            "a question that nobody waits for any longer is waited for",
            "        self.end(late)\n        return late",
            "        return late",
        ),
        (
            "answers of a store count for ever",
            "if key is None or self._present[key] > now:",
            "if key is None or self._present[key] > 0:",
        ),
    ),
    *_in(
        "kvstore/core/wait_queue.py",
        (
            "a request waits for ever while something moves",
            "return min(moved + self.deadline, request.since + self.max_wait)",
            "return moved + self.deadline",
        ),
        (
            "a request is not told that a chunk will not arrive",
            "            request.drop_lease(chunk.key)\n            self._arrived(request, 1, now)",
            "            request.drop_lease(chunk.key)",
        ),
        (
            "a tier that hangs ends waits for all others",
            "chunk.state == FILLING and chunk.origin in tiers",
            "chunk.state == FILLING",
        ),
    ),
    # -- disk --------------------------------------------------------------------------------
    *_in(
        "tiers/disk/segment.py",
        (
            "a new segment has a name before its header is durable",
            "            os.fsync(fd)\n            data = backend.open(temporary)",
            "            data = backend.open(temporary)",
        ),
        (
            "the name of a new segment is not durable",
            "            name = path\n            sync_folder(folder)",
            "            name = path",
        ),
        (
            "a segment with slots of another size is used",
            "if header.geometry != geometry:",
            "if header.geometry is None:",
        ),
        (
            "a segment of another model is used",
            "if header.namespace != namespace:",
            "if header.namespace is None:",
        ),
        (
            "compaction lists chunks from before a reset",
            "live = self.index.live().of_epoch(self.epoch)",
            "live = self.index.live()",
        ),
        (
            "a segment that others may write to is used",
            "if fault is not None:\n        raise ForeignFileError",
            "if fault == '':\n        raise ForeignFileError",
        ),
        (
            "removing a segment wipes another name of the same file",
            "if not found.st_nlink:",
            "if found:",
        ),
        (
            "bytes behind the end of a segment stay",
            "if os.fstat(meta).st_size > geometry.file_bytes:",
            "if os.fstat(meta).st_size < 0:",
        ),
    ),
    *_in(
        "tiers/disk/format.py",
        (
            "a chunk from before a reset is served",
            "            and its_epoch == epoch\n",
            "",
        ),
        (
            "a record counts in another slot than its own",
            '& (found["slot"] == slots[used])',
            '& (found["slot"] == found["slot"])',
        ),
        (
            "a damaged record counts when a lane is opened",
            '(found["crc"] == crc)',
            '(found["crc"] == found["crc"])',
        ),
        (
            "a use is written into the record of another key",
            "(its_slot, its_key[:length]) != (slot, key)",
            "its_slot != slot",
        ),
        (
            "an earlier use replaces a later one",
            "max(before_ms, read_ms)",
            "read_ms",
        ),
        (
            "a damaged header is used",
            "whole = sane and encode_header(header)[:ALIGN] == page[:ALIGN]",
            "whole = sane",
        ),
        (
            "records of one segment are valid in another",
            "return int(crc32c(bytes.fromhex(segment_id)))",
            "return int(crc32c(bytes(16)))",
        ),
    ),
    *_in(
        "tiers/disk/index.py",
        (
            "a record that was being written is never looked at again",
            "known[live.damaged] = 0",
            "known[live.damaged] += 0",
        ),
        (
            "removing one key erases others that begin alike",
            'if record["key"].tobytes()[: int(record["key_length"])] in wanted:',
            "if len(record):",
        ),
        (
            "what a short write left out is not written",
            "while done < len(records):",
            "while done < 0:",
        ),
    ),
    *_in(
        "tiers/disk/extents.py",
        (
            "the old record stays while its slot is overwritten",
            "extent.segment.index.erase(extent.first, len(extent.keys))",
            "extent.segment.index.read(extent.first, len(extent.keys))",
        ),
        (
            "payloads are not compared with their digests",
            "known.get(slot) == each\n",
            'known.get(slot, (b"",))[0] == each[0]\n',
        ),
        (
            "an older state of a chunk that somebody put back is served",
            "segment.nonces is None or segment.nonces[slot].tobytes() == seal[TAG_BYTES:]",
            "True",
        ),
        (
            "an extent goes across two segments",
            "if slot == previous + 1 and slot % segment_slots and len(",
            "if slot == previous + 1 and len(",
        ),
        (
            "chunks that are written one by one get the same sequence",
            "Writing(backend, [one], sequence + index, coder)",
            "Writing(backend, [one], sequence, coder)",
        ),
        (
            "chunks are written as of no epoch",
            "sequence, size, digests, segment.seed, segment.epoch",
            "sequence, size, digests, segment.seed, 0",
        ),
    ),
    *_in(
        "tiers/sealing.py",
        (
            "nonces repeat",
            "os.urandom(NONCE_BYTES - ID_BYTES)",
            "bytes(NONCE_BYTES - ID_BYTES)",
        ),
        (
            "what was sealed before a reset opens after it",
            'epoch.to_bytes(8, "little") + key',
            "bytes(8) + key",
        ),
        (
            "what was sealed as one chunk opens as another",
            'epoch.to_bytes(8, "little") + key',
            'epoch.to_bytes(8, "little")',
        ),
        (
            "what was sealed in one namespace opens in another",
            "sha256(place.encode()).digest()",
            "bytes(32)",
        ),
        (
            "what was forged opens",
            "        except InvalidTag:\n            return False\n",
            "        except InvalidTag:\n            return True\n",
        ),
    ),
    *_in(
        "tiers/keys.py",
        (
            "older keys open nothing",
            "chain(*its, self._others)",
            "chain(*(one[:1] for one in its), self._others[:1])",
        ),
        (
            "keys that cannot be read are forgotten",
            "            self._complain(error)\n",
            "            self._complain(error)\n            self._others = []\n",
        ),
    ),
    *_in(
        "tiers/disk/relocation.py",
        (
            "the record of a chunk that is moved keeps the old seal",
            "set_seal(record.records, sealer.seal(key, epoch, payload, payload))",
            "sealer.seal(key, epoch, payload, payload)",
        ),
        (
            "a chunk that was moved is not on the medium when its source is freed",
            "            segment.sync()\n",
            "            segment.missing_bytes\n",
        ),
        (
            "a chunk that could not be read is erased by compaction",
            "if outcome.wrong:",
            "if outcome.error:",
        ),
    ),
    *_in(
        "tiers/disk/volume.py",
        (
            "a segment is removed while it is being read",
            "lambda: not self._used[number]",
            "lambda: not self._used[-1]",
        ),
        (
            "open segments stay in the epoch before",
            "            segment.epoch = epoch\n",
            "            segment.epoch += 0\n",
        ),
        (
            "a reset goes back to an epoch in which others have been",
            "return max(read_epoch(self.lane.folder.parent), told)",
            "return min(read_epoch(self.lane.folder.parent), told)",
        ),
        (
            "a new segment is of the first epoch",
            "segment.epoch = self.epoch",
            "segment.epoch = 0",
        ),
        (
            "files that are not ours do not count when unowned lanes make room",
            "own = self.recovered.foreign_bytes + segments * self.geometry.file_bytes",
            "own = segments * self.geometry.file_bytes",
        ),
        (
            "two chunks of one write get the same sequence",
            "sequence += sum(map(len, batch))",
            "sequence += len(batch)",
        ),
        (
            "a lane grows beyond its capacity",
            "if len(self.segments) >= self.max_segments:",
            "if self.max_segments < 0:",
        ),
        (
            "files that are not ours do not count against the capacity",
            "max(0, capacity - recovered.foreign_bytes) // geometry.file_bytes",
            "max(0, capacity) // geometry.file_bytes",
        ),
    ),
    *_in(
        "tiers/disk/lane.py",
        (
            "two processes own one lane",
            "        if _locked(fd, fcntl.LOCK_EX):",
            "        if _locked(fd, fcntl.LOCK_SH):",
        ),
        (
            "a forked child keeps the lane of its parent",
            "_owned = given_up_in_children(Lane.release)",
            "_owned = given_up_in_children(lambda lane: None)",
        ),
        (
            "neighbours are not told of changes",
            "os.utime(self._lock, ns=(now, now))",
            "os.fstat(self._lock)",
        ),
    ),
    *_in(
        "tiers/disk/epoch.py",
        (
            "a reset is not durable",
            "        os.fsync(fd)\n",
            "",
        ),
        (
            "of two processes that reset at once both are told that they did it",
            "        standing = read_epoch(folder)\n        if standing < epoch:",
            "        if standing < epoch:",
        ),
    ),
    *_in(
        "tiers/disk/tier.py",
        (
            "only a lane with newer chunks notices that an epoch was lost",
            "        if newest > epoch:\n",
            "        if newest < 0:\n",
        ),
    ),
    *_in(
        "tiers/disk/recovery.py",
        (
            "a key that is there twice is found in its older slot",
            "        newest.pop(key, None)\n        newest[key] = index",
            "        newest.setdefault(key, index)",
        ),
        (
            "a namespace whose epoch was lost serves what was forgotten",
            "        if newest > epoch:\n",
            "        if newest < 0:\n",
        ),
        (
            "a strange file decides which size the segments have",
            "held.get(header.geometry, 0) + _disk_bytes(path)",
            "held.get(header.geometry, 0) + 1",
        ),
        (
            "a lane that is larger than its capacity stays so",
            "if len(found) * geometry.file_bytes > capacity_bytes:",
            "if capacity_bytes < 0:",
        ),
    ),
    *_in(
        "kvstore/gate.py",
        (
            "a gate lets every model pass",
            "name not in identity or json.loads(json.dumps(identity[name])) != value",
            "name == value",
        ),
    ),
    *_in(
        "tiers/disk/peers.py",
        (
            "an encoded chunk of another lane is served as it is",
            "reading = Reading(volume.backend, wanted, volume.coder)",
            "reading = Reading(volume.backend, wanted)",
        ),
        (
            "what was seen before a reset is news after it",
            "            if known is not self._known:",
            "            if known is None:",
        ),
        (
            "a chunk that a neighbour has rewritten is not looked for elsewhere",
            "(p for p in known.places.of(keys[index]) if p not in seen)",
            "(p for p in () if p not in seen)",
        ),
    ),
    *_in(
        "tiers/disk/threads.py",
        (
            "stores wait for ever behind loads",
            "if others and (not queue or self._in_a_row >= LOADS_IN_A_ROW):",
            "if others and not queue:",
        ),
        (
            "a cancelled call gives its memory back while threads use it",
            "                    cancelled = error\n",
            "                    raise\n",
        ),
    ),
    *_in(
        "tiers/disk/unowned.py",
        (
            "lanes are emptied that were in use a moment ago",
            "if since is None or time.time() - since < FREE_SECONDS:",
            "if since is None:",
        ),
        (
            "a segment of another namespace is removed that has taken the place of its own",
            "if read_header(one.path).namespace != one.namespace:",
            "if read_header(one.path) is None:",
        ),
    ),
    *_in(
        "kvstore/maintenance/offline.py",
        (
            "a purge takes no account of the given key",
            "if (keys is None or its_key in keys)",
            "if its_key",
        ),
        (
            "a purge changes a lane that is in use",
            "lane = Lane.acquire(folder.parent, number, trust)",
            "lane = Lane(folder, number, os.open(folder, os.O_RDONLY))",
        ),
        (
            "a purge writes into a file that is not to be trusted",
            "if fault is not None:\n        os.close(fd)",
            "if fault == '':\n        os.close(fd)",
        ),
    ),
    # -- stores ------------------------------------------------------------------------------
    *_in(
        "tiers/remote/gate.py",
        (
            "a call that was cancelled while it waited counts as ended",
            "if not admitted.cancelled() and admitted.exception() is None:",
            "if admitted.cancelled() or admitted.exception() is None:",
        ),
        (
            "bytes of calls that have ended still count",
            "self._used -= size",
            "self._used -= 0",
        ),
    ),
    *_in(
        "tiers/remote/record.py",
        (
            "a value is taken for that of another key",
            "found != length or padded[:key_length] != key:",
            "found != length:",
        ),
        (
            "a value from another namespace, or from before a reset, is taken",
            "seed: int = crc32c(place.encode())",
            'seed: int = crc32c(b"")',
        ),
    ),
    *_in(
        "tiers/remote/loop.py",
        (
            "a call ends while others still use its memory",
            "while left := [task for task in running if not task.done()]:",
            "while left := [task for task in running if task.done() is None]:",
        ),
    ),
    *_in(
        "tiers/remote/record.py",
        (
            "payloads are not compared with their digests",
            "return None if proof == digest(payload) else WRONG",
            "return None",
        ),
    ),
    *_in(
        "tiers/remote/tier.py",
        (
            "what was encoded for a store is not decoded",
            "                    self._coder.decode(chunk)\n",
            "                    self._coder.payload_bytes += 0\n",
        ),
        (
            "after a reset the store is asked for what was forgotten",
            "self._begin_epoch(secrets.token_hex(8))",
            "self._begin_epoch(left)",
        ),
        (
            "a value that was found damaged is asked for again and again",
            "there and not self._suspects.missing(key)",
            "there and not self._suspects.may_return(key)",
        ),
        (
            "a damaged value is never replaced",
            "replaced = self._suspects.must_replace(keys)",
            "replaced = False",
        ),
        (
            "chunks that a store did not answer for count as lost",
            "            done.unread = range(len(done.ok), len(keys))\n"
            "            done.ok += [False] * len(done.unread)\n",
            "            done.ok += [False] * (len(keys) - len(done.ok))\n",
        ),
        (
            "one call after another waits for a store that hangs",
            "                gate.fail(reason)\n",
            "",
        ),
    ),
    *_in(
        "tiers/remote/sweeper.py",
        (
            "a sweep removes values of others that are in use",
            "(since < before or epoch in left)",
            "(since or epoch in left)",
        ),
        (
            "the newest values leave a store that is full",
            "if not self.going.get(partition) or age > self.last[partition]:",
            "if not self.going.get(partition) or age < self.last[partition]:",
        ),
        (
            "a store that is full takes no account of tenants",
            "return 0 if self._partitions is None else self._partitions.of(key)",
            "return 0",
        ),
        (
            "a store is never swept because it was written to",
            "            self._due.set()\n",
            "            self._due.clear()\n",
        ),
    ),
    *_in(
        "tiers/remote/directory.py",
        (
            "a value that is read is as old as before",
            "                            os.utime(fd)\n",
            "                            os.fstat(fd)\n",
        ),
        (
            "a value in a shared folder can be seen half-written",
            'temporary = f"{within}/.{secrets.token_hex(8)}"',
            "temporary = at",
        ),
        (
            "a late read writes into memory that is another's by now",
            "                lent.clear()\n",
            "                lent.count(payloads)\n",
        ),
        (
            "a value of a user who is not trusted is taken",
            "fault = self._mount.trust.file_fault(fd, written=False)",
            "fault = None",
        ),
        (
            "a short read of a value counts as damage",
            "while 0 < len(value) < size and",
            "while 0 > len(value) and",
        ),
    ),
    *_in(
        "tiers/remote/slices.py",
        (
            "places for records are used up",
            "self._free += places",
            "self._free += []",
        ),
    ),
    # -- connector ---------------------------------------------------------------------------
    *_in(
        "kvstore/connector/manager.py",
        (
            "a store that failed counts as stored",
            "share.keys, share.prompt.id, success, share.era",
            "share.keys, share.prompt.id, True, share.era",
        ),
        (
            "a transfer from before a reset ends one that was begun after it",
            "if not self._reports_late or not self._core.late_transfers:",
            "if self._closed is not None:",
        ),
        (
            "stores that were abandoned count as stored",
            "self._core.complete_store((transfer.key,), transfer.request, False, transfer.era)",
            "self._core.complete_store((transfer.key,), transfer.request, True, transfer.era)",
        ),
        (
            "host memory is given back while a disk that hangs still uses it",
            "        if self.stepper.close(self._drain):\n",
            "        if [self.stepper.close(self._drain)]:\n",
        ),
    ),
    *_in(
        "kvstore/connector/scheduler.py",
        (
            "a request is looked up while it has transfers under way",
            "        if tracked.jobs:\n            self._stats.deferred += 1",
            "        if tracked.jobs is None:\n            self._stats.deferred += 1",
        ),
        (
            "blocks are written while a store still reads them",
            "flush |= self._jobs.using(self._written)",
            "flush |= set()",
        ),
        (
            "blocks of a preempted request are given out while they are being stored",
            "                flush |= tracked.jobs\n",
            "",
        ),
        (
            "the loads of this step have to end before they begin",
            "        flush -= loads.keys()\n",
            "",
        ),
        (
            "a store begins after its blocks were given to another",
            "return set() if self._written.isdisjoint(job.block_ids) else {job.number}",
            "return set()",
        ),
        (
            "two requests load into blocks that they share",
            "if matched and self._loads.under_way(tracked, matched):",
            "if matched and self._loads is None:",
        ),
        (
            "after a reset what running requests have computed is not offered again",
            "            tracked.store_anew()\n",
            "            tracked.groups\n",
        ),
        (
            "requests that have ended are kept",
            "if tracked.ended and not tracked.jobs and self._requests",
            "if tracked.ended and tracked.jobs and self._requests",
        ),
    ),
    *_in(
        "kvstore/connector/tracked_request.py",
        (
            "a chunk is stored before it is whole",
            "            tokens // self.group.tokens_per_chunk,\n",
            "            -(-tokens // self.group.tokens_per_chunk),\n",
        ),
        (
            "a chunk is stored of which a window has left too little",
            "return kept if len(kept) * group.tokens_per_block >= group.uncut else []",
            "return kept",
        ),
        (
            "a block behind a window is stored that belongs to another by now",
            "                self.block_ids[place] = 0\n",
            "                self.block_ids[place] += 0\n",
        ),
        (
            "chunks of two KV cache groups have one key",
            "return short_name(bytes(block_hash), MAX_KEY_BYTES - len(suffix)) + suffix",
            "return short_name(bytes(block_hash), MAX_KEY_BYTES - len(suffix)) + bytes(4)",
        ),
        (
            "a request whose load has failed tries to load for ever",
            "            self.load_failed = True\n",
            "",
        ),
    ),
)
