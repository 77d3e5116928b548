"""Write the generated texts of the checkout: metrics in docs/operations.md, docs/settings.md, dashboards/, README's
figures and chart."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import charts
from hsx_dist.observe.dashboard import write_dashboards
from hsx_dist.observe.metrics import table
from scripts import settings_page

ROOT = Path(__file__).resolve().parent.parent


def replace(page: Path, begin: str, end: str, text: str) -> None:
    old = page.read_text(encoding="utf-8")
    new, found = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: begin + text + end, old, flags=re.DOTALL)
    assert found == 1, f"expected one place between {begin!r} and {end!r} in {page}, got {found}"
    page.write_text(new, encoding="utf-8")


def main() -> None:
    write_dashboards(ROOT / "dashboards")
    page = ROOT / "docs" / "operations.md"
    replace(page, "<!-- metrics: written by `make tables` -->\n", "<!-- end of metrics -->", table())
    (ROOT / "docs" / "settings.md").write_text(settings_page.page(), encoding="utf-8")
    bench = charts.read_bench(ROOT / "benchmarks" / "results" / "bench.json")
    (ROOT / "docs" / "img" / "benchmark.svg").write_text(charts.chart(bench), encoding="utf-8")
    begin, end = "<!-- figures: written by `make tables` -->\n", "<!-- end of figures -->"
    replace(ROOT / "README.md", begin, end, charts.table(bench))


if __name__ == "__main__":
    main()
