"""The kernel compiles for devices that are not here, and moves whole words there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from kvstore.device import kernel  # noqa: E402


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here")
@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("word", kernel.TYPES)
def test_a_thread_moves_a_word_with_one_instruction(
    word: int, generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    constants = {
        "TYPE": kernel.TYPES[word],
        "WORD": word,
        "TYPE_BYTES": min(word, 8),
        "TILE": kernel.TILE,
    }
    signature = {"lists": "*i64", "count": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel.copy, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", generation, 32), options={"num_warps": kernel.WARPS}
    )
    code = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    for act in ("ld", "st"):
        # Those of the list itself have no condition.
        found = re.findall(rf"@%p\d+ {act}\.global(?:\.v(\d))?\.b(\d+)", code)
        widths = {int(vector or 1) * int(bits) // 8 for vector, bits in found}
        assert widths == {word}, found
    # Several reads are under way before the first is written.
    acts = re.findall(r"@%p\d+ (ld|st)\.global", code)
    assert acts[: len(acts) // 2] == ["ld"] * (len(acts) // 2)
    assert len(acts) >= 8
