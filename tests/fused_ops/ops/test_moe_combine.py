"""The ops that put experts' outputs together, on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from combines import SIZES, routed
from opcommon import BOUND, DEVICES, assert_fused, cells, check, gather, poison, refuses, world
from ranks import run_row
from references import held_gradients
from torch import Tensor
from torch.utils._pytree import tree_leaves
from weft.fused_ops import (
    fused_moe_combine_all_reduce,
    fused_moe_combine_all_reduce_rms_norm,
    fused_moe_combine_reduce_scatter,
)
from weft.kernels.all_reduce_rms_norm.reference import rms_norm
from weft.symm_mem import set_checked

EPS = 1e-2  # so large that it shows


def right(rank: int, world_size: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    poison(rank)
    tokens, _, hidden, _ = sizes
    for wide, of, shared in ((True, "random", True), (False, "one", False), (True, "none", True)):
        given = routed(sizes, dtype, wide, of)
        *first, added = given
        parts = gather(given.total(shared))
        if shared:
            norms = [*parts, *(p for part in given.parts() for p in gather(part))]
        else:
            norms = [*parts, *gather(given.parts()[0])]
        what = f"{sizes} {dtype} {of}"
        named = {"shared": added if shared else None}
        total = fused_moe_combine_all_reduce(*first, world(), **named)
        if total.numel() and world_size > 1:
            assert_fused()
        assert total.is_contiguous() and total.dtype == dtype
        check(f"sum {what}", total, sum(parts), BOUND[dtype], norms)
        assert torch.equal(total, fused_moe_combine_all_reduce(*first, world(), **named)), "other bits"

        residual, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden)
        args = residual, weight if wide else weight.to(dtype), EPS, world()
        for _ in range(2):
            normed, sums = fused_moe_combine_all_reduce_rms_norm(*first, *args, **named)
            assert torch.equal(sums, residual + total), f"sums {what}"
            want = rms_norm(sums.double(), args[1].double(), EPS)
            check(f"normed {what}", normed, want, BOUND[dtype])
        alone, sums = fused_moe_combine_all_reduce_rms_norm(*first, None, *args[1:], **named)
        assert torch.equal(sums, total), f"sums of no residual {what}"
        check(f"normed alone {what}", alone, rms_norm(total.double(), args[1].double(), EPS), BOUND[dtype])


@pytest.mark.parametrize(
    ("world_size", "device", "sizes", "dtype"), cells([1, 2, 3, 4], [(sizes,) for sizes in SIZES])
)
def test_all_reduces(
    world_size: int, device: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    run_row(right, world_size, sizes, dtype, device=device)


def scattered(rank: int, world_size: int, dtype: torch.dtype) -> None:
    poison(rank)
    for tokens, choices, hidden in ((4, 2, 8), (5, 8, 11), (0, 1, 8)):
        sizes = tokens * world_size, choices, hidden * world_size, 8
        for wide, named in ((True, True), (False, False)):
            *first, added = routed(sizes, dtype, wide)
            shared = added if named else None
            whole = fused_moe_combine_all_reduce(*first, world(), shared=shared)
            for dim in (0, 1, -1):
                got = fused_moe_combine_reduce_scatter(*first, dim, world(), shared=shared)
                assert got.is_contiguous()
                if got.numel() and world_size > 1:
                    assert_fused()
                assert torch.equal(got, whole.chunk(world_size, dim)[rank]), (sizes, dim)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_parts_have_the_bits_of_the_sum(device: str, world_size: int, dtype: torch.dtype) -> None:
    run_row(scattered, world_size, dtype, device=device)


def any_layout(rank: int, world_size: int) -> None:
    given = routed((6, 3, 32, 5), torch.bfloat16, True)
    want = fused_moe_combine_all_reduce(*given[:3], world(), shared=given.shared)
    odd = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in given]
    turned = [t.t().contiguous().t() for t in given]
    for y, slots, weights, shared in (odd, turned):
        assert torch.equal(fused_moe_combine_all_reduce(y, slots, weights, world(), shared=shared), want)
    far = given.slots.masked_fill(given.slots < 0, 1 << 30)  # of no row: as -1
    assert torch.equal(
        fused_moe_combine_all_reduce(given.y, far, given.weights, world(), shared=given.shared), want
    )
    far[0, 0] = 1 << 30
    set_checked(True)
    try:
        for y in (given.y, given.y.detach().requires_grad_()):
            with pytest.raises(ValueError, match=r"slots: holds 1073741824, must be from -1 to 17, as y"):
                fused_moe_combine_all_reduce(y, far, given.weights, world())
        for at, name in enumerate(("y", "slots")):
            wrong = [given.y, given.slots, given.weights]
            wrong[at] = torch.ones((), dtype=torch.complex64)
            with pytest.raises(ValueError, match=f"{name}: has 0 dimensions, must have 2"):
                fused_moe_combine_all_reduce(*wrong, world())
    finally:
        set_checked(False)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_and_slots(device: str) -> None:
    run_row(any_layout, 2, device=device)


def gradients(rank: int, world_size: int, scatter_dim: int | None) -> None:
    tokens, hidden = 4 * world_size, 3 * world_size
    y, slots, weights, shared = routed((tokens, 3, hidden, 5), torch.float32, True)
    given = {"y": y.nan_to_num(), "slots": slots, "weights": weights.nan_to_num(), "shared": shared}
    if scatter_dim is None:
        op = fused_moe_combine_all_reduce_rms_norm
        given |= {"residual": torch.randn(tokens, hidden), "weight": torch.randn(hidden), "eps": EPS}
    else:
        op, given["scatter_dim"] = fused_moe_combine_reduce_scatter, scatter_dim
    for t in given.values():
        if isinstance(t, Tensor) and t.is_floating_point():
            t.requires_grad_()
    # Slots are each rank's own: all ranks have those of one.
    dist.broadcast(given["slots"], 0)
    held_gradients(op, **given, group=world())
    first, *_ = tree_leaves(op(**given, group=world()))
    with pytest.raises(NotImplementedError, match=r"fused_moe_combine_.*: has no second gradient"):
        torch.autograd.grad(first.sum(), given["y"], create_graph=True)


@pytest.mark.parametrize("scatter_dim", [None, 0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device: str, scatter_dim: int | None) -> None:
    run_row(gradients, 3, scatter_dim, device=device)


def refused(rank: int, world_size: int) -> None:
    y, slots, weights, name = (
        torch.randn(6, 8),
        torch.zeros(3, 2, dtype=torch.int32),
        torch.rand(3, 2),
        world().group_name,
    )
    ops = torch.ops.weft
    for args, kind, words in [
        ((y[0], slots, weights), ValueError, "y: has 1 dimensions, must have 2"),
        ((y, slots[0], weights), ValueError, "slots: has 1 dimensions, must have 2"),
        ((y.double(), slots, weights), TypeError, "y: is torch.float64, must be float32"),
        ((y, slots.long(), weights), TypeError, "slots: is torch.int64, must be torch.int32"),
        ((y, slots[:, :0], weights[:, :0]), ValueError, r"slots: has shape \(3, 0\), must have a column"),
        ((y, slots, weights[:2]), ValueError, r"weights: has shape \(2, 2\), must have \(3, 2\) like slots"),
        ((y, slots, weights.half()), TypeError, "weights: is torch.float16, must be torch.float32 like y"),
        ((y.half(), slots, weights.bfloat16()), TypeError, "weights: is torch.bfloat16"),
    ]:
        refuses(ops.fused_moe_combine_all_reduce, (*args, name), kind, words)
        refuses(ops.fused_moe_combine_reduce_scatter, (*args, 0, name), kind, words)
        refuses(ops.fused_moe_combine_all_reduce_rms_norm, (*args, None, y[0], EPS, name), kind, words)
    first = y, slots, weights

    def with_shared(shared: torch.Tensor, group: str) -> torch.Tensor:
        return ops.fused_moe_combine_all_reduce(*first, group, shared=shared)

    for args, kind, words in [
        ((torch.randn(2, 8), name), ValueError, r"shared: has shape \(2, 8\), must have \(3, 8\)"),
        ((torch.randn(3, 8).half(), name), TypeError, "shared: is torch.float16, must be torch.float32"),
        ((torch.randn(3, 8), "nobody"), ValueError, "group: no process group is named"),
    ]:
        with pytest.raises(kind, match=words):
            with_shared(*args)
    norm = ops.fused_moe_combine_all_reduce_rms_norm
    for args, kind, words in [
        ((y, y[0], EPS), ValueError, r"residual: has shape \(6, 8\), must have \(3, 8\) to go with y"),
        ((y[:3], y[:, 0], EPS), ValueError, r"weight: has shape \(6,\), must have \(8,\) to go with y"),
        ((y[:3], y[0], -1.0), ValueError, "eps: is -1.0, must be 0 or more"),
    ]:
        refuses(norm, (*first, *args, name), kind, words)
    scatter = ops.fused_moe_combine_reduce_scatter
    refuses(scatter, (*first, 2, name), ValueError, "scatter_dim: is 2, must be from -2 to 1")
    refuses(scatter, (*first, 0, name), ValueError, "scatter_dim: what is scattered has size 3 there")


@pytest.mark.parametrize("device", DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(device: str) -> None:
    run_row(refused, 2, device=device)
