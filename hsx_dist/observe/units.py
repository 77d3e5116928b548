"""Formats of numbers for people, the same in every command and report."""

from __future__ import annotations


def bytes_text(n: float) -> str:
    """``1.6 MB`` for 1572864: powers of ten, as in rates and on a store's bill."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:,.0f} B" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """``1:02:03`` for 3723 seconds, ``0:07`` for 7."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
