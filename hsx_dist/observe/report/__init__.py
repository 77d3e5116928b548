"""One page about a run, from its store: ``write_report``."""

from hsx_dist.observe.report.document import write_report

__all__ = ["write_report"]
