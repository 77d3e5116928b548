"""What is generated from the code and kept in the checkout: the table of metrics in docs/operations.md, dashboards/."""

from __future__ import annotations

import re
from pathlib import Path

from hsx_dist.observe.dashboard import write_dashboards
from hsx_dist.observe.metrics import table

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    write_dashboards(ROOT / "dashboards")
    page = ROOT / "docs" / "operations.md"
    begin, end = "<!-- metrics: written by `make tables` -->\n", "<!-- end of metrics -->"
    text, found = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: begin + table() + end, page.read_text(),
                          flags=re.DOTALL)  # fmt: skip
    assert found == 1, f"expected one place for the table in {page}"
    page.write_text(text)


if __name__ == "__main__":
    main()
