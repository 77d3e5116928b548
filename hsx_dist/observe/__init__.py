"""Observing a run: progress, logs, metrics, dashboards, and the report."""
