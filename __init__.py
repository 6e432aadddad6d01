"""Tensor-parallel matmuls and collectives that overlap with communication, for PyTorch.

>>> import weft
>>> _, (y,) = weft.fused_all_gather_matmul(x, [w], 0, group, return_A=False)

Submodules and the public names of ``weft.fused_ops`` are imported when they are first used: ``import weft`` alone does
not import torch.
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

# "weft" and not relative: pytest imports this file also under the name of the checkout's folder, and a second copy of
# the submodules would have heaps and caches of its own.
from weft import hooks

if TYPE_CHECKING:
    from . import checkpoint, drop_in, fused_ops, passes, symm_mem
    from .fused_ops import (
        ColumnParallelExperts,
        ColumnParallelLinear,
        FusionError,
        FusionPass,
        MoeHandle,
        Plan,
        RowParallelExperts,
        RowParallelLinear,
        all_reduce_gradients,
        compile,  # noqa: A004
        cross_entropy_of_sharded_logits,
        float8_all_gather_matmul,
        float8_matmul_reduce_scatter,
        fused_all_gather_grouped_matmul,
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_all_reduce_layer_norm,
        fused_all_reduce_rms_norm,
        fused_all_reduce_rms_norm_quant,
        fused_all_to_all_matmul,
        fused_grouped_matmul_all_reduce,
        fused_grouped_matmul_reduce_scatter,
        fused_linear_cross_entropy,
        fused_linear_log_probs,
        fused_matmul_all_gather,
        fused_matmul_all_reduce,
        fused_matmul_all_to_all,
        fused_matmul_reduce_scatter,
        fused_moe_combine_all_reduce,
        fused_moe_combine_all_reduce_rms_norm,
        fused_moe_combine_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
        grouped_matmul,
        install,
        last_plan,
        moe_combine,
        moe_dispatch,
        moe_route,
        one_shot_all_gather,
        one_shot_all_reduce,
        one_shot_all_reduce_,
        one_shot_all_to_all,
        one_shot_gather,
        one_shot_reduce_scatter,
        plan,
        process_group,
    )
    from .symm_mem import (
        CallAbandoned,
        ForkedProcess,
        HeapUnavailable,
        PeerTimeout,
        RankMismatch,
        WeftError,
    )
else:
    # Type checkers must not see it: to them any name would be there.
    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"weft.{name}")
        if name in __all__:
            return getattr(
                importlib.import_module("weft.symm_mem" if name in _ERRORS else "weft.fused_ops"), name
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "CallAbandoned",
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "ForkedProcess",
    "FusionError",
    "FusionPass",
    "HeapUnavailable",
    "MoeHandle",
    "PeerTimeout",
    "Plan",
    "RankMismatch",
    "RowParallelExperts",
    "RowParallelLinear",
    "WeftError",
    "__version__",
    "all_reduce_gradients",
    "checkpoint",
    "compile",
    "cross_entropy_of_sharded_logits",
    "drop_in",
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
    "fused_ops",
    "fused_scaled_matmul_reduce_scatter",
    "grouped_matmul",
    "install",
    "last_plan",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "one_shot_all_gather",
    "one_shot_all_reduce",
    "one_shot_all_reduce_",
    "one_shot_all_to_all",
    "one_shot_gather",
    "one_shot_reduce_scatter",
    "passes",
    "plan",
    "process_group",
    "symm_mem",
]
_SUBMODULES = ("checkpoint", "drop_in", "fused_ops", "passes", "symm_mem")
_ERRORS = (
    "CallAbandoned",
    "ForkedProcess",
    "HeapUnavailable",
    "PeerTimeout",
    "RankMismatch",
    "WeftError",
)


def _make_process_group(options: Any, backend_options: Any) -> Any:
    create = importlib.import_module("weft.fused_ops.process_groups.creation").create_process_group
    return create(options, backend_options)


def _cuda_transfers(registry: Any) -> Any:
    return importlib.import_module("weft.kernels.transfer.cuda_kernel").CudaTransfers(registry)


def _check_new_heap(heap: Any) -> None:
    importlib.import_module("weft.fused_ops.self_check").check_new_heap(heap)


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
hooks.register_backend, hooks.check_new_heap = _register_backend, _check_new_heap
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
        # torch would refuse to be imported.
        warnings.warn(
            f"WEFT_INSTALL=1: weft cannot be imported, torch's ops stay torch's: {e!r}", stacklevel=2
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
