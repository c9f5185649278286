"""`python -m tests.vllm.native VERSION`: fetch vLLM's tests, run them, say what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm.native.source import fetch
from tests.vllm.native.verdict import describe, judge
from tests.vllm.overlay import BASE, OverlayError, make

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

MODULES = (
    "kv_offload/cpu/test_manager.py",
    "kv_offload/cpu/policies/test_factory.py",
    "kv_offload/cpu/test_gpu_worker.py",
    "kv_offload/tiering/test_tiering_offloading.py",
    "kv_offload/test_factory.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
    "kv_connector/unit/offloading_connector/test_events.py",
    "kv_connector/unit/offloading_connector/test_metrics.py",
    "kv_connector/unit/offloading_connector/test_worker.py",
)
"""Modules of vLLM's `tests/v1` that have a place for a part of ours."""

WHAT = {
    "manager": "vLLM's CPU manager: `KVStoreOffloadingManager`",
    "tiering": "vLLM's tiering manager: the same with a disk",
    "policy": "policies in vLLM's CPU manager: ours",
    "connector": "mocks below vLLM's scheduler and connector: manager, rows and `HostCopyWorker`",
    "worker": "vLLM's CPU worker: `HostCopyWorker`",
    "spec": "a spec that a package adds: `KVStoreOffloadingSpec`",
}


def run(version: str) -> int:
    """Run the tests of a release on that release; 0 if all is as expected."""
    minor = version.rpartition(".")[0]
    folder = ROOT / f".vllm-tests-{minor}"
    fetch(version, folder)
    # vLLM's tests are called `tests`, like ours: theirs come first, and ours by other names.
    paths = [folder, ROOT / "tests" / "vllm", ROOT]
    if version != BASE:
        overlay = ROOT / f".vllm-{minor}"
        make(version, overlay)
        paths.insert(1, overlay)
    with tempfile.TemporaryDirectory() as name:
        outcomes = Path(name) / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini")]
        command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "-p", "native.plugin"]
        command += [f"tests/v1/{module}" for module in MODULES]
        ended = subprocess.run(
            command,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "KVSTORE_OUTCOMES": str(outcomes),
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # Without an outcome of each test there is nothing to judge.
        if ended.returncode not in (0, 1) or not outcomes.exists():
            print(ended.stdout)
            return ended.returncode or 1
        found = judge(version, json.loads(outcomes.read_text()))
    print(describe(version, found, WHAT))
    for fault in found.faults:
        print(f"\n{fault}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1]))
    except OverlayError as error:
        sys.exit(f"native: {error}")
