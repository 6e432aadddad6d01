"""Fused tensor-parallel ops: as functions, in ``torch.ops.weft``, and found in compiled graphs by a pass.

The pass is imported when one of its names is first used: it needs Inductor, which takes seconds.
"""

from typing import TYPE_CHECKING, Any

from .. import hooks
from . import async_collectives as async_collectives  # torch.ops.weft has them
from .about.timeline import timeline
from .collectives import one_shot_all_gather, one_shot_all_to_all, one_shot_gather, one_shot_reduce_scatter
from .dispatch.choice import plan
from .dispatch.plan import Plan, last_plan
from .drop_in.calls_taken import CallsTaken
from .drop_in.installation import install, install_if_asked, installed, installed_calls, uninstall
from .drop_in.transformers_experts import register_transformers_experts
from .exchanges import fused_all_to_all_matmul, fused_matmul_all_gather, fused_matmul_all_to_all
from .expert_parallel import MoeHandle, moe_combine, moe_dispatch
from .experts import fused_all_gather_grouped_matmul, grouped_matmul, moe_route
from .experts_sums import (
    fused_grouped_matmul_all_reduce,
    fused_grouped_matmul_reduce_scatter,
    fused_moe_combine_all_reduce,
    fused_moe_combine_all_reduce_rms_norm,
    fused_moe_combine_reduce_scatter,
)
from .functional import (
    fused_all_gather_matmul,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)
from .layers.checkpoint import local_state_dict, sharded_state_dict
from .layers.experts import ColumnParallelExperts, RowParallelExperts
from .layers.float8 import float8_all_gather_matmul, float8_matmul_reduce_scatter
from .layers.gradients import all_reduce_gradients
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .library import registration as registration  # torch.ops.weft is implemented
from .norms import fused_all_reduce_layer_norm, fused_all_reduce_rms_norm, fused_all_reduce_rms_norm_quant
from .process_groups.creation import is_weft_group, process_group
from .process_groups.group import WeftProcessGroup
from .process_groups.taken import GroupCalls
from .scaled import fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter
from .transfers import transfer_ops as transfer_ops  # of registered tensors, likewise
from .vocabulary import cross_entropy_of_sharded_logits, fused_linear_cross_entropy, fused_linear_log_probs

if TYPE_CHECKING:
    from .passes import (
        FusionError,
        FusionPass,
        Report,
        compile,  # noqa: A004
        fusion_report,
    )
else:
    # Type checkers must not see it: to them any name would be there.
    def __getattr__(name: str) -> Any:
        if name != "passes" and name not in _OF_THE_PASS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import weft.fused_ops.passes as passes  # a relative import would ask here for it

        return passes if name == "passes" else getattr(passes, name)


__all__ = [
    "CallsTaken",
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "FusionError",
    "FusionPass",
    "GroupCalls",
    "MoeHandle",
    "Plan",
    "Report",
    "RowParallelExperts",
    "RowParallelLinear",
    "WeftProcessGroup",
    "all_reduce_gradients",
    "compile",
    "cross_entropy_of_sharded_logits",
    "float8_all_gather_matmul",
    "float8_matmul_reduce_scatter",
    "fused_all_gather_grouped_matmul",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_all_reduce_layer_norm",
    "fused_all_reduce_rms_norm",
    "fused_all_reduce_rms_norm_quant",
    "fused_all_to_all_matmul",
    "fused_grouped_matmul_all_reduce",
    "fused_grouped_matmul_reduce_scatter",
    "fused_linear_cross_entropy",
    "fused_linear_log_probs",
    "fused_matmul_all_gather",
    "fused_matmul_all_reduce",
    "fused_matmul_all_to_all",
    "fused_matmul_reduce_scatter",
    "fused_moe_combine_all_reduce",
    "fused_moe_combine_all_reduce_rms_norm",
    "fused_moe_combine_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "fusion_report",
    "grouped_matmul",
    "install",
    "installed",
    "installed_calls",
    "is_weft_group",
    "last_plan",
    "local_state_dict",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "one_shot_all_gather",
    "one_shot_all_reduce",
    "one_shot_all_reduce_",
    "one_shot_all_to_all",
    "one_shot_gather",
    "one_shot_reduce_scatter",
    "plan",
    "process_group",
    "register_transformers_experts",
    "sharded_state_dict",
    "timeline",
    "uninstall",
]
_OF_THE_PASS = ("FusionError", "FusionPass", "Report", "compile", "fusion_report")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "passes"})


hooks.register_backend()
install_if_asked()
