"""Tensor-parallel matmuls and collectives that overlap with communication, for PyTorch.

>>> import weft
>>> _, (y,) = weft.fused_all_gather_matmul(x, [w], 0, group, return_A=False)

Submodules and the public names of ``weft.fused_ops`` are imported when they are first used: ``import weft`` alone does
not import torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# "weft" and not relative: pytest imports this file also under the name of the checkout's folder, and a second copy of
# the submodules would have heaps and caches of its own.
from weft import hooks

if TYPE_CHECKING:
    from . import fused_ops, symm_mem
    from .fused_ops import (
        CallsTaken,
        ColumnParallelLinear,
        FusionError,
        FusionPass,
        GroupCalls,
        Plan,
        Report,
        RowParallelLinear,
        WeftProcessGroup,
        all_reduce_gradients,
        compile,  # noqa: A004
        float8_all_gather_matmul,
        float8_matmul_reduce_scatter,
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_all_reduce_layer_norm,
        fused_all_reduce_rms_norm,
        fused_all_reduce_rms_norm_quant,
        fused_matmul_all_reduce,
        fused_matmul_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
        fusion_report,
        install,
        installed,
        installed_calls,
        is_weft_group,
        last_plan,
        local_state_dict,
        measure_costs,
        one_shot_all_gather,
        one_shot_all_reduce,
        one_shot_all_reduce_,
        one_shot_reduce_scatter,
        plan,
        process_group,
        sharded_state_dict,
        timeline,
        uninstall,
    )
else:
    # Type checkers must not see it: to them any name would be there.
    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"weft.{name}")
        if name in __all__:
            return getattr(importlib.import_module("weft.fused_ops"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "CallsTaken",
    "ColumnParallelLinear",
    "FusionError",
    "FusionPass",
    "GroupCalls",
    "Plan",
    "Report",
    "RowParallelLinear",
    "WeftProcessGroup",
    "__version__",
    "all_reduce_gradients",
    "compile",
    "float8_all_gather_matmul",
    "float8_matmul_reduce_scatter",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_all_reduce_layer_norm",
    "fused_all_reduce_rms_norm",
    "fused_all_reduce_rms_norm_quant",
    "fused_matmul_all_reduce",
    "fused_matmul_reduce_scatter",
    "fused_ops",
    "fused_scaled_matmul_reduce_scatter",
    "fusion_report",
    "install",
    "installed",
    "installed_calls",
    "is_weft_group",
    "last_plan",
    "local_state_dict",
    "measure_costs",
    "one_shot_all_gather",
    "one_shot_all_reduce",
    "one_shot_all_reduce_",
    "one_shot_reduce_scatter",
    "plan",
    "process_group",
    "sharded_state_dict",
    "symm_mem",
    "timeline",
    "uninstall",
]
_SUBMODULES = ("fused_ops", "symm_mem")


def _make_process_group(options: Any, backend_options: Any) -> Any:
    create = importlib.import_module("weft.fused_ops.process_groups.creation").create_process_group
    return create(options, backend_options)


def _cuda_transfers(registry: Any) -> Any:
    return importlib.import_module("weft.kernels.transfer.cuda_kernel").CudaTransfers(registry)


def _define_ops() -> None:
    importlib.import_module("weft.fused_ops")


def _register_backend() -> None:
    """``import torch`` imports torch.distributed."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None and "WEFT" not in distributed.Backend._plugins:
        distributed.Backend.register_backend(
            "weft", _make_process_group, extended_api=True, devices=["cpu", "cuda"]
        )


hooks.cuda_transfers, hooks.define_ops = _cuda_transfers, _define_ops
hooks.register_backend = _register_backend
_register_backend()


def _at_import_of_torch() -> None:
    """What torch calls when it is imported (entry points ``torch.backends``): registers the process group, and installs
    weft if WEFT_INSTALL is 1."""
    import os

    _register_backend()
    if os.environ.get("WEFT_INSTALL") != "1":
        return
    try:
        importlib.import_module("weft.fused_ops")  # which installs
    except Exception as e:
        import warnings

        # torch would refuse to be imported.
        warnings.warn(
            f"WEFT_INSTALL=1: weft cannot be imported, torch's ops stay torch's: {e!r}", stacklevel=2
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
