"""torch's own ops on weft: installed, counted, given back; and transformers' experts."""

from weft.fused_ops import (
    CallsTaken,
    install,
    installed,
    installed_calls,
    register_transformers_experts,
    uninstall,
)

__all__ = [
    "CallsTaken",
    "install",
    "installed",
    "installed_calls",
    "register_transformers_experts",
    "uninstall",
]
