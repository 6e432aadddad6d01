"""Data and tensor parallelism on a 2 x 2 mesh: FSDP2 around compiled blocks, and weights gathered inside one graph."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled import CODEGEN, Outcome, check, outcomes, program
from test_dtensor_llama import VOCABULARY, models
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

RANKS, TENSOR, DATA = 4, 2, 2


def mesh_of_both() -> DeviceMesh:
    return init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("data", "tensor"))


def fsdp(rank: int, world: int, codegen: bool) -> Outcome:
    """Each block is sharded by parallelize_module, compiled, and sharded by FSDP2, as torchtitan does it."""
    model, exact, tables = models(4, 6)
    from llama_model import shard

    tokens, grad = torch.randint(VOCABULARY, (4, 6)), torch.randn(4, 6, VOCABULARY)
    want = exact(tokens, *tables)
    want.backward(grad.double())

    mesh = mesh_of_both()
    shard(model, mesh["tensor"], loss=False)
    with program(codegen) as p:
        model.embedding = p.compile(model.embedding, fullgraph=True)
        for i, layer in enumerate(model.layers):
            model.layers[i] = p.compile(layer, fullgraph=True)
            fully_shard(model.layers[i], mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        mine = slice(mesh["data"].get_local_rank(), None, DATA)
        got = model(tokens[mine], *(t.float() for t in tables))
        # FSDP averages the gradients of all ranks of its dimension.
        got.backward(grad[mine] * DATA)
        p.compare("logits", got, want[mine])
        p.compare_gradients(model, exact)
        return p.outcome()


def one_graph(rank: int, world: int, only_tensor: bool, codegen: bool) -> Outcome:
    """A feed-forward block whose weights are gathered over one group, its sequence over the other."""
    torch.manual_seed(os.getppid())
    mesh = mesh_of_both()
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    dim, hidden, sequence, batch = 24, 40, 6, 4
    up, down = torch.randn(hidden, dim) / dim**0.5, torch.randn(dim, hidden) / hidden**0.5
    x, grad = torch.randn(batch, sequence, dim), torch.randn(batch, sequence, dim)

    def piece(t: Tensor, cut: int, index: int, count: int) -> Tensor:
        return t.chunk(count, cut)[index].contiguous()

    d, t = data.rank(), tensor.rank()
    mine = [
        piece(piece(x, 0, d, DATA), 1, t, TENSOR),
        piece(piece(up, 0, t, TENSOR), 0, d, DATA),
        piece(piece(down, 1, t, TENSOR), 0, d, DATA),
    ]
    whole = [v.double().requires_grad_() for v in (x, up, down)]
    for v in mine:
        v.requires_grad_()

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = [funcol.all_gather_tensor_autograd(w, 0, data) for w in (up, down)]
        y = F.gelu(F.linear(funcol.all_gather_tensor_autograd(x, 1, tensor), weights[0]))
        return x + funcol.reduce_scatter_tensor_autograd(F.linear(y, weights[1]), "sum", 1, tensor)

    def exactly(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, up)), down)

    groups: list[Any] | None = [tensor] if only_tensor else None
    with program(codegen, groups=groups) as p:
        got, want = p.compile(block, fullgraph=True)(*mine), exactly(*whole)
        given = piece(piece(grad, 0, d, DATA), 1, t, TENSOR)
        got.backward(given)
        want.backward(grad.double())
        p.compare("output", got, piece(piece(want, 0, d, DATA), 1, t, TENSOR))
        for name, a, b in zip(("x", "up", "down"), mine, whole, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            cut = piece(b.grad, 1 if name == "down" else 0, t, TENSOR)
            wanted = piece(cut, 0, d, DATA) if name != "x" else piece(piece(b.grad, 0, d, DATA), 1, t, TENSOR)
            p.compare(f"gradient of {name}", a.grad, wanted)
        dist.barrier()
        return p.outcome()


@CODEGEN
def test_fsdp_around_compiled_blocks(codegen: bool) -> None:
    # One graph serves both blocks. FSDP's own collectives run outside of the graphs.
    check(outcomes(fsdp, RANKS, codegen), 8 + 2, [])


@CODEGEN
def test_two_groups_in_one_graph(codegen: bool) -> None:
    left = ["all_gather_into_tensor", "reduce_scatter_tensor"] * 2
    check(outcomes(one_graph, RANKS, True, codegen), 4, left)


def test_both_groups_of_one_graph() -> None:
    # Six products for eight collectives: each way forward a product stands between two of them, and one gets it. The
    # other one goes alone.
    found = outcomes(one_graph, RANKS, False, False)
    check(found, 8, [])
    assert found[0].text.count("one_shot") == 2
