"""Metrics: the names, the bounds of labels, and that deployed and documented names exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.service.observability.metrics import MAX_VALUES, Metrics
from holdfast.service.problems import Unavailable
from tests.support.parts import require

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: Of Prometheus itself: whether a target answers, and what a histogram is made of.
PROMETHEUS_OWN = {"up"}
_QUERY_WORDS = re.compile(r"(?<![0-9.])[a-zA-Z_:][a-zA-Z0-9_:]*")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


# --- what is counted ---------------------------------------------------------------------------------------------


def test_the_five_of_the_seed_are_there_under_their_names(metrics: Metrics) -> None:
    metrics.set_sessions({("terminal", "IDLE"): 2, ("shell", "BUSY"): 1})
    metrics.session_ended("terminal", "idle", 61.0)
    metrics.command_ended("shell", 0.3)
    metrics.printed("terminal", 4096)
    metrics.violated("MEMORY_LIMIT")
    text = metrics.render()[0].decode()
    for line in (
        'sessions_active{kind="terminal",state="IDLE"} 2.0',
        'sessions_active{kind="terminal",state="BUSY"} 0.0',
        'session_duration_seconds_bucket{kind="terminal",le="300.0",reason="idle"} 1.0',
        'command_latency_seconds_sum{kind="shell"} 0.3',
        'output_throughput_bytes_total{kind="terminal"} 4096.0',
        'policy_violations_total{reason="MEMORY_LIMIT"} 1.0',
    ):
        assert f"\n{line}\n" in text
    metrics.set_sessions({})
    assert value(metrics, "sessions_active", kind="terminal", state="IDLE") == 0


def test_a_scrape_is_what_prometheus_parses(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"sessions_active", "holdfast_rpc_calls", "process_resident_memory_bytes"} <= families
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_our_own_memory_and_descriptors_are_told(metrics: Metrics) -> None:
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 1_000_000
    assert (value(metrics, "process_open_fds") or 0) >= 3


def test_two_services_in_one_process_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.violated("A")
    assert value(other, "policy_violations_total", reason="A") is None


def test_calls_are_counted_by_front_method_and_code(metrics: Metrics) -> None:
    def calls(code: str) -> float | None:
        return value(metrics, "holdfast_rpc_calls_total", front="grpc", method="SendInput", code=code)

    for code in ("OK", "PERMISSION_DENIED", "CANCELLED", "INTERNAL"):
        call = metrics.begin_call("grpc", "SendInput")
        assert value(metrics, "holdfast_rpc_in_flight", front="grpc") == 1
        assert metrics.end_call(call, code) >= 0
    assert [calls(code) for code in ("OK", "PERMISSION_DENIED", "CANCELLED", "INTERNAL")] == [1, 1, 1, 1]
    assert value(metrics, "holdfast_rpc_in_flight", front="grpc") == 0
    assert value(metrics, "holdfast_rpc_seconds_count", front="grpc", method="SendInput") == 4


def test_an_append_that_fails_is_counted_and_not_timed(metrics: Metrics) -> None:
    with metrics.audit_append():
        pass
    with pytest.raises(Unavailable), metrics.audit_append():
        raise Unavailable("no database", reason="STORE")
    assert value(metrics, "holdfast_audit_append_failures_total") == 1
    assert value(metrics, "holdfast_audit_append_seconds_count") == 1
    with pytest.raises(KeyError), metrics.store("sessions.find"):
        raise KeyError
    assert value(metrics, "holdfast_store_seconds_count", operation="sessions.find") == 1


def test_labels_are_bounded_whatever_callers_send(metrics: Metrics) -> None:
    for number in range(MAX_VALUES * 3):
        metrics.end_call(metrics.begin_call("http", f"Method{number}"), "OK")
        metrics.violated(f"REASON_{number}")
        metrics.refused(f"REASON_{number}")
    for name in ("holdfast_rpc_calls", "policy_violations", "holdfast_requests_refused"):
        (family,) = (family for family in metrics.registry.collect() if family.name == name)
        series = [sample for sample in family.samples if sample.name.endswith("_total")]
        assert len(series) == MAX_VALUES + 1
    assert value(metrics, "policy_violations_total", reason="other") == MAX_VALUES * 2
    assert value(metrics, "policy_violations_total", reason="REASON_0") == 1


# --- what is deployed and documented -----------------------------------------------------------------------------


def series(metrics: Metrics) -> set[str]:
    """Every name that a query may use."""
    names = set(metrics.names())
    for family in metrics.registry.collect():
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def named_in(query: str) -> set[str]:
    """The metrics of a PromQL expression: words before a brace or bracket, or alone, that are no function's."""
    query = re.sub(r'"[^"]*"', '""', query)
    query = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", query)
    query = re.sub(r"\{[^}]*\}", "{}", query)
    query = re.sub(r"\[[^\]]*\]", "[]", query)
    words = {match[0]: query[match.end() :].lstrip()[:1] for match in _QUERY_WORDS.finditer(query)}
    keywords = {"and", "or", "unless", "bool", "offset", "Inf", "NaN"}
    return {word for word, after in words.items() if after != "(" and word not in keywords}


def test_the_reader_of_queries_finds_the_metrics() -> None:
    query = (
        'sum by (code) (rate(holdfast_rpc_calls_total{code!~"OK|x"}[5m])) / on() group_left() up{job="h"} > 0.05'
    )
    assert named_in(query) == {"holdfast_rpc_calls_total", "up"}
    assert named_in("histogram_quantile(0.99, sum by (le) (rate(a_bucket[5m])))") == {"a_bucket"}


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parsed = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())
    return [rule for group in parsed["groups"] for rule in group["rules"]]


def test_every_metric_of_the_alert_rules_exists(metrics: Metrics) -> None:
    found = rules()
    for rule in found:
        names = named_in(rule["expr"])
        assert names, rule["alert"]
        assert names - PROMETHEUS_OWN <= series(metrics), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
    # The alerts that are required, and the one for a missing scrape.
    wanted = {
        "HoldfastHighFailureRate",
        "HoldfastOrphanedProcesses",
        "HoldfastAbnormalResourceUsage",
        "HoldfastAuditAppendFailing",
        "HoldfastLeaseChurn",
        "HoldfastNotScraped",
    }
    assert wanted <= {rule["alert"] for rule in found}


def queries(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "expr" in node:
            yield node["expr"]
        for each in node.values():
            yield from queries(each)
    elif isinstance(node, list):
        for each in node:
            yield from queries(each)


def test_every_metric_of_the_dashboard_exists(metrics: Metrics) -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    found = list(queries(dashboard))
    assert len(found) >= 15
    for query in found:
        assert named_in(query.replace("$__rate_interval", "5m")) <= series(metrics), query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    locations = [tuple(panel["gridPos"][side] for side in "xy") for panel in dashboard["panels"]]
    assert len(locations) == len(set(locations))
    for name in (
        "sessions_active",
        "session_duration",
        "command_latency",
        "output_throughput",
        "policy_violations",
    ):
        assert any(name in query for query in found), name


def test_promtool_accepts_the_alert_rules_and_their_tests(tmp_path: Path) -> None:
    require("promtool")
    for arguments in (
        ["check", "rules", "prometheus-alerts.yml"],
        ["test", "rules", "prometheus-alerts-test.yml"],
    ):
        done = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_is_documented_and_no_other(metrics: Metrics) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    section = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([a-z_]+)` \|", section, flags=re.MULTILINE))
    ours = {name for name in metrics.names() if not name.startswith("process_")}
    assert listed - {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} == ours
