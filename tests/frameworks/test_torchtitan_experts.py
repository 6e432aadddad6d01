"""torchtitan 0.3: its routed experts with weft's token dispatcher. Result and gradients are those of experts that are
all on one rank: between CPU ranks its own dispatcher cannot exchange parts of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcommon import check, gather
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torchtitan.models.common.token_dispatcher")

DIM, HIDDEN, EXPERTS, CHOICES, BATCH, SEQUENCE = 16, 24, 6, 2, 2, 5
BOUND = 1.6e-2  # its products are rounded to bfloat16, forward and backward
OVERRIDE = "weft.fused_ops.drop_in.torchtitan_experts.weft_experts"


def routed_experts(num_local_experts: int, *overrides: str) -> Any:
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=num_local_experts),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=CHOICES),
    )
    apply_overrides(OverrideConfig(imports=[*overrides]), config)
    return config.build()


def train(experts: Any, given: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    x, scores, ids, counts = given
    experts.zero_grad()
    leaves = {"x": x.clone().requires_grad_(), "scores": scores.clone().requires_grad_()}
    y = experts(leaves["x"], leaves["scores"], ids, counts)
    y.backward(grad)
    leaves |= dict(experts.named_parameters())
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
@on_ranks(2, fresh=True, timeout=500)
def test_result_and_gradients(rank: int, size: int, compiled: bool) -> None:
    from torchtitan.distributed import spmd_types

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    spmd_types.set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    whole, alone, ours = (
        routed_experts(n, *by)
        for n, by in ((EXPERTS, ()), (EXPERTS, (OVERRIDE,)), (EXPERTS // size, (OVERRIDE,)))
    )
    torch.manual_seed(3)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    alone.load_state_dict(whole.state_dict())
    ours.load_state_dict({name: w.chunk(size)[rank] for name, w in whole.state_dict().items()})
    for experts, of in ((whole, None), (alone, None), (ours, mesh)):
        experts.token_dispatcher.wire_meshes(ep_mesh=of)
    if compiled:
        ours.compile(fullgraph=True)
    torch.manual_seed(rank)
    for step in range(3):  # each routes otherwise; in the second all go to rank 0
        chosen = (
            torch.rand(BATCH, SEQUENCE, EXPERTS // (1 + step % 2)).argsort(-1)[..., :CHOICES].contiguous()
        )
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        given = [torch.randn(BATCH, SEQUENCE, DIM), torch.rand(chosen.shape), chosen, counts]
        grad = torch.randn(BATCH, SEQUENCE, DIM)
        want, same = train(whole, given, grad), train(alone, given, grad)
        with spmd_types.set_current_spmd_mesh(mesh):
            found = train(ours, given, grad)
        for name, each in want.items():
            assert torch.equal(same[name], each), name
            of_experts = name.startswith("inner_experts")
            mine = torch.stack(gather(each)).sum(0).chunk(size)[rank] if of_experts else each
            check(f"{name} of step {step}", found[name], mine.double(), BOUND)
