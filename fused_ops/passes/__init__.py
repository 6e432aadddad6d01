"""A pass for torch.compile that finds what weft fuses, and says why it left a collective alone."""

from .fusion import FusionPass
from .report import Entry, FusionError, Report

__all__ = ["Entry", "FusionError", "FusionPass", "Report"]
