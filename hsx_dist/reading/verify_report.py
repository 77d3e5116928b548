"""The result of a verification: counts, and a limited list of problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsx_dist.text import bounded

TALLIED = ("bytes", "non_finite", "all_zero")
#: Maximum number of names in ``VerifyReport.bad_samples``.
MOST_NAMED = 20
#: Maximum number of problems in ``VerifyReport.problems``. A problem of each segment may take more memory than the run.
MOST_PROBLEMS = 1000
#: The most problems in a part's content that are listed, so that one part does not fill the list.
MOST_OF_PART = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """An error found in a part, receipt or statistics object.

    Attributes:
        part: the object's name. ``""`` is the run itself.
        message: the error, printable, at most 1,000 characters: it may quote a stored text of any size.

    Example:
        >>> from hsx_dist.reading import Problem
        >>> Problem("data/part-0001-w-000001.safetensors", "missing").part
        'data/part-0001-w-000001.safetensors'
    """

    part: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", bounded(self.message))


@dataclass(slots=True)
class VerifyReport:
    """Counts of a verification: ``parts`` and ``bytes`` checked, ``samples`` that are whole, ``problems`` found.

    ``problems``: at most 1,000, of one part at most 22. ``unlisted``: the number of the others.

    ``known``: parts that an earlier call found sound; they were not read again. ``consumed``: parts that were removed
    after use. Both are included in ``parts``.

    ``non_finite`` and ``all_zero`` are not problems. They count layers of segments with a NaN or an infinity, and
    layers with only zeros. ``bad_samples``: keys of the first ``MOST_NAMED`` samples with such layers, except those in
    ``known`` parts.

    Example:
        >>> from hsx_dist.reading import VerifyReport
        >>> VerifyReport(parts=2, samples=8).ok
        True
    """

    parts: int = 0
    known: int = 0
    consumed: int = 0
    samples: int = 0
    bytes: int = 0
    non_finite: int = 0
    all_zero: int = 0
    problems: list[Problem] = field(default_factory=list)
    bad_samples: list[str] = field(default_factory=list)
    unlisted: int = 0

    def add(self, other: VerifyReport) -> None:
        """Add the counts and problems of another report.

        Example:
            >>> report = VerifyReport(parts=2)
            >>> report.add(VerifyReport(parts=3))
            >>> report.parts
            5
        """
        for name in ("parts", "known", "consumed", "unlisted", *TALLIED):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key in other.bad_samples:
            name_bad(self, key)
        room = MOST_PROBLEMS - len(self.problems)
        self.problems += other.problems[:room]
        self.unlisted += len(other.problems[room:])

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def name_bad(report: VerifyReport, key: str) -> None:
    """Add a sample to ``bad_samples``, unless it is there or the list is full."""
    if len(report.bad_samples) < MOST_NAMED and key not in report.bad_samples:
        report.bad_samples.append(key)


def add_problem(report: VerifyReport, part: str, message: str, most: int = MOST_PROBLEMS) -> None:
    """Add a problem. Only count it if ``most`` are listed."""
    if len(report.problems) < most:
        report.problems.append(Problem(part, message))
    else:
        report.unlisted += 1
