"""A pass for torch.compile that finds what weft fuses, and says why it left a collective alone."""

from ...kernels.device.jit.ahead import ProgramCounts
from .backend import compile, fusion_report  # noqa: A004
from .fusion import FusionPass
from .order.change import OrderChange, Placed
from .records.entry import Entry
from .records.report import Disagreement, FusionError, HeapUse, PassRuns, Report, VoteCounts

__all__ = [
    "Disagreement",
    "Entry",
    "FusionError",
    "FusionPass",
    "HeapUse",
    "OrderChange",
    "PassRuns",
    "Placed",
    "ProgramCounts",
    "Report",
    "VoteCounts",
    "compile",
    "fusion_report",
]
