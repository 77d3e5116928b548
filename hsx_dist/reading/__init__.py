"""Reading runs and samples. Imports neither Ray nor vLLM; torch only to hand out tensors."""

from __future__ import annotations

from hsx_dist.reading.load import load_hidden_states
from hsx_dist.reading.run import Run, open_run
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.verify import verify_run
from hsx_dist.reading.verify_report import Problem, VerifyReport

__all__ = ["Problem", "Run", "Sample", "VerifyReport", "load_hidden_states", "open_run", "verify_run"]
