"""What the tests of the pass share: graphs as Inductor makes them, and a machine that runs them for all ranks at once.

A graph is captured under the fake process group: functionalised, split into forward and backward, and taken through
Inductor's own post-grad passes, without generating code.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from weft.fused_ops.passes import FusionPass, Report

c10d = torch.ops._c10d_functional
AG, RS = "weft::fused_all_gather_matmul", "weft::fused_matmul_reduce_scatter"


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[str]:
    """A process group of ``world`` ranks that does not communicate; gives its name."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def all_gather(x: Tensor, dim: int, group: str, world: int) -> Tensor:
    """As torch's functional collectives trace it, under the name that both old and new torch have."""
    import torch.distributed._functional_collectives as funcol

    name = "all_gather_single" if hasattr(funcol, "all_gather_single") else "all_gather_tensor"
    return torch.ops.aten.alias(getattr(funcol, name)(x, dim, dist.group.WORLD))


def reduce_scatter(x: Tensor, dim: int, group: str, world: int, reduce_op: str = "sum") -> Tensor:
    import torch.distributed._functional_collectives as funcol

    name = "reduce_scatter_single" if hasattr(funcol, "reduce_scatter_single") else "reduce_scatter_tensor"
    return torch.ops.aten.alias(getattr(funcol, name)(x, reduce_op, dim, dist.group.WORLD))
