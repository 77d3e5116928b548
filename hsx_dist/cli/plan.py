"""``hsx plan``: estimate a run's cost before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hsx_dist.cli.tables import print_facts, print_table
from hsx_dist.config import load_config, public_url, resolve_paths
from hsx_dist.errors import ConfigError
from hsx_dist.observe.console import print_json, say
from hsx_dist.observe.units import bytes_text, duration

if TYPE_CHECKING:
    from hsx_dist.jobs.plan import RunPlan

#: Reasons for refused rows that are shown.
_REASONS = 5
#: Assumed tokens per second of one replica, without ``--tokens-per-second``.
GUESSED = 10_000.0


def run_plan(
    config: str | None,
    overrides: Sequence[str],
    *,
    sample_rows: int,
    tokens_per_second: float | None,
    replicas_per_node: int,
    as_json: bool,
) -> None:
    """Print the plan of a configuration."""
    from hsx_dist.inputs.rows import read_rows
    from hsx_dist.jobs.plan import make_plan

    if config is None and not overrides:
        raise ConfigError("expected --config FILE, or settings such as model=… input.path=…, got neither. Give them")
    settings = resolve_paths(load_config(config, overrides), Path.cwd())
    plan = make_plan(
        settings,
        lambda: read_rows(settings.input),
        sample_rows=sample_rows,
        tokens_per_second=tokens_per_second or GUESSED,
        replicas_per_node=replicas_per_node,
    )
    if as_json:
        print_json(plan.to_dict())
        return
    print_facts(_facts(plan, public_url(settings.model), tokens_per_second, replicas_per_node))
    if len(plan.point_bytes) > 1:
        points = ((name, str(layers), f"{size:,}") for name, (layers, size) in plan.point_bytes.items())
        print_table(("point", "layers", "bytes per token"), points, numbers=("layers", "bytes per token"))
    stored = ((name, bytes_text(size), f"{plan.raw_bytes / max(size, 1):.2f}") for name, size in plan.stored.items())
    print_table(("codec", "stored", "raw / stored"), stored, numbers=("stored", "raw / stored"))
    for reason, count in list(plan.refused.items())[:_REASONS]:
        say(f"refused: {count:,} of {plan.sampled:,} rows sampled: {reason}")
    for note in plan.notes:
        say(f"note: {note}")


def _facts(plan: RunPlan, model: str, rate: float | None, per_node: int) -> list[tuple[str, str]]:
    exact = plan.sampled >= plan.rows - plan.unreadable
    sampled = "all of them encoded" if exact else f"{plan.sampled:,} encoded, ± {plan.margin:.1%}"
    unreadable = f", {plan.unreadable:,} cannot be read" if plan.unreadable else ""
    guessed = "" if rate else " (a guess; set --tokens-per-second)"
    seconds = f"{plan.seconds:,.0f} s" + (f" ({duration(plan.seconds)})" if plan.seconds >= 120 else "")
    kept = "" if plan.stored_tokens == plan.tokens else f", {plan.stored_tokens:,} of them kept"
    return [
        ("model", model),
        ("rows", f"{plan.rows:,} ({sampled}{unreadable})"),
        ("tokens", f"{plan.tokens:,}{kept}"),
        ("per token", f"{plan.token_bytes:,} bytes of states"),
        ("raw", bytes_text(plan.raw_bytes)),
        ("stored", f"{bytes_text(plan.stored_bytes)} with {plan.codec}"),
        ("parts", f"{plan.parts:,}, about {plan.requests:,} requests to the store"),
        (
            "cache",
            f"{bytes_text(plan.cache.states)} of states and {bytes_text(plan.cache.kv)} of keys and values per token "
            f"and rank: states take {plan.cache.share:.0%}",
        ),
        (
            "host",
            f"at most {bytes_text(plan.host.ring)} in the rings of a replica, and {bytes_text(plan.host.writer)} in "
            f"each writer ({plan.host.writers} per node)",
        ),
        ("time", f"{seconds} with {_replicas(plan.replicas)} of {rate or GUESSED:,.0f} tokens/s{guessed}"),
        (
            "network",
            f"{plan.node_bytes_per_second / 1e6:,.1f} MB/s from a node of {_replicas(per_node)}",
        ),
    ]


def _replicas(n: int) -> str:
    return f"{n:,} replica{'' if n == 1 else 's'}"
