"""Our eviction policies in vLLM's own CPU manager."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvstore.vllm.version import HAS_POSITIONS

GROUPS, CHUNKS = 2, 3


@pytest.mark.skipif(not HAS_POSITIONS, reason="this vLLM does not tell where a key ends")
@pytest.mark.parametrize("reused", [False, True])
def test_of_a_finished_request_the_last_chunks_of_every_group_leave_first(reused: bool) -> None:
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(
        num_chunks=GROUPS * CHUNKS,
        cache_policy="kvstore-lru",
        cache_policy_module_path="kvstore.vllm.policy",
    )
    groups = [
        [make_offload_key(b"%d-%d" % (group, place), group) for place in range(CHUNKS)]
        for group in range(GROUPS)
    ]
    keys = [key for group in groups for key in group]
    for name in ("first", "second")[: 1 + reused]:
        request = ReqContext(req_id=name)
        for group in groups:
            for place, key in enumerate(group, 1):
                request.set_offload_key_position(key, 16 * place)
        assert manager.prepare_store(keys, request) is not None
        manager.complete_store(keys, request)
        manager.on_request_finished(request)
    others = [make_offload_key(b"other-%d" % index, 0) for index in range(GROUPS)]
    out = manager.prepare_store(others, ReqContext(req_id="other"))
    assert out is not None
    assert set(out.evicted_keys) == {group[-1] for group in groups}
