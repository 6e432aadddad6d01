"""Several groups in one graph: tensor parallel layers whose weights are sharded over another dimension of the mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from graphs import AG, RS, Seen, applied, captured, fake_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from weft.fused_ops.passes import FusionPass

SHAPES = ((2, 6, 8), (4, 8), (4, 8))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def graphs(mesh: DeviceMesh, fusion: FusionPass | None = None) -> list[Seen]:
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()

    def weight(w: Tensor) -> Tensor:
        return funcol.all_gather_tensor_autograd(w, 0, dp)

    def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = F.silu(F.linear(funcol.all_gather_tensor_autograd(x, 1, tp), weight(a)))
        return funcol.reduce_scatter_tensor_autograd(F.linear(h, weight(b)), "sum", 1, tp)

    return captured(mlp, *(torch.randn(s, requires_grad=True) for s in SHAPES), fusion=fusion)


def by_group(seen: Seen, group: str) -> list[str | None]:
    return [e.fused_into for e in seen.entries if e.group == group]


def test_the_activations_are_fused_and_the_weights_gathered(mesh: DeviceMesh) -> None:
    """A product of a gathered weight that is scattered afterwards is the scatter's."""
    forward, backward = graphs(mesh)
    tp, dp = mesh["tp"].get_group().group_name, mesh["dp"].get_group().group_name
    assert by_group(forward, tp) == [AG, RS], forward.reasons
    assert by_group(forward, dp) == [None, None]
    assert by_group(backward, tp) == [AG, RS], backward.reasons
    # The gradients of the weights are products, too.
    assert by_group(backward, dp) == [RS, RS], backward.reasons


def test_each_op_keeps_its_group(mesh: DeviceMesh) -> None:
    for seen in graphs(mesh):
        ops = [n for n in seen.after.nodes if "weft" in str(n.target)]
        want = sorted(e.group for e in seen.entries if e.fused_into)
        assert sorted(n.args[3 if "all_gather" in n.target._opname else 4] for n in ops) == want


def test_one_of_two_groups(mesh: DeviceMesh) -> None:
    fusion = FusionPass(groups=[(mesh, "tp")], agree=False)
    _, backward = graphs(mesh, fusion)
    assert by_group(backward, mesh["dp"].get_group().group_name) == [None, None]
    assert "none of those this pass is for" in backward.reasons


def test_the_same_tensor_gathered_over_two_groups(mesh: DeviceMesh) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(funcol.all_gather_tensor(x, 0, mesh[d].get_group()) @ w for d in ("dp", "tp"))  # type: ignore[return-value]

    (seen,) = captured(fn, torch.randn(6, 8), torch.randn(8, 5))
    assert [e.detail for e in seen.entries] == ["1 product", "1 product"]


def test_what_is_no_tensor_is_no_obstacle(mesh: DeviceMesh) -> None:
    """DTensor's graphs have placeholders that stand for a mesh."""
    (seen,) = captured(
        lambda x, w: funcol.all_gather_tensor(x, 0, mesh["tp"].get_group()) @ w,
        torch.randn(6, 8),
        torch.randn(8, 5),
    )
    graph = seen.before
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        graph.placeholder("mesh").meta["val"] = object()
        graph.placeholder("nothing")
    assert applied(graph).fused == [AG]
