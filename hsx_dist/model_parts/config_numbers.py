"""Checks of the numbers in a model's configuration."""

from __future__ import annotations

from typing import Any


def positive(value: Any) -> str | None:
    """Check for a positive number. With its bounds, float32 products and quotients stay finite."""
    fine = type(value) in (int, float) and 1e-30 <= value <= 1e30
    return None if fine else "a number from 1e-30 to 1e30"


def count(value: Any) -> str | None:
    """Check for a whole number above 0."""
    return None if type(value) is int and 0 < value < 1 << 31 else "a whole number above 0"
