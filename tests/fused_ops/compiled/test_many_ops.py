"""Many ops in one compiled graph, with their gradients, on one of two ranks: the other one runs the same op by op."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from op_table import op_calls
from opcommon import DEVICES, check
from ranks import run_row
from references import results_of
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_flatten, tree_unflatten
from weft import symm_mem

WAIT = 200.0  # seconds: the other rank compiles
# What experts are sent comes back with the last one. Others are compiled in test_eager_beside_compiled.py and in the
# files of gathers to one rank and of scaled products.
ELSEWHERE = re.compile(
    "moe_dispatch|moe_combine|fused_all_gather_matmul|fused_matmul_(reduce_scatter|all_reduce)"
    "|one_shot_(gather|all_reduce.*)|fused_all_reduce_rms_norm|.*scaled.*"
)
OPS = {name: call for name, call in op_calls().items() if not ELSEWHERE.fullmatch(name)}
Program = Callable[..., list[Tensor]]


def operands(name: str, world_size: int, tokens: int) -> list[Tensor]:
    """The tensors among a call's arguments."""
    leaves = tree_flatten(op_calls(world_size, tokens=tokens)[name].arguments)[0]
    wanted = OPS[name].has_gradient
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return [x.detach().requires_grad_(wanted and x.is_floating_point()) for x in tensors]


def program_of(name: str) -> Program:
    """The results of a call that are of floating point, from the tensors among its arguments."""
    leaves, spec = tree_flatten(OPS[name].arguments)

    def program(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        own = [next(given) if isinstance(x, Tensor) else x for x in leaves]
        return results_of(OPS[name].function(**tree_unflatten(own, spec)))

    return program


def outcome(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients of all that requires one."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    results = program(*given)
    wanted = [x for x in results if x.requires_grad]
    torch.autograd.backward(wanted, [x.detach().cos() for x in wanted])
    assert all((x.grad is not None) == x.requires_grad for x in given)
    return [*(x.detach() for x in results), *(x.grad for x in given if x.grad is not None)]


def one_of_two_compiled(rank: int, world_size: int) -> None:
    """Nothing is computed but by ops and by gradients: each loop would be C++ to be compiled."""
    before, counts = symm_mem.get_timeout(), {name: len(operands(name, world_size, 6)) for name in OPS}
    programs = {name: program_of(name) for name in OPS}

    def program(*tensors: Tensor) -> list[Tensor]:
        given, found = iter(tensors), []
        for name, one in programs.items():
            found += one(*(next(given) for _ in range(counts[name])))
        return found

    torch._dynamo.reset()
    symm_mem.set_timeout(WAIT)
    try:
        with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
            mine = torch.compile(program, fullgraph=True, dynamic=True) if rank == 1 else program
            for tokens in (18, 12):
                tensors = [x for name in OPS for x in operands(name, world_size, tokens)]
                want = outcome(program, tensors)
                for i, (got, exact) in enumerate(zip(outcome(mine, tensors), want, strict=True)):
                    check(f"{i} of {tokens} tokens", got, exact.double(), 2e-6)
    finally:
        symm_mem.set_timeout(before)


@pytest.mark.parametrize("device", DEVICES)
def test_one_of_two_ranks_is_compiled(device: str) -> None:
    run_row(one_of_two_compiled, 2, device=device)
