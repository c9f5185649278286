"""Lets SGLang be imported without what it wants of a GPU.

The pools, the controller and the backends of its hierarchical cache are its own and run; the
packages below are imported beside them, and used by none of these.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

WANTED = {"IPython", "flashinfer", "gguf", "orjson", "sgl_kernel", "soundfile", "torchao"}
WANTED |= {"torchvision", "traitlets"}

RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
RANKS |= {"attn_dcp_size": 1, "attn_dcp_rank": 0}


class Pretender(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has every name."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in WANTED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: every name is there."""


def prepare(folder: str) -> None:
    """Make the unpacked SGLang in `folder` importable; this process is its only rank."""
    # Asked first, it remembers that there is no torchvision.
    from transformers.utils import import_utils

    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        getattr(import_utils, name, bool)()
    sys.meta_path.append(Pretender())
    sys.path.append(folder)
    warnings.filterwarnings("ignore", message="Only CUDA")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    from sglang.srt.managers import cache_controller
    from sglang.srt.runtime_context import get_parallel

    get_parallel().override_permanently(**RANKS)
    cache_controller.is_dp_attention_enabled = lambda: False
    # Compiled at its first use, which can take longer than a test waits for an answer.
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str([0])
