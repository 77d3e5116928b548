"""Goals as tables tell them: ``≥ 0.97``, ``≤ 1.03``, or nothing."""

from __future__ import annotations


def is_met(goal: str, measured: float) -> bool | None:
    """None where there is no goal.

    Raises:
        ValueError: it is not written so.
    """
    if not goal:
        return None
    sign, _, number = goal.partition(" ")
    if sign not in ("≥", "≤"):
        raise ValueError(f"expected a goal such as '≥ 0.97', or none, got {goal!r}")
    return measured >= float(number) if sign == "≥" else measured <= float(number)


def verdict(goal: str, measured: float, windows: int | None = None) -> str:
    """What a table says of it; empty where there is no goal. ``windows``: of which it was measured; of one alone it
    says little, and so the table says that."""
    met = is_met(goal, measured)
    return "" if met is None else ("met" if met else "missed") + (", one window" if windows == 1 else "")
