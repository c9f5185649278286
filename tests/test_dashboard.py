"""The dashboard and the alerts of docs/grafana name only metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dashboard.queries import filled, legend, metric_names, panels

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "kvstore.json").read_text())
ALERTS = (GRAFANA / "alerts.yml").read_text()
EXPRESSIONS = [target["expr"] for panel in panels(DASHBOARD) for target in panel["targets"]]
METRIC_NAMES = {
    line.split()[0]: line.split()[1] for line in (GRAFANA / "metrics.txt").read_text().splitlines()
}
"""The kinds of all metrics that a real server has told, by name."""


def series() -> set[str]:
    """Every name that a query may use."""
    found: set[str] = set()
    for name, kind in METRIC_NAMES.items():
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + part for part in parts}
    return found


def ours() -> set[str]:
    """The metrics that kvstore's spec defines, as Prometheus names them."""
    pytest.importorskip("vllm")
    from kvstore.observe.metrics.table import METRICS
    from kvstore.vllm.metrics_report import full_name

    return {full_name(metric) + "_total" * (metric.kind == "counter") for metric in METRICS}


def test_a_real_server_has_told_every_metric_that_the_spec_defines_and_no_other() -> None:
    told = {name for name in METRIC_NAMES if name.startswith("vllm:kvstore_")}
    assert {name for name in told if not name.endswith("_created")} == ours()


@pytest.mark.parametrize("text", [*EXPRESSIONS, ALERTS])
def test_queries_name_only_metrics_that_a_real_server_has_told(text: str) -> None:
    assert metric_names(text)
    assert metric_names(text) <= series()


def test_every_metric_of_kvstore_is_drawn() -> None:
    drawn = {
        re.sub("_(bucket|sum|count)$", "", name) for name in metric_names(" ".join(EXPRESSIONS))
    }
    assert ours() <= drawn


def test_rates_are_of_counters_and_levels_are_of_gauges() -> None:
    for expression in EXPRESSIONS:
        counted = set(re.findall(r"(?:rate|increase)\((vllm:\w+)", filled(expression)))
        for name in metric_names(expression):
            kind = METRIC_NAMES.get(re.sub("_(bucket|sum|count)$", "", name), "")
            assert (name in counted) == (METRIC_NAMES.get(name, kind) != "gauge"), expression


def test_every_panel_says_what_is_normal_and_has_a_query_of_its_server() -> None:
    for panel in panels(DASHBOARD):
        assert len(panel["description"]) > 80, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"]["uid"] == "${datasource}"
            assert '{instance=~"$instance"' in target["expr"]


def test_the_names_of_other_servers_are_asked_for_where_they_differ() -> None:
    (prefix,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "prefix")
    assert [each["value"] for each in prefix["options"]] == ["vllm:kvstore_", "kvstore_"]
    assert "vllm:kvstore_" not in " ".join(EXPRESSIONS)


def test_panels_lie_side_by_side_in_rows_that_ask_a_question() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not covered & cells, panel["title"]
        cells |= covered
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert len(rows) == 8
    assert all(title.endswith("?") for title in rows)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_files_say_nothing_of_the_machine_they_were_made_on() -> None:
    for name in ("kvstore.json", "alerts.yml", "metrics.txt"):
        text = (GRAFANA / name).read_text()
        assert not re.search(r"127\.0\.0\.1|localhost|/tmp|/home|/root|/work", text), name


def test_the_page_of_alerts_has_each_of_them() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `KV"))
    assert re.findall(r"`(\w+)`", rows) == re.findall(r"- alert: (\w+)", ALERTS)


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{n}", "expr": filled(e)} for n, e in enumerate(EXPRESSIONS)]
    # YAML is a superset of JSON.
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_promtool_takes_the_alerts() -> None:
    promtool("check", "rules", str(GRAFANA / "alerts.yml"))


def test_alerts_that_compare_two_rates_fire(tmp_path: Path) -> None:
    """`check rules` takes an expression whose sides have no labels in common."""
    rates = {
        "KVStoreStoreTakesNoCopies": (
            'vllm:kvstore_tier_refused_chunks_total{instance="a",tier="remote"}',
            'vllm:kvstore_stored_chunks_total{instance="a"}',
        ),
        "KVStoreStoreIsSilent": (
            'vllm:kvstore_store_unanswered_chunks_total{instance="a",tier="remote"}',
            'vllm:kvstore_store_asked_chunks_total{instance="a",tier="remote"}',
        ),
        "KVStoreChunksAreShed": (
            'vllm:kvstore_shed_chunks_total{instance="a"}',
            'vllm:kvstore_stored_chunks_total{instance="a"}',
        ),
        "KVStoreWaitsTimeOut": (
            'vllm:kvstore_timeouts_total{instance="a"}',
            'vllm:kvstore_deferrals_total{instance="a"}',
        ),
    }
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": each, "values": "0+60x120"} for each in both],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                    "eval_time": "110m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for name, both in rates.items()
    ]
    path = tmp_path / "tests.json"
    rules = str(GRAFANA / "alerts.yml")
    path.write_text(json.dumps({"rule_files": [rules], "tests": tests}))
    promtool("test", "rules", str(path))


def test_a_query_that_is_no_promql_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    rules = [{"record": "query:0", "expr": "sum(rate(vllm:x[1m])"}]
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    with pytest.raises(AssertionError):
        promtool("check", "rules", str(path))


def test_a_legend_names_the_labels_of_its_series() -> None:
    assert legend("read from {{tier}}", {"tier": "disk-2"}) == "read from disk-2"


def test_the_page_lists_every_metric_with_its_kind_and_meaning() -> None:
    pytest.importorskip("vllm")
    from kvstore.observe.metrics.table import METRICS

    page = (ROOT / "docs" / "watching.md").read_text().partition("| metric | kind, label |")[2]
    listed = re.findall(r"^\| `([a-z_]+)` \| (\w+)(, `\w+`)? \| (.*) \|$", page, re.MULTILINE)
    assert listed == [
        (
            m.name + "_total" * (m.kind == "counter"),
            m.kind,
            "".join(f", `{x}`" for x in m.labels),
            m.text,
        )
        for m in METRICS
    ]
