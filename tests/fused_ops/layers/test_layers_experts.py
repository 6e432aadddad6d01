"""ColumnParallelExperts and RowParallelExperts against plain experts in float64, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from opcommon import BOUND, DEVICES, check, gather, poison, same_on_all, world
from ranks import run_row
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import silu
from torch.nn.utils import parametrize
from weft import fused_ops

HIDDEN, WIDTH, EXPERTS, CHOICES = 16, 48, 6, 3
Layers = tuple[fused_ops.ColumnParallelExperts, fused_ops.RowParallelExperts]


def whole_experts(dtype: torch.dtype) -> list[Tensor]:
    """The same on every rank: weight and bias of gate and up, weight and bias of down."""
    shapes = (EXPERTS, 2, WIDTH, HIDDEN), (EXPERTS, 2, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN)
    return [same_on_all(*shape, dtype=dtype) / 4 for shape in shapes]


def layers_of(whole: list[Tensor], **options: bool) -> Layers:
    up = fused_ops.ColumnParallelExperts.from_weights(whole[0], whole[1], world(), **options)
    return up, fused_ops.RowParallelExperts.from_weights(whole[2], whole[3], world(), **options)


def run(layers: Layers, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    up, down = layers
    rows, offs, slots = up.route(ids)
    if up.expert_parallel:
        hidden = up(x, rows, offs, swiglu=True)
    else:
        gate, value = up(x, rows, offs)
        hidden = silu(gate) * value
    y: Tensor = down(hidden, offs, slots, weights, shared)
    return y


def plain(whole: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate_up, gate_up_bias, down, down_bias = whole
    total = torch.zeros_like(x)
    for choice, weight in zip(ids.unbind(1), weights.unbind(1), strict=True):
        gate, up = (torch.einsum("th,tcih->tci", x, gate_up[choice]) + gate_up_bias[choice]).unbind(1)
        y = torch.einsum("ti,thi->th", silu(gate) * up, down[choice]) + down_bias[choice]
        total = total + y * weight[:, None]
    return total


def like_plain(rank: int, size: int, dtype: torch.dtype, expert: bool, sequence: bool) -> None:
    tokens = 4 * size
    whole = whole_experts(dtype)
    layers = layers_of(whole, expert_parallel=expert, sequence_parallel=sequence)
    x, on = same_on_all(tokens, HIDDEN, dtype=dtype), same_on_all(tokens, HIDDEN, dtype=dtype)
    ids = same_on_all(tokens, EXPERTS).argsort(1)[:, :CHOICES]
    weights = same_on_all(tokens, CHOICES, dtype=torch.float32).softmax(1)
    shared = torch.randn(tokens, HIDDEN).to(dtype)
    own_x, own_weights, own_on = ((t.chunk(size)[rank] if sequence else t) for t in (x, weights, on))
    leaves = [t.clone().requires_grad_() for t in (own_x, own_weights, shared)]
    used = fused_ops.one_shot_all_gather(leaves[1], 0, world()) if sequence else leaves[1]
    poison(rank)
    y = run(layers, leaves[0], ids, used, leaves[2])
    y.backward(own_on)

    exact = [t.double().requires_grad_() for t in (*whole, x, weights)]
    want = plain(exact[:4], exact[4], ids, exact[5])
    want.backward(on.double())
    total = want + sum(gather(shared))
    own = total.chunk(size)[rank] if sequence else total
    bound = 2 * BOUND[dtype]  # two products, each rounded
    check("y", y.detach(), own.detach(), bound, [own.detach(), *gather(shared)])
    names = ("gate and up", "their bias", "down", "its bias")
    parts = [getattr(layer, name) for layer in layers for name in ("weight", "bias")]
    for layer, name, part, like in zip(
        (layers[0], layers[0], layers[1], layers[1]), names, parts, exact, strict=False
    ):
        assert like.grad is not None and part.grad is not None
        kind = "bias" if "bias" in name else "weight"
        check(f"gradient of {name}", part.grad, layer._part(kind, like.grad), 3 * bound)
    for name, got, like in zip(("x", "weights"), leaves, exact[4:], strict=False):
        assert got.grad is not None and like.grad is not None
        wanted = like.grad.chunk(size)[rank] if sequence else like.grad
        check(f"gradient of {name}", got.grad, wanted, 3 * bound)
    assert leaves[2].grad is not None and torch.equal(leaves[2].grad, on)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("device", DEVICES)
def test_like_plain_experts(device: str, size: int, dtype: torch.dtype, expert: bool, sequence: bool) -> None:
    run_row(like_plain, size, dtype, expert, sequence, device=device)


def compiled(rank: int, size: int) -> None:
    whole = whole_experts(torch.float32)
    x = same_on_all(4, HIDDEN, dtype=torch.float32)
    scores = same_on_all(4, EXPERTS, dtype=torch.float32)

    def block(layers: Layers, x: Tensor, scores: Tensor) -> Tensor:
        weights, ids = scores.softmax(1).topk(CHOICES, dim=1)
        return run(layers, x, ids, weights)

    # The ops of the others are in Inductor's code in test_grouped_matmul_sums.py.
    for backend, options in (("inductor", {"expert_parallel": True}), ("aot_eager", {})):
        found: list[list[Any]] = []
        torch._dynamo.reset()
        for call in (block, torch.compile(block, backend=backend, fullgraph=True)):
            layers = layers_of([t.requires_grad_() for t in whole], **options)
            given = x.clone().requires_grad_(), scores.clone().requires_grad_()
            out = call(layers, *given)
            out.cos().sum().backward()
            found.append([out.detach(), *(t.grad for t in given)])
            found[-1] += [p.grad for layer in layers for p in layer.parameters()]
        for got, want in zip(found[1], found[0], strict=True):
            check("compiled", got, want.double(), 1e-5)
    with pytest.raises(NotImplementedError, match="fused_grouped_matmul_all_reduce: has no second gradient"):
        torch.autograd.grad(
            run(layers, x, ids_of(scores), torch.ones(4, CHOICES)).sum(),
            list(layers[1].parameters()),
            create_graph=True,
        )


def ids_of(scores: Tensor) -> Tensor:
    return scores.topk(CHOICES, dim=1)[1]


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    run_row(compiled, 2, device=device)


def checkpoints(rank: int, size: int, folder: Path) -> None:
    whole = whole_experts(torch.float32)
    sliced = torch.nn.ModuleList(layers_of(whole))
    state = fused_ops.sharded_state_dict(sliced)
    for name, want in zip(("0.weight", "0.bias", "1.weight", "1.bias"), whole, strict=True):
        assert torch.equal(state[name].full_tensor(), want), name
    dcp.save(state, checkpoint_id=folder)
    placed = torch.nn.ModuleList(layers_of([torch.zeros_like(t) for t in whole], expert_parallel=True))
    dcp.load(fused_ops.sharded_state_dict(placed), checkpoint_id=folder)
    for layer, (weight, bias) in zip(placed, (whole[:2], whole[2:]), strict=True):
        each = EXPERTS // size
        assert torch.equal(layer.weight, weight[rank * each :][:each])
        assert torch.equal(layer.bias, bias[rank * each :][:each])
    placed.load_state_dict(fused_ops.local_state_dict(fused_ops.sharded_state_dict(placed)))
    with pytest.raises(RuntimeError, match=r"0.weight: is a DTensor .*must have shape \(6, 2, 48, 16\)"):
        placed.load_state_dict(state)


def test_checkpoints(tmp_path: Path) -> None:
    run_row(checkpoints, 2, tmp_path)


class Counted(torch.nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 2


def casts_and_computes_once(rank: int, size: int) -> None:
    """Under autocast what is added is cast, too; a parametrization is asked once a call."""
    layers = layers_of(whole_experts(torch.float32))
    x, shared = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    ids, weights = torch.zeros(3, CHOICES, dtype=torch.int64), torch.ones(3, CHOICES)
    ids[:, 1] = 1
    with torch.autocast("cpu", torch.bfloat16):
        assert run(layers, x, ids, weights, shared).dtype == torch.bfloat16
    counted = [Counted() for _ in layers]
    for layer, how in zip(layers, counted, strict=True):
        parametrize.register_parametrization(layer, "weight", how, unsafe=True)
    before = [how.calls for how in counted]
    run(layers, x, ids, weights)
    assert [how.calls for how in counted] == [calls + 1 for calls in before]


def test_casts_and_computes_once() -> None:
    run_row(casts_and_computes_once, 2)


def drawn(rank: int, size: int) -> None:
    found = []
    for expert in (False, True):
        torch.manual_seed(3)
        up = fused_ops.ColumnParallelExperts(
            HIDDEN, WIDTH, EXPERTS, group=world(), gated=True, expert_parallel=expert
        )
        down = fused_ops.RowParallelExperts(WIDTH, HIDDEN, EXPERTS, group=world(), expert_parallel=expert)
        assert bool(down.bias.count_nonzero()) == expert
        found.append([fused_ops.sharded_state_dict(m)["weight"].full_tensor() for m in (up, down)])
        assert up.weight.abs().max() <= HIDDEN**-0.5 < 1.2 * up.weight.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_ranks_that_are_seeded_alike_have_parts_of_the_same_experts() -> None:
    run_row(drawn, 2)


def refused(rank: int, size: int) -> None:
    for make, args, options, words in [
        (fused_ops.ColumnParallelExperts, (12, 16, 4), {}, "in_features: is 12, must be a multiple of 8"),
        (
            fused_ops.ColumnParallelExperts,
            (8, 24, 4),
            {},
            "out_features: is 24, must be a multiple of 16: 8 for each of 2",
        ),
        (fused_ops.RowParallelExperts, (24, 8, 4), {}, "in_features: is 24, must be a multiple of 16"),
        (
            fused_ops.RowParallelExperts,
            (8, 8, 3),
            {"expert_parallel": True},
            "num_experts: is 3, must be a multiple of 2",
        ),
        (fused_ops.RowParallelExperts, (8, 8, 0), {}, "num_experts: is 0, must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            make(*args, group=world(), **options)
    weight = torch.ones(4, 16, 8)
    for given, kind, words in [
        ((weight[0],), ValueError, r"weight: has shape \(16, 8\), must be \[E, out_features"),
        ((weight.double(),), TypeError, "weight: is torch.float64, must be float32"),
        ((weight, torch.ones(4, 8)), ValueError, r"bias: has shape \(4, 8\), must have \(4, 16\)"),
    ]:
        with pytest.raises(kind, match=words):
            fused_ops.ColumnParallelExperts.from_weights(*given, group=world())
    mesh = DeviceMesh("cpu", list(range(size)))
    part = distribute_tensor(weight, mesh, [Shard(0)])
    for given, name in (((part,), "weight"), ((weight, part[..., 0]), "bias")):
        with pytest.raises(TypeError, match=f"{name}: is a DTensor, must be whole on every rank: its"):
            fused_ops.ColumnParallelExperts.from_weights(*given, group=world())
    with pytest.raises(TypeError, match="gated: is an option, must not be one: the shape of weight says it"):
        fused_ops.ColumnParallelExperts.from_weights(weight, group=world(), gated=True)
    with pytest.raises(ValueError, match=r"weight: has shape \(4, 2, 8, 16\), must be \[E, out_features"):
        fused_ops.RowParallelExperts.from_weights(torch.ones(4, 2, 8, 16), group=world())
    layer = fused_ops.ColumnParallelExperts.from_weights(weight, group=world())
    rows, offs, _ = layer.route(torch.tensor([[1], [0]]))
    for x, kind, words in [
        (torch.ones(2, 7), ValueError, "x: has 7 columns, must have 8"),
        (torch.ones(2, 8).half(), TypeError, "x: is torch.float16, must be torch.float32 like the weight"),
    ]:
        with pytest.raises(kind, match=words):
            layer(x, rows, offs)
    with pytest.raises(ValueError, match="swiglu: is True, must be False: the layer is not gated"):
        layer(torch.ones(2, 8), rows, offs, swiglu=True)
    with pytest.raises(TypeError, match="expert_parallel: is of type int, must be True or False"):
        fused_ops.ColumnParallelExperts(8, 16, 4, group=world(), expert_parallel=1)  # type: ignore[arg-type]


def test_refused() -> None:
    run_row(refused, 2)
