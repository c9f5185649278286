"""What vLLM is told of kvstore's statistics, and what Prometheus makes of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvstore.core import AGES, BOUNDS, CoreStats, Durations, TenantStats, TierStats
from kvstore.observe.metrics.table import METRICS, Metric
from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.metrics_report import Reporter, full_name, observations

NOT_TOLD = {
    # What other fields are made of, or say in other words.
    "CoreStats": {"free_rows", "chunk_bytes", "loaded", "pins", "tiers", "tenants"},
    "TenantStats": set[str](),
    "TierStats": {
        *("name", "medium", "owned", "store", "free", "room", "segments", "max_segments"),
    },
}
ELSEWHERE = {
    # vLLM counts these bytes itself: `vllm:kv_offload_load_bytes`, `vllm:kv_offload_store_bytes`.
    "CoreStats": {"loaded_bytes", "stored_bytes"},
    "TenantStats": set[str](),
    "TierStats": set[str](),
}
OF_OTHER_FACES = {
    # Leases of the library; calls that matched nothing, which vLLM makes after every reset.
    "CoreStats": {"outlived", "watched_rows", "stray"},
    "TenantStats": set[str](),
    "TierStats": set[str](),
}


def disk(medium: str = "disk", *, owned: bool = True, **values: Any) -> TierStats:
    return TierStats("disk:/some/path", medium, owned=owned, **values)


def values(samples: list[Any]) -> dict[tuple[str, ...], Any]:
    return {(metric.name, *labels): value for metric, labels, value in samples}


class Spy:
    """Knows which of its object's attributes were looked at."""

    def __init__(self, of: object, seen: set[str]) -> None:
        self._of = of
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(name)
        return getattr(self._of, name)


def source_of(metric: Metric) -> CoreStats | TierStats | TenantStats:
    if metric.of == "core":
        return CoreStats(rows=1)
    return TenantStats() if metric.of == "tenant" else disk()


@pytest.mark.parametrize(
    "of", [CoreStats(rows=1), disk(), TenantStats()], ids=lambda of: type(of).__name__
)
def test_every_number_of_the_core_is_told_or_there_is_a_reason(of: Any) -> None:
    seen: set[str] = set()
    for metric in METRICS:
        if type(source_of(metric)) is type(of):
            metric.take(Spy(of, seen))
    name = type(of).__name__
    untold = {field.name for field in fields(of)} - seen
    assert untold == NOT_TOLD[name] | ELSEWHERE[name] | OF_OTHER_FACES[name]


def test_only_what_can_become_less_is_a_gauge() -> None:
    for metric in METRICS:
        seen: set[str] = set()
        of: Any = source_of(metric)
        metric.take(Spy(of, seen))
        now = {field.name: "now" in field.metadata for field in fields(of)}
        assert {now[name] for name in seen} == {metric.kind == "gauge"}, metric.name


def test_names_are_as_prometheus_wants_them() -> None:
    names = [full_name(metric) for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        timed = metric.name.endswith("_seconds")
        assert timed if metric.kind == "histogram" else metric.kind == "counter" or not timed
        assert bool(metric.bounds) == (metric.kind == "histogram")


def test_vllm_is_told_of_every_metric_with_its_labels() -> None:
    definitions = KVStoreOffloadingSpec.build_metric_definitions({})
    assert list(definitions) == [full_name(metric) for metric in METRICS]
    for metric in METRICS:
        told = definitions[full_name(metric)]
        assert (told.documentation, told.labelnames) == (metric.text, metric.labels)
        assert metric.kind in type(told).__name__.lower()
        assert getattr(told, "buckets", ()) == metric.bounds


def test_every_counter_is_told_at_first_and_then_what_has_grown() -> None:
    reporter = Reporter()
    tenants = {"alice": TenantStats(loaded=2)}
    stats = CoreStats(rows=10, misses=3, tiers=[disk(written=5)], tenants=tenants)
    first = values(reporter.increments(stats))
    counters = [metric for metric in METRICS if metric.kind == "counter"]
    assert len(first) == sum(metric.of != "store" for metric in counters)
    assert first["tenant_loaded_chunks", "alice"] == 2
    assert (first["missed_keys",], first["tier_written_chunks", "disk"]) == (3, 5)
    assert first["timeouts",] == 0
    assert reporter.increments(stats) == []
    later = replace(stats, misses=7, tiers=[disk(written=6)])
    assert values(reporter.increments(later)) == {
        ("missed_keys",): 4,
        ("tier_written_chunks", "disk"): 1,
    }


def test_tiers_are_told_apart_and_of_others_tiers_only_what_this_engine_knows() -> None:
    tiers = [
        disk(written=1, loaded=4),
        disk(owned=False, loaded=8),
        disk("remote", written=2),
        disk(written=3),
        disk(owned=False),
    ]
    told = values(Reporter().increments(CoreStats(rows=1, tiers=tiers)))
    written = {key[1]: value for key, value in told.items() if key[0] == "tier_written_chunks"}
    assert written == {"disk": 1, "remote": 2, "disk-2": 3}
    loaded = {key[1]: value for key, value in told.items() if key[0] == "loaded_tier_chunks"}
    assert loaded == {"disk": 4, "disk:others": 8, "remote": 0, "disk-2": 0, "disk-2:others": 0}


def test_a_gauge_is_what_is_there_now() -> None:
    tiers = [disk(chunks=3, used_bytes=300, free_bytes=700, stalled=True)]
    stats = CoreStats(rows=8, chunks=6, busy_rows=2, waiting=5, tiers=tiers)
    told = values(Reporter().gauges(stats))
    assert (told["host_used_ratio",], told["host_busy_ratio",], told["waiting_requests",]) == (
        0.75,
        0.25,
        5,
    )
    assert told["tier_used_bytes", "disk"] + told["tier_free_bytes", "disk"] == 1000
    assert told["tier_stalled", "disk"] == 1


times = st.lists(st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0.0, 200.0)), max_size=30)


@given(times, times)
def test_what_was_observed_falls_into_the_same_buckets_with_the_same_sum(
    earlier: list[float], later: list[float]
) -> None:
    before = Durations()
    for seconds in earlier:
        before.add(seconds)
    after = before.copy()
    for seconds in later:
        after.add(seconds)
    again = before.copy()
    for seconds in observations(before, after):
        again.add(seconds)
    assert again.buckets == after.buckets
    assert again.seconds == pytest.approx(after.seconds, rel=1e-6, abs=1e-6)


def test_a_time_that_came_alone_is_told_as_it_was() -> None:
    reporter = Reporter()
    assert reporter.observed(CoreStats(rows=1)) == []
    waits, ages = Durations(), Durations(bounds=AGES)
    waits.add(0.137)
    told = values(reporter.observed(CoreStats(rows=1, waits=waits)))
    assert told == {("wait_seconds",): [pytest.approx(0.137)]}
    ages.add(5000.0)
    told = values(reporter.observed(CoreStats(rows=1, waits=waits, ages=ages)))
    assert told == {("host_eviction_age_seconds",): [pytest.approx(5000.0)]}


def test_a_store_has_metrics_of_its_own_and_of_what_is_copied_to_it() -> None:
    reporter = Reporter()
    store = TierStats("redis://host", "remote", owned=False, store=True, written=5, asked=7)
    told = values(reporter.increments(CoreStats(rows=10, tiers=[disk(), store])))
    assert told["store_asked_chunks", "remote"] == 7
    assert told["tier_written_chunks", "remote"] == 5
    assert ("store_asked_chunks", "disk") not in told
    assert ("tier_evicted_chunks", "remote") not in told
