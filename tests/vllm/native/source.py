"""vLLM's own tests of one release, from its source distribution.

What is downloaded is checked against a digest; the folder appears only when all of it is there, and
is left alone when it is. It gets the tests, what they need to be imported, and a client for
benchmarks: not vLLM's own `tests/conftest.py`, which wants the whole of vLLM's test environment,
and instead of a model that they would fetch by name its configuration.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path

from tests.vllm.overlay import RELEASES, OverlayError, Release, download

SOURCES = {
    "0.32.0": Release("vllm", "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"),
    "0.33.0": RELEASES["0.33.0"],
}

WANTED = (
    "tests/__init__.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_connector/__init__.py",
    "tests/v1/kv_connector/unit/__init__.py",
    "tests/v1/kv_connector/unit/conftest.py",
    "tests/v1/kv_connector/unit/utils.py",
    "tests/v1/kv_connector/unit/offloading_connector/",
    "tests/v1/kv_offload/",
    "benchmarks/multi_turn/",
)

MODEL = "facebook/opt-125m"
CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""The shape of that model, found under its name by tests that run in the folder."""

MARK = ".made"


def fetch(version: str, folder: Path) -> None:
    """Put the tests of a release below `folder`, unless they are there already.

    Raises:
        OverlayError: if they cannot be had, or are not as expected; the folder is then not there.
    """
    if version not in SOURCES:
        raise OverlayError(f"vLLM {version}: there are tests of {', '.join(SOURCES)} only")
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if folder.exists() and not (folder / MARK).is_file():
        raise OverlayError(f"{folder} is there, and not made by this script")
    if folder.exists() and (folder / MARK).read_text() == made_by:
        return
    print(f"fetching the tests of vLLM {version} (once)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as name:
        work = Path(name)
        new = work / "new"
        new.mkdir()
        _unpack(download(version, SOURCES[version], work), version, new)
        model = new / MODEL
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(CONFIG, indent=1))
        (new / MARK).write_text(made_by)
        if folder.exists():
            folder.rename(work / "old")
        new.rename(folder)


def _unpack(archive: Path, version: str, new: Path) -> None:
    top = f"vllm-{version}/"
    with tarfile.open(archive) as source:
        members = []
        for member in source.getmembers():
            member.name = member.name.removeprefix(top)
            if member.name.startswith(WANTED):
                members.append(member)
        source.extractall(new, members, filter="data")
    missing = [name for name in WANTED if not (new / name).exists()]
    if missing:
        raise OverlayError(f"the source distribution of vLLM {version} lacks {missing}")
