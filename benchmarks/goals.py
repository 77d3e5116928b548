"""Goals as written in tables: ``≥ 0.97``, ``≤ 1.03``, or empty."""

from __future__ import annotations


def is_met(goal: str, measured: float) -> bool | None:
    """Whether ``measured`` meets ``goal``; None without a goal.

    Raises:
        ValueError: ``goal`` has another form.
    """
    if not goal:
        return None
    sign, _, number = goal.partition(" ")
    if sign not in ("≥", "≤"):
        raise ValueError(f"expected a goal such as '≥ 0.97', or none, got {goal!r}")
    return measured >= float(number) if sign == "≥" else measured <= float(number)


def verdict(goal: str, measured: float, windows: int | None = None) -> str:
    """``met`` or ``missed``; empty without a goal.

    Args:
        windows: Number of measured windows. A single window has no range, so the verdict mentions it.
    """
    met = is_met(goal, measured)
    return "" if met is None else ("met" if met else "missed") + (", one window" if windows == 1 else "")
