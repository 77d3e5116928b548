"""HTML of the kit's measurements."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.jobs.kit.outcomes import Outcome
from hsx_dist.observe.report.html import escape

THROUGHPUT, COPIES = "throughput", "copies"


def _throughput(outcomes: Sequence[Outcome]) -> str:
    """Tokens a second by batch size, with ratios if both engines ran."""
    measured = {o.name: o.figures["tokens_per_s"] for o in outcomes}
    if not measured:
        return ""
    batches = sorted({int(b) for by_batch in measured.values() for b in by_batch})
    base = measured.get("no extraction", {})

    def cell(name: str, batch: int) -> str:
        value = measured[name].get(str(batch))
        if value is None:
            return "not run"
        alone = base.get(str(batch))
        ratio = f"<br><span class=ratio>{value / alone:.0%}</span>" if alone and name != "no extraction" else ""
        return f"{value:,.0f}{ratio}"

    head = "".join(f'<th class="n">batch {b}</th>' for b in batches)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{cell(name, b)}</td>' for b in batches)}</tr>"
        for name in measured
    )
    what = escape(str(outcomes[0].figures["load"]))
    return (
        f"<p class=note>Prefill, tokens a second until all states are stored. {what} The second line of a cell is the "
        f"ratio to no extraction.</p><table><tr><th></th>{head}</tr>{rows}</table><h3>Checks</h3>"
    )


def _copies(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(r['model']))}</td><td class=n>{r['tokens']:,}</td>"
        f"<td>{'layer' if r['order'] == 'LTH' else 'token'}-major</td><td class=n>{r['gb_per_s']['ours']:.1f}</td>"
        f"<td class=n>{r['gb_per_s']['limit']:.1f}</td><td class=n>{r['of_limit']:.2f}</td></tr>"
        for o in outcomes
        for r in o.figures["results"]
    )
    if not rows:
        return ""
    return (
        "<p class=note>From the cache into pinned host memory, GB/s: the connector's copies on their stream, and "
        "contiguous copies of as many bytes, which are the device's limit.</p><table><tr><th>states of</th>"
        "<th class=n>tokens</th><th>cache</th><th class=n>ours</th><th class=n>device's peak</th><th class=n>share</th>"
        f"</tr>{rows}</table><h3>Checks</h3>"
    )


#: By group of checks.
FIGURES = {THROUGHPUT: _throughput, COPIES: _copies}
