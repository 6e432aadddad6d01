"""A pass for torch.compile that finds what weft fuses, and says why it left a collective alone."""

from ...kernels.device.jit.ahead import ProgramCounts
from .backend import compile, fusion_report  # noqa: A004
from .fusion import FusionPass
from .order.change import Bucket, OrderChange, Placed
from .order.costs import CostTable
from .order.measured import measure_costs
from .records.entry import Entry
from .records.report import Disagreement, FusionError, HeapUse, PassRuns, Report, VoteCounts

__all__ = [
    "Bucket",
    "CostTable",
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
    "measure_costs",
]
