"""What users do with the arguments and results of torch's own ops: they may with those of weft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from op_table import op_calls
from opcommon import BOUND, DEVICES, check, gather, world
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from weft import fused_ops
from weft.fused_ops.dispatch import plan

# Of two matrices.
PRODUCTS: tuple[Callable[..., Tensor], ...] = (
    lambda a, b: fused_ops.fused_all_gather_matmul(a, [b], 0, world(), return_A=False)[1][0],
    lambda a, b: fused_ops.fused_matmul_reduce_scatter(a, b, "sum", 0, world()),
    lambda a, b: fused_ops.fused_matmul_all_reduce(a, b, "sum", world()),
)


def changed(rank: int, world_size: int) -> None:
    """A result is changed in place: gradients are those of the same out of place."""
    for fused in (True, False):
        for call in op_calls(world_size).values():
            if not call.has_gradient:
                continue
            op, inputs, results = call.first, call.tensors, []
            for change in (lambda y: y.mul_(2).relu_(), lambda y: (y * 2).relu()):
                given = [t.clone().requires_grad_() for t in inputs]
                if fused:
                    y = op(*given)
                else:
                    with plan.forced("unfused"):
                        y = op(*given)
                results.append([y := change(y), *torch.autograd.grad(y.square().sum(), given)])
            assert all(map(torch.equal, *results))
            with torch.no_grad():
                y = op(*inputs)
            y += (p := torch.ones(y.shape[-1], requires_grad=True))
            assert torch.autograd.grad(y.sum(), p)[0].eq(y.numel() // y.shape[-1]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_results_may_be_changed_in_place(device: str) -> None:
    run_ranks(changed, 2, device=device)


@on_ranks(2, device=DEVICES)
def test_gradients_lie_as_torch_lays_them_out(rank: int, world_size: int) -> None:
    """A matrix's gradient lies as torch.mm's: as the matrix, a weight's as the weight, so that nobody copies it."""
    a = torch.randn(4, 3, 6)
    cut = (
        (lambda a, b: fused_ops.fused_matmul_all_to_all(a, b, 0, world()), torch.randn(6, 8)),
        (lambda a, b: fused_ops.fused_all_to_all_matmul(a, b, 0, world()), torch.randn(12, 3)),
    )
    for op, b in (*((op, torch.randn(6, 8)) for op in PRODUCTS), *cut):
        found = []
        for matrix in (b, b.t().contiguous().t(), torch.stack([b, b], 2)[..., 0]):
            B = matrix.detach().requires_grad_()
            (grad,) = torch.autograd.grad(op(a, B).square().sum(), B)
            (like,) = torch.autograd.grad((a.new_ones(3, len(B)) @ B).square().sum(), B)
            assert grad.stride() == like.stride(), (grad.stride(), like.stride(), B.stride())
            found.append(grad)
        for other in found[1:]:
            check("gradient", other, found[0], BOUND[torch.float32])


@on_ranks(2, device=DEVICES)
def test_what_no_gradient_flows_through_requires_none(rank: int, world_size: int) -> None:
    A, B, C = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 2)
    whole, (first, second) = fused_ops.fused_all_gather_matmul(A, [B.requires_grad_(), C], 0, world())
    assert [t.requires_grad for t in (whole, first, second)] == [False, True, False]
    (grad,) = torch.autograd.grad(first.sum(), B)
    assert torch.allclose(grad, torch.cat(gather(A)).sum(0)[:, None].expand(4, 5).to(grad), atol=1e-5)
    whole, (first, second) = fused_ops.fused_all_gather_matmul(A.requires_grad_(), [B, C], 0, world())
    assert whole.requires_grad and first.requires_grad and second.requires_grad


def kept(rank: int, world_size: int) -> None:
    """An operand is kept for the gradient of the other alone: else it may be changed, and nobody keeps it."""
    A, B = torch.randn(4, 6), torch.randn(6, 8)
    for op in (torch.matmul, *PRODUCTS):
        for free in (0, 1):
            saved: list[Tensor] = []
            given = [A.clone(), B.clone()]
            x = given[free].requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
                y = op(*given)
            assert [t.shape[-1] for t in saved] == [given[1 - free].shape[-1]]
            (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            with torch.no_grad():
                x.zero_()
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
    saved, weight = [], torch.ones(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
        fused_ops.fused_all_reduce_rms_norm(A, A, weight, 1e-5, world())
        fused_ops.fused_all_reduce_layer_norm(A, A, weight, weight, 1e-5, world())
    assert [t.shape for t in saved] == [A.shape] * 2, "the weight is for the gradients of the others"
    W = B.detach().requires_grad_()
    with torch.inference_mode():
        A = A.clone()  # that autograd may not keep
        with torch.enable_grad():
            assert not fused_ops.fused_matmul_reduce_scatter(A, W, "sum", 0, world()).requires_grad
    bias = torch.zeros(8, requires_grad=True)
    fused_ops.fused_matmul_reduce_scatter(A, B, "sum", 0, world(), bias=bias).sum().backward()
    assert bias.grad is not None and bias.grad.eq(A.shape[0]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_for_the_backward(device: str) -> None:
    run_ranks(kept, 2, device=device)


@on_ranks(2, device=DEVICES)
def test_gradients_under_autocast(rank: int, world_size: int) -> None:
    """Under autocast gradients are cast no more than results are: eager, and traced under it."""
    A, B = torch.randn(4, 33), torch.randn(33, 6)
    kind = A.device.type
    for op in PRODUCTS:
        given = [t.clone().requires_grad_() for t in (A, B)]
        want = torch.autograd.grad(op(*given).sum(), given)
        torch.compiler.reset()
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        with torch.autocast(kind, torch.bfloat16):
            eager = torch.autograd.grad(op(*given).sum(), given)
            y = compiled(*given).sum()
        traced = torch.autograd.grad(y, given)
        for got in (eager, traced):
            assert all(torch.allclose(g, w, rtol=1e-5, atol=1e-5) for g, w in zip(got, want, strict=True))


@on_ranks(2, device=DEVICES)
def test_an_average_of_large_numbers(rank: int, world_size: int) -> None:
    """Numbers of float16 whose sum is too large for one, and whose average is not."""
    x, eye = torch.full((2 * world_size, 4), 40_000.0).half(), torch.eye(4).half()
    for forced in (None, "unfused"):
        for op in (
            lambda: fused_ops.one_shot_all_reduce(x, "avg", world()),
            lambda: fused_ops.one_shot_reduce_scatter(x, "avg", 0, world()),
            lambda: fused_ops.fused_matmul_all_reduce(x, eye, "avg", world()),
            lambda: fused_ops.fused_matmul_reduce_scatter(x, eye, "avg", 0, world()),
        ):
            if forced:
                with plan.forced("unfused"):
                    out = op()
            else:
                out = op()
            assert out.dtype == torch.float16 and out.eq(40_000).all(), forced


@on_ranks(2, device=DEVICES)
def test_what_is_overwritten(rank: int, world_size: int) -> None:
    group = world()
    parts = torch.ones(world_size**2)
    for write in (
        lambda t: fused_ops.one_shot_all_reduce_(t, "sum", group),
        lambda t: fused_ops.one_shot_all_gather(torch.ones(1), 0, group, out=t),
        lambda t: fused_ops.one_shot_reduce_scatter(parts, "sum", 0, group, out=t),
    ):
        for _ in range(3):  # on CUDA by the fast path, too
            w, t = torch.full((world_size,), 2.0, requires_grad=True), torch.full((world_size,), 3.0)
            y = (w * t).sum()
            write(t)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
    with torch.inference_mode():
        x = torch.ones(5)
        fused_ops.one_shot_all_reduce_(x, "sum", group)
    with pytest.raises(ValueError, match="x: is an inference tensor, must be overwritten in inference mode"):
        fused_ops.one_shot_all_reduce_(x, "sum", group)
    z = torch.full((3,), 2 + 3j, dtype=torch.complex64)
    assert fused_ops.one_shot_all_reduce_(z.conj().imag, "sum", group).eq(-3 * world_size).all()
    assert z.eq(complex(2, 3 * world_size)).all()
    assert fused_ops.one_shot_all_reduce(x, "sum", group).eq(world_size**2).all(), "nothing is broken"

    @torch.compile(backend="aot_eager", fullgraph=True)
    def of_unknown_size(x: Tensor, mask: Tensor) -> Tensor:
        return fused_ops.one_shot_all_reduce_(x[mask], "sum", group)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = of_unknown_size(torch.arange(6.0), torch.arange(6) % 2 == 0)
    assert out.tolist() == [0.0, 2.0 * world_size, 4.0 * world_size]


def counted(rank: int, world_size: int) -> list[int]:
    A, B = torch.ones(4, 6), torch.ones(6, 5)
    calls: list[Callable[[], Any]] = [
        lambda: fused_ops.fused_all_gather_matmul(A, [B, B[:, :1]], 0, world()),
        lambda: fused_ops.fused_matmul_reduce_scatter(A, B, "sum", 0, world(), bias=B[0]),
        lambda: fused_ops.fused_matmul_all_reduce(A, B, "sum", world()),
    ]
    flops = []
    for call in calls:
        with FlopCounterMode(display=False) as counter:
            call()
        flops.append(counter.get_total_flops())
    return flops


def test_torchs_counter_knows_how_much_they_multiply() -> None:
    assert run_ranks(counted, 2) == [[2 * 2 * 4 * 6 * 6, 2 * 4 * 6 * 5, 2 * 4 * 6 * 5]] * 2


@pytest.mark.parametrize("kind", ["usual", "fake", "parameter"])
def test_a_tensor_is_no_sequence_of_tensors(kind: str) -> None:
    B: Any = torch.ones(3, 4)
    if kind == "fake":
        B = FakeTensorMode().from_tensor(B)
    if kind == "parameter":
        B = torch.nn.Parameter(B)
    with pytest.raises(TypeError, match="Bs: is a tensor, must be a sequence of tensors"):
        fused_ops.fused_all_gather_matmul(torch.ones(2, 3), B, 0, None)


def test_a_number_of_numpy_is_named_in_full() -> None:
    """Its bool is called bool, too: what is refused must not read like what is asked for."""
    A: Any = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"return_A: is of type numpy\.bool_?, must be True or False"):
        fused_ops.fused_all_gather_matmul(A, [A], 0, None, return_A=np.bool_(True))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gather_dim: is of type numpy\.int64, must be an integer"):
        fused_ops.fused_all_gather_matmul(A, [A], np.int64(0), None)  # type: ignore[arg-type]


def test_an_eps_that_is_too_large_is_named() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="eps: is too large for a float"):
        fused_ops.fused_all_reduce_rms_norm(x, x, x, 10**400, None)
