"""Goals as tables tell them: ``≥ 0.97``, ``≤ 1.03``, or nothing."""

from __future__ import annotations

#: What a table says of them, by ``is_met``.
VERDICTS = {None: "", True: "met", False: "missed"}


def is_met(goal: str, measured: float) -> bool | None:
    """None where there is no goal.

    Raises:
        ValueError: it is not written so.
    """
    if not goal:
        return None
    sign, _, number = goal.partition(" ")
    if sign not in ("≥", "≤"):
        raise ValueError(f"expected a goal such as '≥ 0.97', or none, came {goal!r}")
    return measured >= float(number) if sign == "≥" else measured <= float(number)
