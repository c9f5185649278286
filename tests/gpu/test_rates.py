"""The benchmark of copies runs: over a pretended device, whose rates mean nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.gpu.pretend import PretendCuda, PretendDriver
from tiers.pinned import PinnedRegion

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_copy.py"


@pytest.mark.parametrize("page", [16 * 1024, 2**20])
def test_jobs_of_the_benchmark_are_copied_whole(page: int) -> None:
    spec = importlib.util.spec_from_file_location("gpu_copy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_copy"] = module
    spec.loader.exec_module(module)
    region = PinnedRegion.private(4, module.ROW_BYTES)
    cuda = PretendCuda()
    calls = PretendDriver(cuda)
    bed = module.Bed(region, page, 2 * module.ROW_BYTES, "batch", cuda=cuda, calls=calls)
    blocks, rows = bed.job()
    ticket = bed.copies.store(blocks, rows)
    ticket.wait()
    assert ticket.size == 2 * module.ROW_BYTES
    assert bed.rate("load+store") > 0
    region.close()
