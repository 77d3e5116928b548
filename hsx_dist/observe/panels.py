"""The queries of the dashboard and the alerts, as tables. ``dashboard`` writes files from them.

A panel or an alert is an expression in PromQL over ``ray_hsx_*`` and a few of Ray's metrics, which Ray's dashboard uses
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Variables that Grafana replaces: the chosen run, and an interval that suits the scrape interval.
_OF = '{run=~"$run"}'
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """One question and the expressions that answer it: (PromQL, legend)."""

    question: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """``value`` compared with ``threshold`` for ``minutes``. The alert fires only while ``while_`` is true."""

    name: str
    value: str
    threshold: str
    minutes: int
    severity: str
    summary: str
    what_to_do: str
    while_: str = ""

    @property
    def expression(self) -> str:
        return f"{self.value} {self.threshold}" + (f" and on (run) {self.while_}" if self.while_ else "")

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The expressions that must have data for every scraped run, whether the alert fires or not."""
        return (self.value, self.while_.partition(" > ")[0]) if self.while_ else (self.value,)


def rate(name: str, by: str = "run", *, match: str = "") -> str:
    """A counter's increase per second, summed over all labels that are not in ``by``."""
    of = _OF if not match else _OF[:-1] + f",{match}}}"
    return f"sum by ({by}) (rate(ray_hsx_{name}_total{of}[{_RATE}]))"


def share(part: str, whole: str, by: str = "run") -> str:
    """The share of ``part`` in the seconds counted as ``whole``."""
    # The denominator is 0 while nothing runs. The result is then 0, because a gap would look like a lost scrape.
    return f"{rate(part, by)} / clamp_min({rate(whole, by)}, 1e-9)"


def total(name: str, by: str = "run") -> str:
    return f"sum by ({by}) (ray_hsx_{name}{_OF})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Does the run make progress?",
        (
            Panel("How many rows are left?", "Rows without an outcome.", "short", ((total("rows_left"), "{{run}}"),)),
            Panel(
                "How do rows end?",
                "Rows per second by outcome; retried rows are computed again.",
                "short",
                ((rate("rows", "fate"), "{{fate}}"),),
            ),
            Panel(
                "When did the last part become durable?",
                "Seconds since the last receipt.",
                "s",
                ((f"time() - max by (run) (ray_hsx_receipt_timestamp_seconds{_OF})", "{{run}}"),),
            ),
            Panel(
                "How many engines work?",
                "Replicas whose engine is up, and tasks under way.",
                "short",
                ((total("replicas_ready"), "replicas"), (total("tasks_open"), "tasks")),
            ),
        ),
    ),
    (
        "How fast is it?",
        (
            Panel(
                "How many tokens per second?",
                "By replica.",
                "short",
                ((rate("tokens", "replica"), "replica {{replica}}"),),
            ),
            Panel(
                "How many bytes become durable?",
                "Raw bytes of states, and the bytes stored for them.",
                "Bps",
                ((rate("raw_bytes"), "raw"), (rate("stored_bytes"), "stored")),
            ),
            Panel(
                "What does compression save?",
                "Raw bytes per stored byte.",
                "short",
                ((f"avg by (writer) (ray_hsx_ratio{_OF})", "writer {{writer}}"),),
            ),
            Panel(
                "Is a task stuck?",
                "Age of the oldest task without an answer.",
                "s",
                ((f"max by (run) (ray_hsx_oldest_task_seconds{_OF})", "{{run}}"),),
            ),
        ),
    ),
    (
        "Waiting by stage",
        (
            Panel(
                "Is the store slowing the engines?",
                "Share of the engines' time in which they only waited for writers and store.",
                "percentunit",
                ((share("store_wait_seconds", "engine_seconds", "replica"), "replica {{replica}}"),),
            ),
            Panel(
                "What do the engines do?",
                "Seconds per second, over all replicas.",
                "s",
                (
                    (
                        f"{rate('engine_seconds')} - {rate('copy_seconds')} - {rate('store_wait_seconds')}",
                        "compute",
                    ),
                    (rate("copy_seconds"), "copy"),
                    (rate("store_wait_seconds"), "wait for the store"),
                    (rate("idle_seconds"), "no task"),
                ),
            ),
            Panel(
                "What do the writers do?",
                "Thread seconds per second, over all writers.",
                "s",
                (
                    (rate("encode_seconds"), "compress"),
                    (rate("put_seconds"), "upload"),
                    (rate("room_wait_seconds"), "wait for room"),
                ),
            ),
            Panel(
                "Do senders wait for credit?",
                "Seconds per second, by replica.",
                "s",
                ((rate("credit_wait_seconds", "replica"), "replica {{replica}}"),),
            ),
        ),
    ),
    (
        "What is under way?",
        (
            Panel(
                "Where are the bytes?",
                "Between cache and writers, at writers without an answer, held by writers.",
                "bytes",
                (
                    (total("ring_bytes"), "ring"),
                    (total("unanswered_bytes"), "unanswered"),
                    (total("held_bytes"), "held by writers"),
                    (total("credit_bytes"), "credit"),
                ),
            ),
            Panel(
                "Are cache blocks held back?",
                "Blocks of ended requests that wait to be copied.",
                "short",
                ((total("blocks_held", "replica"), "replica {{replica}}"),),
            ),
            Panel(
                "How old are waiting pages and segments?",
                "The oldest page that was not sent, and the oldest segment that is in no complete part.",
                "s",
                (
                    (f"max by (run) (ray_hsx_oldest_page_seconds{_OF})", "page"),
                    (f"max by (run) (ray_hsx_oldest_segment_seconds{_OF})", "segment"),
                ),
            ),
            Panel(
                "Does Ray's object store spill?",
                "Bytes of objects in shared memory and on disk, of the whole cluster. There should be none on disk.",
                "bytes",
                (("sum by (Location) (ray_object_store_memory)", "{{Location}}"),),
            ),
        ),
    ),
    (
        "How is the store?",
        (
            Panel(
                "How long does a put take?",
                "Median, 99th percentile and mean, including retries.",
                "s",
                (
                    (f"histogram_quantile(0.5, {rate('put_seconds_bucket', 'le')})", "median"),
                    (f"histogram_quantile(0.99, {rate('put_seconds_bucket', 'le')})", "99 %"),
                    (share("put_seconds", "puts"), "mean"),
                ),
            ),
            Panel(
                "Which calls are retried?",
                "Calls per second that failed and are retried, by error.",
                "short",
                ((rate("store_retries", "error"), "{{error}}"),),
            ),
            Panel(
                "How many parts are stored?",
                "Parts per second, by writer.",
                "short",
                ((rate("parts", "writer"), "{{writer}}"),),
            ),
            Panel(
                "What could not be stored?",
                "Parts per second that failed, by error, and segments whose rows are run again.",
                "short",
                ((rate("failed_parts", "error"), "{{error}}"), (rate("lost_segments"), "segments lost")),
            ),
        ),
    ),
    (
        "Are the states right?",
        (
            Panel(
                "Are there rows that cannot be right?",
                "Rows with NaN or infinity, and layers that are zero throughout.",
                "short",
                ((rate("nonfinite_rows"), "not finite"), (rate("zero_layers"), "zero layers")),
            ),
            Panel("Do replicas die?", "Deaths per second.", "short", ((rate("replica_deaths"), "{{run}}"),)),
        ),
    ),
)

_LEFT = "max by (run) (ray_hsx_rows_left) > 0"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "HsxNoProgress",
        "time() - max by (run) (ray_hsx_receipt_timestamp_seconds)",
        "> 900",
        1,
        "critical",
        "No part of {{ $labels.run }} became durable for {{ $value | humanizeDuration }}, and rows are left.",
        "Check that the driver is alive and that a replica is ready, and look at the store's errors.",
        _LEFT,
    ),
    Alert(
        "HsxStoreSlow",
        "sum by (run) (rate(ray_hsx_store_wait_seconds_total[5m]))"
        " / clamp_min(sum by (run) (rate(ray_hsx_engine_seconds_total[5m])), 1e-9)",
        "> 0.2",
        5,
        "warning",
        "Engines of {{ $labels.run }} spend {{ $value | humanizePercentage }} of their time waiting for the store.",
        "Add writers (writers.per_node) or uploads (writers.uploads), or use a faster connection to the store.",
    ),
    Alert(
        "HsxPutsFail",
        "sum by (run) (increase(ray_hsx_puts_total[10m])) - sum by (run) (increase(ray_hsx_parts_total[10m]))",
        "> 2",
        1,
        "critical",
        "Puts of {{ $labels.run }} end without a part.",
        "Read the writers' logs: credentials, quota, or a store that fails for longer than store.retry_seconds.",
    ),
    Alert(
        "HsxRowsFail",
        'sum by (run) (increase(ray_hsx_rows_total{fate="failed"}[10m]))',
        "> 0",
        0,
        "warning",
        "{{ $value | humanize }} rows of {{ $labels.run }} failed.",
        "`hsx show RUN` lists them with their reasons; the same command tries them again.",
    ),
    Alert(
        "HsxReplicasDie",
        "sum by (run) (increase(ray_hsx_replica_deaths_total[15m]))",
        "> 1",
        0,
        "warning",
        "Replicas of {{ $labels.run }} die again and again.",
        "Read the replica's log on Ray's dashboard; out of memory is the usual cause.",
    ),
    Alert(
        "HsxSpill",
        'sum (ray_object_store_memory{Location="SPILLED"})',
        "> 0",
        2,
        "warning",
        "Ray's object store has spilled {{ $value | humanize1024 }}B to disk, which slows every page down.",
        "Lower writers.credit_bytes, or give Ray a larger --object-store-memory.",
    ),
    Alert(
        "HsxBadRows",
        "sum by (run) (increase(ray_hsx_nonfinite_rows_total[15m]) + increase(ray_hsx_zero_layers_total[15m]))",
        "> 0",
        0,
        "warning",
        "{{ $labels.run }} computes rows that cannot be right (NaN, infinity, or zero layers).",
        "`hsx verify RUN` names the samples; look at dtype and at the model's weights.",
    ),
)


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (name, expression) of every query of the dashboard, and of every alert's parts."""
    for _, panels in ROWS:
        for panel in panels:
            for expression, legend in panel.queries:
                yield f"{panel.question} {legend}", expression
    for alert in ALERTS:
        for expression in alert.evaluated:
            yield alert.name, expression
