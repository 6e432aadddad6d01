"""A pass for torch.compile that finds what weft fuses, and says why it left a collective alone."""

from .fusion import FusionError, FusionPass
from .report import Entry, Report

__all__ = ["Entry", "FusionError", "FusionPass", "Report"]
