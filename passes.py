"""The graph pass, what its reports are made of, and what measures for it."""

from weft.fused_ops import timeline
from weft.fused_ops.passes import (
    Bucket,
    CostTable,
    Disagreement,
    Entry,
    FusionError,
    FusionPass,
    OrderChange,
    PassRuns,
    Placed,
    ProgramCounts,
    Report,
    VoteCounts,
    compile,  # noqa: A004
    fusion_report,
    measure_costs,
)

__all__ = [
    "Bucket",
    "CostTable",
    "Disagreement",
    "Entry",
    "FusionError",
    "FusionPass",
    "OrderChange",
    "PassRuns",
    "Placed",
    "ProgramCounts",
    "Report",
    "VoteCounts",
    "compile",
    "fusion_report",
    "measure_costs",
    "timeline",
]
