"""The files of dashboards and alerts, and the alerts' results for made-up series."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import hsx_dist
from hsx_dist.observe.dashboard import grafana, write_dashboards
from hsx_dist.observe.metrics import METRICS
from hsx_dist.observe.panels import ALERTS, expressions

ROOT = Path(hsx_dist.__file__).parents[1]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def test_the_dashboards_in_the_checkout_equal_those_that_the_code_writes(tmp_path):
    for path in write_dashboards(tmp_path):
        assert path.read_text() == (ROOT / "dashboards" / path.name).read_text(), "run `make tables`"


def test_every_expression_uses_names_that_are_exported_and_every_metric_is_asked_for():
    known = {m.in_ray for m in METRICS}
    used = set()
    for what, expression in expressions():
        names = set(re.findall(r"ray_hsx_\w+", expression))
        assert names <= known, what
        used |= names
    silent = {"samples", "skipped", "pages", "page_bytes", "send_seconds", "stored", "failed"}
    assert {m.in_ray for m in METRICS if m.name not in silent} <= used


def test_grafana_panels_have_unique_ids_and_do_not_overlap():
    panels = grafana()["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    questions = [p["title"] for p in panels if p["type"] == "timeseries"]
    assert all(q.endswith("?") for q in questions)
    assert "Is the store slowing the engines?" in questions
    json.dumps(grafana(), allow_nan=False)


#: Alert → a series that makes it fire, in promtool's form, one value per minute.
_RUN = 'run="s3://b/r"'
_FIRING = {
    "HsxNoProgress": {f"ray_hsx_rows_left{{{_RUN}}}": "9x40", f"ray_hsx_receipt_timestamp_seconds{{{_RUN}}}": "60x40"},
    "HsxStoreSlow": {
        f"ray_hsx_store_wait_seconds_total{{{_RUN}}}": "0+30x40",
        f"ray_hsx_engine_seconds_total{{{_RUN}}}": "0+60x40",
    },
    "HsxPutsFail": {f"ray_hsx_puts_total{{{_RUN}}}": "0+2x40", f"ray_hsx_parts_total{{{_RUN}}}": "0+1x40"},
    "HsxRowsFail": {f'ray_hsx_rows_total{{{_RUN},fate="failed"}}': "0+1x40"},
    "HsxReplicasDie": {f"ray_hsx_replica_deaths_total{{{_RUN}}}": "0+1x40"},
    "HsxSpill": {'ray_object_store_memory{Location="SPILLED"}': "4096x40"},
    "HsxBadRows": {
        f"ray_hsx_nonfinite_rows_total{{{_RUN}}}": "0+1x40",
        f"ray_hsx_zero_layers_total{{{_RUN}}}": "0x40",
    },
}
#: The same series for a healthy run: no alert fires.
_WELL = {
    f"ray_hsx_rows_left{{{_RUN}}}": "9x40",
    f"ray_hsx_receipt_timestamp_seconds{{{_RUN}}}": "0+60x40",
    f"ray_hsx_store_wait_seconds_total{{{_RUN}}}": "0+1x40",
    f"ray_hsx_engine_seconds_total{{{_RUN}}}": "0+60x40",
    f"ray_hsx_puts_total{{{_RUN}}}": "0+2x40",
    f"ray_hsx_parts_total{{{_RUN}}}": "0+2x40",
    f'ray_hsx_rows_total{{{_RUN},fate="failed"}}': "0x40",
    f'ray_hsx_rows_total{{{_RUN},fate="stored"}}': "0+5x40",
    f"ray_hsx_replica_deaths_total{{{_RUN}}}": "0x40",
    'ray_object_store_memory{Location="SPILLED"}': "0x40",
    f"ray_hsx_nonfinite_rows_total{{{_RUN}}}": "0x40",
    f"ray_hsx_zero_layers_total{{{_RUN}}}": "0x40",
}


@needs_promtool
def test_each_alert_fires_on_its_condition_and_none_fires_for_a_sound_run(tmp_path):
    assert set(_FIRING) == {a.name for a in ALERTS}
    write_dashboards(tmp_path)

    def case(series: dict[str, str]) -> dict:
        return {"interval": "1m", "input_series": [{"series": s, "values": v} for s, v in series.items()]}

    def alert(name: str, labels: list[dict]) -> dict:
        return {"eval_time": "30m", "alertname": name, "exp_alerts": labels}

    tests = [{**case(_WELL), "alert_rule_test": [alert(a.name, []) for a in ALERTS]}]
    for a in ALERTS:
        of_run = {} if a.name == "HsxSpill" else {"run": "s3://b/r"}
        expected = {"exp_labels": {"severity": a.severity, **of_run}}
        tests.append({**case(_FIRING[a.name]), "alert_rule_test": [alert(a.name, [expected])]})
    rules = yaml.safe_load((tmp_path / "hsx-alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]  # promtool compares them in full, with the values that Prometheus inserts
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_accepts_the_rules_and_the_operator_gets_the_same(tmp_path):
    _, rules, operator = write_dashboards(tmp_path)
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True)
    assert yaml.safe_load(operator.read_text())["spec"] == yaml.safe_load(rules.read_text())
