"""vLLM's own file system tier, driven as its tiering manager drives it.

The whole of it is vLLM's: `TieringOffloadingSpec` builds the manager, the
shared region in /dev/shm, and the tier with its threads and C extension; jobs
go in by `submit_store` and `submit_load` and are collected by
`get_finished_jobs`. Where the comparison could be unfair, the peer is favoured:

* Nobody polls. The caller sleeps in `drain_jobs` and the time at which a job ended
  is noted where the tier itself notes it.
* No lookup is made, and the name and inode of every file that is read are still in
  memory, as they are not after a restart.
* Files that were written are emptied between measurements, not within, and removed when all is
  measured. Removing them earlier would spoil what follows: an ext4 without a journal does not use
  the inode of a removed file again for a minute or more, but looks at all of these whenever it
  makes a file, which was seen to cost this tier nine tenths of its speed. For the same reason
  wait a few minutes between two runs on such a file system.

It makes a file for each chunk and never overwrites one: each write is a first
write. It opens files with O_DIRECT where that works, so that no page cache is
in play; where it does not work, files are written back and dropped from the
page cache before they are read. It has no digests.

With `memory` the tier gets other memory than its own region, whose pages are
of 4 KiB unless the system gives huge ones to /dev/shm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from meter import Batch, Job, meter

__all__ = ["VllmFs"]


class _Stamped(deque[Any]):
    """The tier's queue of finished jobs, which also notes when each came."""

    def __init__(self) -> None:
        super().__init__()
        self.when: dict[int, float] = {}

    def append(self, item: Any) -> None:
        self.when[item[0]] = time.perf_counter()
        super().append(item)


class VllmFs:
    """The peer, with `chunks` chunks resident on disk for reads.

    Args:
        folder: where its files are.
        chunk_bytes: size of a chunk, a multiple of 4096.
        chunks: rows of its region, and chunks that can be read.
        memory: region of shape (chunks, chunk_bytes); by default vLLM's own.
    """

    name = "vllm"

    def __init__(
        self, folder: Path, chunk_bytes: int, chunks: int, memory: memoryview | None = None
    ) -> None:
        from specs import offloading_config
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.chunk_bytes = chunk_bytes
        self._folder = folder
        tier = {"type": "fs", "root_dir": str(folder)}
        own = chunk_bytes * (chunks if memory is None else 1)
        extra = {"cpu_bytes_to_use": own, "secondary_tiers": [tier]}
        spec = TieringOffloadingSpec(
            offloading_config(extra, chunk_bytes, f"bench-{os.getpid()}-{chunk_bytes}")
        )
        self._manager: Any = spec.get_manager()
        if memory is None:
            self._tier: Any = self._manager.secondary_tiers[0]
            view = self._manager.primary_tier.get_kv_memoryview()
            array = np.frombuffer(view, np.uint8).reshape(chunks, chunk_bytes)
            for row in array:
                row[:] = np.frombuffer(os.urandom(chunk_bytes), np.uint8)
        else:
            self._tier = SecondaryTierFactory.create_secondary_tier(tier, memory, spec)
        self._stamps = self._tier._pool._finished_q = _Stamped()
        self.direct: bool = self._tier._use_o_direct
        self._emptying = ThreadPoolExecutor(16, "emptying")
        self._jobs = 0
        self._written: list[bytes] = []
        self._resident = [_new_key() for _ in range(chunks)]
        parts = [list(range(chunks))[first::16] for first in range(min(16, chunks))]
        self.run(
            [Job(False, part, part) for part in parts],
            [[self._resident[slot] for slot in part] for part in parts],
        )
        self._written = []
        self._drop()

    @staticmethod
    def missing() -> str | None:
        """Why it cannot be measured, or None."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from specs import offloading_config  # noqa: F401
            from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: F401
            from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: F401
        except ImportError as error:
            return f"vLLM 0.32 cannot be imported ({error})"
        logging.getLogger("vllm").setLevel(logging.ERROR)
        return None

    def run(self, jobs: Sequence[Job], keys: Sequence[list[bytes]] | None = None) -> Batch:
        """Run jobs that begin at the same time; what they store has new keys unless given."""
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        transfers = []
        for index, job in enumerate(jobs):
            if job.load:
                its_keys = [self._resident[slot] for slot in job.slots]
            else:
                its_keys = keys[index] if keys else [_new_key() for _ in job.slots]
                self._written += its_keys
            self._jobs += 1
            rows = np.array(job.rows, np.int32)
            context = ReqContext(f"request-{self._jobs}")
            transfers.append(TransferJob(self._jobs, its_keys, rows, job.load, context))
        batch = Batch()
        began = time.perf_counter()
        with meter(batch):
            for transfer in transfers:
                if transfer.is_promotion:
                    self._tier.submit_load(transfer)
                else:
                    self._tier.submit_store(transfer)
            self._tier.drain_jobs()
            results = self._tier.get_finished_jobs()
        failed = [result.job_id for result in results if not result.success]
        if failed or len(results) != len(jobs):
            raise RuntimeError(f"vLLM's tier failed jobs {failed}, finished {len(results)}")
        batch.seconds = [self._stamps.when.pop(each.job_id) - began for each in transfers]
        return batch

    def settle(self) -> None:
        """Empty what was written since the last time, and let the file system finish with it."""
        paths = [self._tier.file_mapper.get_file_name(key) for key in self._written]
        # Several at once: a file system that discards waits for the device each time.
        list(self._emptying.map(lambda path: os.truncate(path, 0), paths))
        if paths:
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)
        self._written = []
        self._drop()

    def close(self) -> None:
        """End its threads and empty its files; whoever made the folder removes it."""
        self._tier.shutdown()
        self._written = self._resident
        self.settle()
        self._emptying.shutdown()
        self._manager.shutdown()

    def _drop(self) -> None:
        if self.direct:
            return
        for key in self._resident:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self._tier.file_mapper.get_file_name(key), os.O_RDONLY)
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def _new_key() -> bytes:
    return os.urandom(32) + b"\0\0\0\0"
