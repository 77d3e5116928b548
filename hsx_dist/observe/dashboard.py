"""Files for a cluster's monitoring: a Grafana dashboard and Prometheus alerts. ``hsx dashboards DIR`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from hsx_dist.config.urls import check_no_credentials
from hsx_dist.observe.panels import ALERTS, ROWS, Panel
from hsx_dist.store.output_file import output_file, writable


def grafana() -> dict[str, Any]:
    """The dashboard, as Grafana imports it. A viewer chooses the data source."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        width = 24 // len(row)
        for i, panel in enumerate(row):
            place = {"x": i * width, "y": y + 1, "w": width, "h": 8}
            panels.append({"id": len(panels) + 1, **_timeseries(panel, source), "gridPos": place})
        y += 9
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": source,
            "query": {"query": "label_values(ray_hsx_rows_left, run)", "refId": "runs"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]
    return {
        "uid": "hsx-dist",
        "title": "Hidden states (hsx_dist)",
        "tags": ["hsx_dist", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": panels,
    }


def _timeseries(panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.question,
        "description": panel.text,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + k), "expr": expression, "legendFormat": legend, "datasource": source}
            for k, (expression, legend) in enumerate(panel.queries)
        ],
    }


def alert_rules() -> dict[str, Any]:
    """The alerts as a file of Prometheus's ``rule_files``."""
    rules = [
        {
            "alert": a.name,
            "expr": a.expression,
            "for": f"{a.minutes}m",
            "labels": {"severity": a.severity},
            "annotations": {"summary": a.summary, "description": a.what_to_do},
        }
        for a in ALERTS
    ]
    return {"groups": [{"name": "hsx_dist", "rules": rules}]}


def prometheus_rule() -> dict[str, Any]:
    """The alerts as a ``PrometheusRule`` for the Prometheus operator on Kubernetes."""
    metadata = {"name": "hsx-dist", "labels": {"release": "prometheus"}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": alert_rules(),
    }


def write_dashboards(folder: Path) -> list[Path]:
    """Write ``hsx-grafana.json``, ``hsx-alerts.yml`` and ``hsx-prometheusrule.yaml`` into ``folder``."""
    check_no_credentials(str(folder))
    with writable(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    files = {
        "hsx-grafana.json": json.dumps(grafana(), indent=1, ensure_ascii=False) + "\n",
        "hsx-alerts.yml": yaml.safe_dump(alert_rules(), sort_keys=False, width=120, allow_unicode=True),
        "hsx-prometheusrule.yaml": yaml.safe_dump(prometheus_rule(), sort_keys=False, width=120, allow_unicode=True),
    }
    for name, text in files.items():
        with output_file(folder / name) as f:
            f.write(text.encode())
    return [folder / name for name in files]
