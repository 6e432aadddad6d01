"""A pass for torch.compile that finds what weft fuses, and says why it left a collective alone."""

from .backend import compile, fusion_report  # noqa: A004
from .fusion import FusionPass
from .order.measured import measure_costs
from .report import Entry, FusionError, Report

__all__ = ["Entry", "FusionError", "FusionPass", "Report", "compile", "fusion_report", "measure_costs"]
