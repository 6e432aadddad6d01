"""What torch before 2.13 cannot do, without weft either: conditions, and marks for the tests that want it.

Where that costs nothing torch itself is asked, else its version. All hold for what constraints.txt pins, and later.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch._library.utils
import torch.distributed._functional_collectives  # it registers what is asked for below
from torch import Tensor, fx
from torch._prims_common import is_contiguous_or_false
from torch.distributed.flight_recorder.components import types as analyzer_types

_NEW = torch.__version__ >= (2, 13)


def _multiplies_rows() -> bool:
    numbers, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(numbers, numbers.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


# torch._scaled_mm with row-wise scales on the CPU.
ROW_WISE_PRODUCTS = _multiplies_rows()
# Gathers and reduce-scatters of what is not contiguous.
STRIDED_COLLECTIVES = _NEW
# Dynamo traces all_gather_tensor along other dimensions than 0.
GATHERS_ALONG_ANY = _NEW
# Differentiable collectives inside of branches, loops and regions that are compiled once.
DIFFERENTIABLE_INSIDE = torch._C._dispatch_has_kernel_for_dispatch_key(
    "_c10d_functional_autograd::all_gather_into_tensor", "Meta"
)
# What DTensor looks up in a sharded embedding is reduced before it is scaled, not after.
REDUCED_IN_FRONT_OF_SCALE = _NEW
# Activation checkpoints communicate again; before, what was gathered is kept.
RECOMPUTED_COLLECTIVES = _NEW
# Inductor's gradients of regions that are compiled once are right.
GRADIENTS_OF_REGIONS = _NEW
# torch.compile of operators that write to an ``out`` and return it, such as all_gather_into_tensor_out.
COMPILED_OUT_COLLECTIVES = hasattr(torch._library.utils, "is_out")
# A cast to e4m3 bounds what is too large; before, it became NaN.
SATURATING_CASTS = _NEW
# The flight recorder's analyzer reads calls of gloo.
ANALYZED_GLOO = '"gloo"' in inspect.getsource(analyzer_types.Op)

needs_row_wise_products = pytest.mark.skipif(
    not ROW_WISE_PRODUCTS, reason="this torch multiplies no fp8 with row-wise scales on the CPU"
)
needs_compiled_out_collectives = pytest.mark.skipif(
    not COMPILED_OUT_COLLECTIVES, reason="this torch compiles no collective that writes to its out"
)
# Functional collectives take a group itself, too.
needs_groups_as_objects = pytest.mark.skipif(
    str(torch.ops._c10d_functional.all_reduce.default._schema.arguments[-1].type) != "Any",
    reason="this torch takes names of groups only",
)


def as_collectives_take(x: Tensor) -> Tensor:
    return x if STRIDED_COLLECTIVES else x.contiguous()


def runs_uncompiled(graph: fx.Graph) -> bool:
    """Whether torch has kernels on the CPU for all that a graph calls."""
    return not any(
        (not STRIDED_COLLECTIVES and _of_strided(node)) or (not ROW_WISE_PRODUCTS and _by_rows(node))
        for node in graph.nodes
    )


def _of_strided(node: fx.Node) -> bool:
    moves = str(node.target).startswith(("_c10d_functional.all_gather", "_c10d_functional.reduce_scatter"))
    return moves and not all(is_contiguous_or_false(given.meta["val"]) for given in node.all_input_nodes)


def _by_rows(node: fx.Node) -> bool:
    scales: Any = node.args[2] if str(node.target) == "aten._scaled_mm.default" else None
    return "aten._scaled_mm_v2" in str(node.target) or (
        scales is not None and scales.meta["val"].numel() != 1
    )
