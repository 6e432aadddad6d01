"""Which ops communicate, and the settings with which Inductor would not keep their order."""

from __future__ import annotations

import importlib

from torch._ops import OpOverload

#: The ops that communicate: weft's, and those of others that it implements.
COMMUNICATING: list[OpOverload] = []
#: Those of registered tensors: their first argument is one, or several, that a graph is given and does not make.
OF_REGISTERED: list[OpOverload] = []
#: What a wait has in its ``meta`` if it only keeps an op of weft.
KEEPS = "weft_keeps"

# Passes of ``reorder_for_compute_comm_overlap_passes``, and the settings of ``config_comms`` by which they may change
# the order of collectives.
_REORDERING = {
    "sink_waits_iterative": "sink_waits_iterative_unsafe_collectives_reorder",
    "reorder_communication_preserving_peak_memory": "reorder_iterative_unsafe_collectives_reorder",
}


def why_unordered() -> str | None:
    """The setting by which Inductor need not keep the order of the program; None if there is none."""
    from torch._inductor import config  # it brings Dynamo, which takes seconds

    if config.aten_distributed_optimizations.enable_overlap_scheduling:
        return "torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling is True"
    if config.fallback_by_default and config.reorder_for_peak_memory:
        # In lite mode ops are called as they are, so Inductor does not know them for collectives.
        return "torch._inductor.config.fallback_by_default and reorder_for_peak_memory are True"
    if config.deterministic or not config.reorder_for_compute_comm_overlap:
        return None
    comms = importlib.import_module("torch._inductor.config_comms")
    for each in config.reorder_for_compute_comm_overlap_passes:
        name = each if isinstance(each, str) else getattr(each, "__name__", "")
        if getattr(comms, _REORDERING.get(name, ""), False):
            return (
                f"torch._inductor.config.reorder_for_compute_comm_overlap is True, its passes have {name!r}, and "
                f"torch._inductor.config_comms.{_REORDERING[name]} is True"
            )
    return None
