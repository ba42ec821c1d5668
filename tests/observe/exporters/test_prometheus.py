import json
import math
import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_rl.observe.exporters.grafana import ALERTS, PANELS, alerts, dashboard
from megatron_rl.observe.exporters.prometheus import PrometheusServer, family_name
from megatron_rl.observe.metrics_table import AREAS
from tests.observe.exporters.rows import row


def scrape(server: PrometheusServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What the official parser makes of a scrape."""
    address = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(source: str, label: str = "", what: str = "") -> frozenset[tuple[str, str]]:
    return frozenset({"source": source, "label": label, "what": what}.items())


def test_gauges_are_the_latest_and_counts_add_up() -> None:
    with PrometheusServer("127.0.0.1", 0, {"queue.max_staleness": 2}) as server:
        server.add([row("trainer", 1, train__loss=3.0, queue__groups_dropped_zero_variance=4)])
        server.add([row("trainer", 2, train__loss=-1.5, queue__groups_dropped_zero_variance=3),
                    row("queue", 2, label="step_2.aime", eval__accuracy=0.25)])  # fmt: skip
        found = scrape(server)
        assert found["megatron_rl_train_loss", labels("trainer")] == -1.5
        dropped = "megatron_rl_queue_groups_dropped_total"
        assert found[dropped, labels("trainer", what="zero_variance")] == 7
        assert found["megatron_rl_eval_accuracy", labels("queue", "step_2.aime")] == 0.25
        seen = "megatron_rl_last_row_time_seconds"
        assert found[seen, frozenset({("source", "trainer")})] == 1002.0
        key = frozenset({("key", "queue.max_staleness")})
        assert found["megatron_rl_setting", key] == 2


def test_not_a_number_and_names_of_the_users_are_served_too() -> None:
    with PrometheusServer("127.0.0.1", 0, {}) as server:
        server.add([row("trainer", 1, train__loss=math.nan, reward__own_part=0.5, my__own=1.0)])
        found = scrape(server)
        assert math.isnan(found["megatron_rl_train_loss", labels("trainer")])
        assert found["megatron_rl_reward", labels("trainer", what="own_part")] == 0.5
        assert found["megatron_rl_my_own", labels("trainer")] == 1.0


def test_a_taken_port_is_told() -> None:
    with PrometheusServer("127.0.0.1", 0, {}) as server, pytest.raises(OSError):
        PrometheusServer("127.0.0.1", server.port, {})


def served_names() -> set[str]:
    """Every name that the table makes possible."""
    own = {"megatron_rl_last_row_time_seconds", "megatron_rl_setting"}
    for area in AREAS.values():
        for known in area:
            own.add(family_name(known.name) + ("_total" if known.kind == "count" else ""))
    return own


def test_every_query_of_dashboard_and_alerts_names_an_existing_metric() -> None:
    panels = json.loads(dashboard())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = json.loads(alerts())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    assert len(panels) == len(PANELS) and len(rules) == len(ALERTS)
    named = [name for query in queries for name in re.findall(r"megatron_rl_\w+", query)]
    assert len(named) >= len(queries)
    assert set(named) - served_names() == set()
    assert all(query.count("(") == query.count(")") for query in queries)
