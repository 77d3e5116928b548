"""The frame of self-contained pages. A browser loads no other file for them, and runs no script."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from hsx_dist.text import printable

# The browser must load and run nothing, for any text of a sample or a setting.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #22272e; background: #f4f6f8;
  margin: 0; }
main { max-width: 1020px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; } svg + h2, svg + .pair { margin-top: 18px; }
h3 { font-size: 14px; margin: 14px 0 2px; overflow-wrap: anywhere; }
section { background: #fff; border: 1px solid #dde2e7; border-radius: 8px; padding: 18px 22px; margin-top: 18px; }
p.note { color: #5b6570; margin: 2px 0 12px; max-width: 76ch; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 16px; }
.fact { background: #fff; border: 1px solid #dde2e7; border-radius: 8px; padding: 10px 14px; flex: 1 1 96px; }
.fact b { display: block; font-size: 20px; font-weight: 600; }
.fact span { color: #5b6570; font-size: 13px; }
.state { display: inline-block; border-radius: 10px; padding: 1px 10px; font-size: 13px; background: #e3e7eb; }
.state.good { background: #d8eedd; } .state.bad { background: #f6d9d6; }
.pair { display: flex; flex-wrap: wrap; gap: 18px; } .pair > div { flex: 1 1 420px; min-width: 0; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; }
th { color: #5b6570; font-weight: 500; } td.n, th.n { text-align: right; }
tr + tr > * { border-top: 1px solid #edf0f2; }
td.n:last-child, th.n:last-child { padding-right: 0; }
td { overflow-wrap: anywhere; }
.checks td:first-child { white-space: nowrap; width: 92px; } .checks td:last-child { white-space: nowrap; }
.checks p.note { margin: 0 0 4px; font-size: 13.5px; } .ratio { color: #5b6570; font-size: 13px; }
details { margin-top: 8px; } summary { cursor: pointer; color: #3465a4; }
pre { background: #f4f6f8; padding: 10px; overflow: auto; font-size: 12.5px; }
.tokens { display: grid; grid-template-columns: 62px 1fr; gap: 4px 10px; font-size: 13.5px; }
.tokens .layer { color: #5b6570; text-align: right; white-space: nowrap; }
.tokens .text { line-height: 1.75; overflow-wrap: anywhere; }
.tokens .text span { border-radius: 3px; padding: 1px 0; white-space: pre-wrap; }
.scale { display: inline-block; width: 160px; height: 10px; border-radius: 3px; vertical-align: middle; margin: 0 6px;
  background: linear-gradient(90deg, rgba(52,101,164,.35), #fff 33%, rgba(217,130,43,.9)); border: 1px solid #dde2e7; }
"""


def document(title: str, body: str) -> str:
    """Return a page. ``body``: HTML in which all text is escaped."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def escape(text: str) -> str:
    """Escape ``text`` for HTML. Also escapes bidirectional overrides, which could reverse the text around them."""
    return html.escape(printable(text))


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values."""
    return f"<table>{''.join(f'<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>' for n, v in rows)}</table>"
