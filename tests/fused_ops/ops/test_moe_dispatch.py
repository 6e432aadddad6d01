"""moe_dispatch and moe_combine on real CPU processes, against float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from opcommon import (
    BOUND,
    DEVICES,
    assert_fused,
    cells,
    check,
    compiled_like_eager,
    gather,
    gathered,
    graph_of,
    poison,
    refuses,
    same_on_all,
    world,
)
from ranks import on_ranks, run_row
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from weft import symm_mem
from weft.fused_ops import MoeHandle, grouped_matmul, moe_combine, moe_dispatch
from weft.kernels.device.collective import host_exchange
from weft.symm_mem.heap import overflow


class Sizes(NamedTuple):
    tokens: int
    choices: int
    hidden: int
    each: int  # experts of a rank


SIZES = [Sizes(7, 2, 24, 3), Sizes(5, 8, 33, 8), Sizes(1, 1, 8, 1), Sizes(66, 4, 16, 2), Sizes(0, 2, 8, 4)]
KINDS = ("random", "one", "sentinels", "nowhere")


def chosen(sizes: Sizes, world_size: int, kind: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Experts of this rank's tokens, each once in a token; ``kind``: "one" expert gets all, some choices are
    "sentinels" that name none, or all tokens go "nowhere"."""
    experts = sizes.each * world_size
    ids = torch.stack([torch.rand(sizes.tokens, experts + sizes.choices).argsort(-1)])[0][:, : sizes.choices]
    if kind == "one":
        ids = torch.cat([torch.full_like(ids[:, :1], experts - 1), torch.full_like(ids[:, 1:], -1)], 1)
    elif kind == "nowhere":
        ids = torch.full_like(ids, experts)
    elif kind == "sentinels":
        ids = torch.where(torch.rand(ids.shape) < 0.3, torch.tensor([-1, experts, -(1 << 30)])[ids % 3], ids)
    return ids.to(dtype)


def factor_of(ids: Tensor) -> Tensor:
    """What an expert multiplies with."""
    return (1 - ids % 2 * 2) * 2.0 ** (ids % 3)


def wanted_rows(
    xs: Sequence[Tensor], ids: Sequence[Tensor], experts: range, align: int
) -> tuple[list[Tensor], list[int]]:
    """The rows of these experts, one after the other, and where each ends."""
    rows: list[Tensor] = []
    ends = []
    for expert in experts:
        rows += [x[t] for x, of in zip(xs, ids, strict=True) for t in (of == expert).any(1).nonzero()[:, 0]]
        rows += [torch.zeros(xs[0].shape[1]).double()] * (-len(rows) % align)
        ends.append(len(rows))
    return rows, ends


def right(rank: int, world_size: int, sizes: Sizes, dtype: torch.dtype) -> None:
    experts = range(rank * sizes.each, (rank + 1) * sizes.each)
    for kind in KINDS:
        for align in (1, 4):
            poison(rank)
            x = torch.randn(sizes.tokens, sizes.hidden).to(dtype)
            ids = chosen(sizes, world_size, kind, torch.int32 if align > 1 else torch.int64)
            rows, offs, handle = moe_dispatch(x, ids, sizes.each * world_size, world(), align=align)
            if x.numel() and world_size > 1:
                assert_fused()
            want, ends = wanted_rows(gather(x), gather(ids), experts, align)
            assert offs.tolist() == ends and offs.dtype == torch.int32
            most = sizes.tokens * world_size * min(sizes.choices, sizes.each) + sizes.each * (align - 1)
            assert rows.shape == (-(-most // align) * align, sizes.hidden) and rows.dtype == dtype
            if want:
                assert torch.equal(rows[: len(want)].double(), torch.stack(want)), "every bit"

            # What the experts make of a row, exactly: of another hidden size, each its own.
            y = torch.full((rows.shape[0], 2 * sizes.hidden), float("nan"), dtype=dtype)
            for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                y[begin:end] = rows[begin:end].repeat(1, 2) * factor_of(torch.tensor(experts[expert]))
            weights = torch.rand(sizes.tokens, sizes.choices).to(torch.float32 if align > 1 else dtype)
            poison(rank)
            out = moe_combine(y, handle, weights, world())
            assert (
                out.shape == (sizes.tokens, 2 * sizes.hidden) and out.dtype == dtype and out.is_contiguous()
            )
            there = (ids >= 0) & (ids < sizes.each * world_size)
            factors = torch.where(there, factor_of(ids), 0) * weights.double()
            parts = [(x.double() * factor[:, None]).repeat(1, 2) for factor in factors.unbind(1)]
            check(f"{kind} {align}", out, sum(parts), BOUND[dtype], parts)
            assert torch.equal(out, moe_combine(y, handle, weights, world())), "other bits"


@pytest.mark.parametrize(
    ("world_size", "device", "sizes", "dtype"), cells([1, 2, 3, 4], [(s,) for s in SIZES])
)
def test_rows_and_sums(world_size: int, device: str, sizes: Sizes, dtype: torch.dtype) -> None:
    run_row(right, world_size, sizes, dtype, device=device)


@on_ranks(3, device=DEVICES)
def test_ranks_with_other_numbers_of_tokens_or_none(rank: int, world_size: int) -> None:
    for tokens in ([4, 0, 1], [0, 0, 0], [0, 7, 2]):
        sizes = Sizes(tokens[rank], 2, 8, 2)
        x, ids = torch.randn(sizes.tokens, 8), chosen(sizes, world_size, "sentinels")
        weights = torch.rand(sizes.tokens, 2).requires_grad_()
        rows, _, handle = moe_dispatch(x, ids, 6, world(), max_tokens=max(tokens))
        out = moe_combine(rows, handle, weights, world())
        there = (ids >= 0) & (ids < 6)
        check("combined", out.detach(), x.double() * (weights * there).sum(1, keepdim=True).detach(), 1e-6)
        out.sum().backward()
        assert weights.grad is not None
        check("weights.grad", weights.grad, x.double().sum(1, keepdim=True) * there, 1e-6)
    with pytest.raises(ValueError, match="max_tokens: is 1, must be at least 2, as x has rows"):
        moe_dispatch(torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int32), 6, world(), max_tokens=1)


@on_ranks(4, device=DEVICES)
def test_routes_that_change_with_several_in_flight(rank: int, world_size: int) -> None:
    """As layers of a model: dispatches, then their combines in reverse."""
    for call in range(40):
        under_way = []
        for layer in range(3):
            sizes = Sizes(6, 2, 8 + 8 * layer, 2)
            x = torch.randn(sizes.tokens, sizes.hidden)
            ids = chosen(sizes, world_size, KINDS[(call + layer) % len(KINDS)])
            weights = torch.rand(6, 2)
            rows, _, handle = moe_dispatch(x, ids, 8, world())
            under_way.append((x, ids, weights, rows, handle))
        for x, ids, weights, rows, handle in reversed(under_way):
            factors = (weights * ((ids >= 0) & (ids < 8))).sum(1, keepdim=True)
            out = moe_combine(rows, handle, weights, world())
            check("combined", out, x.double() * factors, 1e-6, [x.double()])


@on_ranks(2, fresh=True)
def test_many_tokens_travel_in_chunks(rank: int, world_size: int) -> None:
    host_exchange.CHUNK_BYTES = 1000
    for kind in KINDS:
        sizes = Sizes(50, 2, 24, 2)
        x, ids = torch.randn(50, 24), chosen(sizes, world_size, kind)
        rows, _, handle = moe_dispatch(x, ids, 4, world())
        there = ((ids >= 0) & (ids < 4)).sum(1, keepdim=True)
        assert torch.equal(moe_combine(rows, handle, torch.ones(50, 2), world()), x * there)


@on_ranks(3, device=["cpu"])
def test_an_overflow_names_counts_on_all_ranks(rank: int, world_size: int) -> None:
    x, ids = torch.randn(4, 8), torch.tensor([[0, 1], [0, 2], [0, 3], [5, 1]])
    rows, _, handle = moe_dispatch(x, ids, 6, world(), capacity=15)  # rank 0 gets 5 rows of each rank
    assert rows.shape == (15, 8) and rows.any(1).sum() == [15, 6, 3][rank]
    for capacity, align, most in ((14, 1, 15), (17, 4, 20), (0, 1, 15)):
        with pytest.raises(ValueError, match=f"capacity: is {capacity}, must be at least {most}, the rows"):
            moe_dispatch(x, ids, 6, world(), capacity=capacity, align=align)
    assert torch.equal(moe_combine(rows, handle, torch.ones(4, 2), world()), 2 * x)
    twice = torch.zeros(4, 2, dtype=torch.int32)  # no room is made for one expert twice in a token
    with pytest.raises(ValueError, match=r"capacity: is 12, must be at least 24, .*each expert once"):
        moe_dispatch(x, twice, 3, world())


def test_an_overflow_on_a_gpu_is_raised_once_when_the_host_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    note = overflow._Note(torch.zeros(3, dtype=torch.int64), "capacity")
    monkeypatch.setattr(overflow, "_notes", {(torch.device("cuda", 0), "a", "capacity"): note})
    for most in (3, 9, 12, 2):  # of a capacity of 8
        note.add(torch.tensor(most), 8)
    overflow.raise_noted("b")  # another group's
    with pytest.raises(ValueError, match="capacity: is 8, must be at least 12"):
        symm_mem.check()
    note.add(torch.tensor(8), 8)
    symm_mem.check()
    note.add(torch.tensor(9), 8)
    with pytest.raises(ValueError, match="must be at least 9"):
        overflow.raise_noted("a")


def leaves(sizes: Sizes) -> list[Tensor]:
    x, weights = torch.randn(sizes.tokens, sizes.hidden), torch.rand(sizes.tokens, sizes.choices)
    return [t.requires_grad_() for t in (x, weights, torch.randn(sizes.each, sizes.hidden, 16))]


def mixture(x: Tensor, ids: Tensor, weights: Tensor, B: Tensor, align: int = 1) -> Tensor:
    rows, offs, handle = moe_dispatch(x * 2, ids, B.shape[0] * world().size(), world(), align=align)
    return moe_combine(grouped_matmul(rows, B, offs), handle, weights, world())


def exact_mixture(given: Sequence[Tensor], ids: Tensor, Bs: Tensor) -> Tensor:
    """In float64, with all ranks' experts."""
    x, weights = given
    there = (ids >= 0) & (ids < Bs.shape[0])
    y = torch.einsum("th,tjhn->tjn", 2 * x, Bs[torch.where(there, ids, 0)])
    return (y * (weights * there)[..., None]).sum(1)


@on_ranks(2)
def test_gradients_of_no_tokens(rank: int, world_size: int) -> None:
    x, weights = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    rows, _, handle = moe_dispatch(x, torch.zeros(0, 2, dtype=torch.int32), 4, world(), capacity=5)
    y = torch.randn(5, 16, requires_grad=True)
    moe_combine(y + 0 * rows.sum(), handle, weights, world()).sum().backward()
    assert y.grad is not None and y.grad.eq(0).all() and x.grad is not None and x.grad.shape == (0, 8)


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device: str, again: bool) -> None:
    run_row(gradients, 3, again, device=device)


def gradients(rank: int, world_size: int, again: bool) -> None:
    for sizes, kind in (
        (Sizes(6, 2, 8, 2), "sentinels"),
        (Sizes(5, 8, 24, 8), "random"),
        (Sizes(4, 2, 8, 2), "one"),
    ):
        given, ids = leaves(sizes), chosen(sizes, world_size, kind)
        x, weights, B = given
        args = x, ids, weights, B, 4
        out = checkpoint(mixture, *args, use_reentrant=False) if again else mixture(*args)
        assert isinstance(out, Tensor)
        weight = torch.randn_like(out)
        (out * weight).sum().backward(retain_graph=True)
        # The sum of all ranks' losses, of experts that all ranks have.
        Bs = torch.cat(gather(B)).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in given[:2]]
        every = zip(*(gather(t) for t in (x, weights, ids, weight)), strict=True)
        for r, (*of_rank, of_ids, on) in enumerate(every):
            total = exact_mixture(exact if r == rank else of_rank, of_ids.long(), Bs)
            if r == rank:
                check("result", out.detach(), total.detach(), 1e-6)
            (total * on).sum().backward()
        wanted = *(t.grad for t in exact), Bs.grad[rank * sizes.each :][: sizes.each]
        for name, leaf, want in zip(("x", "weights", "B"), given, wanted, strict=True):
            assert leaf.grad is not None, name
            check(f"{kind}: {name}.grad", leaf.grad, want, 1e-6)
    rows, _, handle = moe_dispatch(x, ids, B.shape[0] * world_size, world())
    for op, result in (("dispatch", rows), ("combine", moe_combine(rows, handle, weights, world()))):
        with pytest.raises(NotImplementedError, match=f"moe_{op}: has no second gradient"):
            torch.autograd.grad(result.sum(), x, create_graph=True)


def compiled(rank: int, world_size: int) -> None:
    experts = same_on_all(2, 8, 16, dtype=torch.float32)

    def layers(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = checkpoint(mixture, x, ids, weights, experts, 4, use_reentrant=False)
        return mixture(y[:, :8] + x, ids, weights, experts)

    def operands(tokens: int) -> list[Tensor]:
        sizes = Sizes(tokens, 2, 8, 2)
        return [torch.randn(tokens, 8), chosen(sizes, world_size, "sentinels"), torch.rand(tokens, 2)]

    compiled_like_eager(layers, operands, (6, 5))
    ids = operands(6)[1]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def rows(x: Tensor, capacity: int) -> Tensor:
        return moe_dispatch(x, ids, 2 * world_size, world(), capacity=capacity)[0]

    for capacity in (24, 32, 40):  # from the second on symbolic
        assert rows(torch.randn(6, 8), capacity).shape == (capacity, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    run_row(compiled, 2, device=device)


@on_ranks(2, device=DEVICES)
def test_opcheck(rank: int, world_size: int) -> None:
    ops, name, first = torch.ops.weft, world().group_name, torch.arange(4) % 2
    ids = torch.stack(
        [first, first + 2], 1
    )  # each expert gets four rows: what lies past the last one is not compared
    _, _, *places = ops.moe_dispatch(torch.randn(4, 8), ids, 4, name, capacity=8)
    for grad in (False, True):
        x, y = torch.randn(4, 8, requires_grad=grad), torch.randn(8, 8, requires_grad=grad)
        for named in ({"capacity": 8}, {"capacity": 8, "align": 4}):
            torch.library.opcheck(ops.moe_dispatch, (x, ids, 4, name), named)
        for weights in (None, torch.rand(4, 2, requires_grad=grad)):
            torch.library.opcheck(ops.moe_combine, (y, *places, weights, name))
    torch.library.opcheck(ops.moe_dispatch_again, (torch.randn(4, 8), *places, name))


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    x, ids, ops, name = (
        torch.randn(3, 8),
        torch.zeros(3, 2, dtype=torch.int32),
        torch.ops.weft,
        world().group_name,
    )
    for args, named, kind, words in [
        ((x[0], ids, 4), {}, ValueError, "x: has 1 dimensions, must have 2"),
        ((x, ids[:2], 4), {}, ValueError, "topk_ids: has 2 rows, must have 3 like x"),
        ((x, ids.float(), 4), {}, TypeError, "topk_ids: is torch.float32, must be int32 or int64"),
        ((x, ids[0], 4), {}, ValueError, "topk_ids: has 1 dimensions, must have 2"),
        ((x, ids[:, :0], 4), {}, ValueError, r"topk_ids: has shape \(3, 0\), must have a column"),
        ((x, ids, 3), {}, ValueError, "num_experts: is 3, must be a multiple of 2 ranks"),
        ((x, ids, 4), {"align": 0}, ValueError, "align: is 0, must be at least 1"),
        ((x, ids, 4), {"capacity": -1}, ValueError, "capacity: is -1, must be at least 0"),
        ((x.double(), ids, 4), {}, TypeError, "x: is torch.float64, must be float32, bfloat16 or float16"),
    ]:
        refuses(functools.partial(ops.moe_dispatch, group_name=name, **named), args, kind, words)
    with pytest.raises(TypeError, match="capacity: is of type float, must be an integer"):
        moe_dispatch(x, ids, 4, world(), capacity=1.5)
    rows, _, handle = moe_dispatch(x, torch.tensor([[0, 2]] * 3), 4, world())
    weights = torch.rand(3, 2)
    for given, kind, words in [
        ((rows[:3], *handle, weights), ValueError, "y: has 3 rows, must have 12, as moe_dispatch returned"),
        ((rows, handle[0][:5], *handle[1:], weights), ValueError, r"slots: has shape \(5, 2\), must have"),
        ((rows, *handle[:2], handle[2][:5], weights), ValueError, "ranks: has 5 elements, must have 6"),
        ((rows, *handle, weights[:2]), ValueError, r"weights: has shape \(2, 2\), must have \(3, 2\)"),
        ((rows, *handle, weights.half()), TypeError, "weights: is torch.float16, must be torch.float32"),
    ]:
        refuses(ops.moe_combine, (*given, name), kind, words)
    refuses(ops.moe_dispatch_again, (x[:2], *handle, name), ValueError, "x: has 2 rows, must have 3, as were")
    with pytest.raises(TypeError, match="handle: is a tensor, must be what moe_dispatch returned"):
        moe_combine(rows, rows, weights, world())
    with pytest.raises(ValueError, match="weights: has 6 rows, must have at most 3, as tokens were"):
        moe_combine(rows, MoeHandle(*handle), torch.cat([weights, weights]), world())


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [Sizes(64, 8, 2048, 64), Sizes(2048, 8, 2048, 64), Sizes(2048, 2, 4096, 4)])
def test_bits_of_many_rows_in_cuda_graphs(sizes: Sizes) -> None:
    run_row(bits_in_graphs, 2, sizes, device="cuda")


def bits_in_graphs(rank: int, world_size: int, sizes: Sizes) -> None:
    """Sent by ids and by known places in turn, in graphs and between them; every seventh row needs corrections."""
    experts, first = sizes.each * world_size, rank * sizes.each
    x = torch.randint(-(1 << 15), 1 << 15, (sizes.tokens, sizes.hidden)).to(torch.int16)
    x[::7, :8], x[::5, 8:16] = -1, torch.tensor([-2, -1] * 4).to(torch.int16)
    ids = torch.rand(sizes.tokens, experts).argsort(1)[:, : sizes.choices]
    xs = gathered(x.view(torch.int32)).view(torch.int16).view(-1, sizes.hidden)
    every = gathered(ids).flatten()
    here = ((every >= first) & (every < first + sizes.each)).nonzero()[:, 0]
    by_expert = here[every[here].argsort(stable=True)]
    want = xs[by_expert // sizes.choices]
    x = x.view(torch.bfloat16)

    def dispatched() -> list[Tensor]:
        rows, _, handle = moe_dispatch(x, ids, experts, world())
        return [rows, *handle]

    places = dispatched()[1:]

    def again() -> list[Tensor]:
        return [torch.ops.weft.moe_dispatch_again(x, *places, world().group_name)]

    def right(found: Sequence[Tensor]) -> None:
        assert torch.equal(found[0][: len(want)].view(torch.int16), want), "every bit"

    for _ in range(2):
        graphs = []
        for send in (dispatched, again):
            for _ in range(3):
                right(send())
            graph, found = graph_of(lambda send=send: [send() for _ in range(3)])
            graphs.append((graph, found))
        for graph, found in graphs * 2:
            for each in found:
                each[0].fill_(float("nan"))
            graph.replay()
            for each in found:
                right(each)
