"""Exporters of a run into trainers' files. Imports neither Ray nor vLLM."""

from __future__ import annotations

from hsx_dist.exporting.base import Exporter, ExportOptions, SampleLeftOut
from hsx_dist.exporting.export import ExportReport, export_run, register_exporter

__all__ = ["ExportOptions", "ExportReport", "Exporter", "SampleLeftOut", "export_run", "register_exporter"]
