"""The kernel compiles for devices that are not here, and moves whole words there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from kvstore.device import kernel  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("word", kernel.TYPES)
def test_a_thread_moves_a_word_with_one_instruction(word: int, generation: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = kernel.constants(word)
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


class NoDevice:
    """Stands for Triton's driver, as far as compiling asks."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_one_compilation_serves_any_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a transfer would wait for the compiler."""
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice())
    lists = torch.zeros(64, dtype=torch.int64)
    compiled = {
        kernel.copy.warmup(
            lists,
            count,
            **kernel.constants(16),
            num_warps=kernel.WARPS,
            grid=(16,),
        ).hash
        for count in (0, 1, 5, 16, 32, 10_000)
    }
    assert len(compiled) == 1
