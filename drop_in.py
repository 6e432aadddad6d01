"""torch's own ops on weft: installed, counted, given back."""

from weft.fused_ops import CallsTaken, install, installed, installed_calls, uninstall

__all__ = ["CallsTaken", "install", "installed", "installed_calls", "uninstall"]
