"""The code in docs/ runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kvstore

DOCS = Path(__file__).resolve().parents[1] / "docs"


async def test_the_independent_reader_of_the_format_reads_a_lane(tmp_path: Path) -> None:
    keys = [b"key-%d" % index + b"\0\0\0\0" for index in range(20)]
    config = {
        "cpu_bytes_to_use": "2MiB",
        "chunk_bytes": 5000,
        "tiers": [
            {
                "type": "disk",
                "path": str(tmp_path),
                "capacity_bytes": "1MiB",
                "segment_bytes": "100KiB",
            }
        ],
    }
    async with kvstore.open(config) as store:
        await store.put(keys, [bytes([index]) * 5000 for index in range(20)])
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "format.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) < 40
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) == {
        "sys",
        "pathlib",
        "numpy",
        "safetensors",
    }
    (lane,) = tmp_path.glob("*/lane-0")
    done = subprocess.run(
        [sys.executable, "-c", code, str(lane)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert told == {
        key.hex(): ["5000", (bytes([index]) * 8).hex()] for index, key in enumerate(keys)
    }
