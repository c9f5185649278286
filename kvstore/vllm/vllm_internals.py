"""Facts that vLLM does not hand over, found in the frames of the calling connector.

vLLM builds a spec from an `OffloadingConfig`, which names the model and says little else, and
opens a request with a `ReqContext`, which says nothing of its adapter. Its connector has both at
hand, in the frames that call: `vllm_config` and `kv_cache_config` where the manager is built,
`request` where a request begins. What is found is used only if it belongs to the call: it must
have the very same table of options, or the request's id. The engine whose scheduler builds the
manager has an executor, and the engine that pauses forgets caches in a function of its own.
Nothing else is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "executor_of",
    "kv_cache_config_of",
    "request_of",
    "resets_for_pause",
    "vllm_config_of",
]

MAX_FRAMES = 16

ENGINE, PAUSING = "vllm.v1.engine.core", "_reset_caches"


def vllm_config_of(extra_config: Mapping[str, Any]) -> Any | None:
    """The `VllmConfig` whose connector options are this very `extra_config`, or None."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    if _owns(current, extra_config):
        return current
    for names in _callers():
        if _owns(names.get("vllm_config"), extra_config):
            return names["vllm_config"]
    return None


def kv_cache_config_of(extra_config: Mapping[str, Any]) -> Any | None:
    """The `KVCacheConfig` beside the `VllmConfig` with this very `extra_config`, or None."""
    for names in _callers():
        found = names.get("kv_cache_config")
        if found is not None and _owns(names.get("vllm_config"), extra_config):
            return found
    return None


def _owns(config: Any, extra_config: Mapping[str, Any]) -> bool:
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer is not None and transfer.kv_connector_extra_config is extra_config


def request_of(req_id: str) -> Any | None:
    """The request `req_id` whose arrival is being told, or None."""
    for names in _callers(frames=4):
        found = names.get("request")
        if getattr(found, "request_id", None) == req_id and hasattr(found, "lora_request"):
            return found
    return None


def executor_of() -> Any | None:
    """The executor of the engine whose scheduler is being built, or None."""
    for names in _callers():
        executor = getattr(names.get("self"), "model_executor", None)
        if callable(getattr(executor, "collective_rpc", None)):
            return executor
    return None


def resets_for_pause() -> bool:
    """Whether an engine forgets its caches because it pauses, to sleep or to take new weights."""
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame.f_code.co_name == PAUSING and frame.f_globals.get("__name__") == ENGINE:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _callers(frames: int = MAX_FRAMES) -> Iterator[Mapping[str, Any]]:
    """The local names of each function that calls the function that asks."""
    frame = sys._getframe(1).f_back
    for _ in range(frames):
        if frame is None:
            return
        yield frame.f_locals
        frame = frame.f_back
