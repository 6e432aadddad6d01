"""Everything once, small, on 2 CPU ranks, in less than a minute: the tests to run first.

Every op with its gradients, the graph pass on a compiled function, a pair of parallel layers, and a rank that does not
come, each against float64. Buffers hold NaN before a call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from op_table import op_calls
from opcommon import BOUND, DTYPES, assert_fused, check, gather, poison, world
from ranks import run_row
from references import held, held_gradients
from torch import Tensor
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced

WORLD_SIZE = 2
F32 = BOUND[torch.float32]
# What experts are sent comes back with the last but one; scales and fp8 have one dtype.
OPS = {name: call for name, call in op_calls().items() if name not in ("moe_dispatch", "moe_combine")}
OF_ONE_DTYPE = [name for name in OPS if "scale" in name]
OF_LOSSES = [name for name in OPS if "targets" in OPS[name].arguments]  # that all ranks have


def drawn(name: str, dtype: torch.dtype) -> dict[str, Any]:
    call = op_calls(WORLD_SIZE, world())[name]
    if "x" in call.arguments and name in OF_LOSSES:
        dist.broadcast(call.arguments["x"], 0)
    return call.put(*(x.clone() if name in OF_ONE_DTYPE else x.to(dtype, copy=True) for x in call.tensors))


def check_forward(name: str, rank: int, dtype: torch.dtype) -> None:
    arguments = drawn(name, dtype)
    poison(rank)
    with forced("fused"):
        held(OPS[name].function, **arguments)
    assert_fused()


def forward(rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    check_forward(name, rank, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in OPS for dtype in DTYPES[: 1 if name in OF_ONE_DTYPE else 3]]
)
def test_forward(name: str, dtype: torch.dtype) -> None:
    run_row(forward, WORLD_SIZE, name, dtype)


def backward(rank: int, world_size: int, name: str) -> None:
    arguments = drawn(name, torch.float32)
    for x in torch.utils._pytree.tree_leaves(arguments):
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    with forced("fused"):
        held_gradients(OPS[name].function, **arguments)


@pytest.mark.parametrize("name", [n for n, call in OPS.items() if call.has_gradient and n not in OF_LOSSES])
def test_backward(name: str) -> None:
    run_row(backward, WORLD_SIZE, name)


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = funcol.all_gather_tensor(x, 0, world()) @ up
    return funcol.reduce_scatter_tensor(hidden @ down, "sum", 0, world())


def compiled(rank: int, world_size: int) -> None:
    fusion = fused_ops.FusionPass()
    torch._dynamo.reset()
    x, up, down = torch.randn(13, 17), torch.randn(17, 11), torch.randn(11, 7)
    # A graph that Inductor has kept is one that the pass does not see.
    with torch._inductor.config.patch(fx_graph_cache=False):
        y = torch.compile(block, options=fusion.options, fullgraph=True)(x, up, down)
    assert fusion.report().fused == 2, fusion.report()
    A = torch.cat(gather(x))
    parts = [A @ u @ d for u, d in zip(gather(up), gather(down), strict=True)]
    check("compiled", y, torch.stack(parts).sum(0).chunk(world_size)[rank], F32)


def test_the_pass() -> None:
    run_row(compiled, WORLD_SIZE)


def layers(rank: int, world_size: int) -> None:
    up = fused_ops.ColumnParallelLinear(9, 14, group=world(), sequence_parallel=True)
    down = fused_ops.RowParallelLinear(14, 5, group=world(), sequence_parallel=True)
    torch.nn.init.normal_(down.bias)
    dist.broadcast(down.bias.data, 0)
    x = torch.randn(13, 9, requires_grad=True)
    weight = torch.randn(13, 5)
    (down(up(x).relu()) * weight).sum().backward()

    whole_x = torch.cat(gather(x)).requires_grad_()
    cut = {"up.weight": (up.weight, 0), "up.bias": (up.bias, 0), "down.weight": (down.weight, 1)}
    whole = {name: torch.cat(gather(p), dim).requires_grad_() for name, (p, dim) in cut.items()}
    bias = down.bias.detach().double().requires_grad_()
    hidden = torch.nn.functional.linear(whole_x, whole["up.weight"], whole["up.bias"]).relu()
    y = torch.nn.functional.linear(hidden, whole["down.weight"], bias)
    (y * torch.cat(gather(weight))).sum().backward()

    check("y", down(up(x).relu()).detach(), y.detach().chunk(world_size)[rank], F32)
    check("x.grad", x.grad, whole_x.grad.chunk(world_size)[rank], F32)
    check("down.bias.grad", down.bias.grad, bias.grad, F32)
    for name, (p, dim) in cut.items():
        check(f"{name}.grad", p.grad, whole[name].grad.chunk(world_size, dim)[rank], F32)


def test_a_pair_of_layers() -> None:
    run_row(layers, WORLD_SIZE)


def absent(rank: int, world_size: int, name: str) -> None:
    """Rank 1 stays away from a call: rank 0 is told whom it waited for, and both are right again after a reset."""
    check_forward(name, rank, torch.float32)
    before = symm_mem.get_timeout()
    if rank == 0:
        symm_mem.set_timeout(0.2)
        with pytest.raises(symm_mem.PeerTimeout, match=r"rank 0 .*waited 0\.2 s for rank 1: ") as error:
            OPS[name].function(**drawn(name, torch.float32))
        assert error.value.culprit == 1
        symm_mem.set_timeout(before)
    symm_mem.reset()
    check_forward(name, rank, torch.float32)


@pytest.mark.parametrize(
    "name", ["one_shot_all_reduce", "fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
)
def test_a_rank_that_does_not_come(name: str) -> None:
    """Of the others in tests/faults/."""
    run_row(absent, WORLD_SIZE, name)
