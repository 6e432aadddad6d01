"""all_to_all_vdev and its 2d forms between CPU ranks by ``weft.install()``, against what torch's documentation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from opcommon import DEVICES, gather, poison
from ranks import on_ranks
from test_install import in_place, taken
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from weft import symm_mem

ops = torch.ops.symm_mem
LEFT = 7.0  # what lies where nothing is written


def drawn(kind: str, size: int, each: int, rank: int) -> Tensor:
    """Rows of this rank's splits, of ``each`` for each rank."""
    splits = torch.randint(0, 5, (size * each,))
    if kind == "one":
        return torch.where(torch.arange(size * each) == size * each - 1, 9, 0)
    if kind == "none":
        return splits * (rank != size - 1)
    return splits * torch.randint(0, 2, splits.shape) if kind == "zeros" else splits


def arriving(
    given: list[Tensor], starts: list[Tensor], xs: list[Tensor], rank: int, layout: tuple[int, bool, int]
) -> tuple[list[int], list[int], dict[int, Tensor]]:
    """Sizes and offsets of the splits that a rank gets, and its rows by where they lie. ``layout``: splits of a pair of
    ranks, whether they are given by rank, and the alignment."""
    each, by_rank, align = layout
    size = len(given)
    order = [(e, p) for e in range(each) for p in range(size)]
    if not by_rank:
        order = [(e, p) for p in range(size) for e in range(each)]
    sizes, offsets, rows, at = [], [], {}, 0
    for i, (e, p) in enumerate(order):
        if align and i and i % size == 0:  # of the next one of ``each``
            begun = offsets[i - size]
            at = begun + max(-(-(at - begun) // align) * align, align)
        number = rank * each + e if by_rank else e * size + rank
        n, start = int(given[p][number]), int(starts[p][number])
        sizes.append(n)
        offsets.append(at)
        rows |= {at + k: xs[p][start + k] for k in range(n)}
        at += n
    return sizes, offsets, rows


def holds(out: Tensor, found: Tensor, want: tuple[list[int], list[int], dict[int, Tensor]]) -> None:
    sizes, offsets, rows = want
    assert found.tolist() == [sizes, offsets]
    for at, row in enumerate(out):
        assert torch.equal(row.double(), rows.get(at, torch.full_like(row, LEFT)).double()), at


@pytest.mark.parametrize("kind", ["random", "zeros", "one", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@on_ranks([1, 2, 3], device=DEVICES)
def test_rows_and_offsets(rank: int, size: int, kind: str, dtype: torch.dtype) -> None:
    tokens, capacity = 64, 200
    with in_place() as group:
        for _ in range(2):  # the second goes the fast way
            for each, align in ((1, None), (3, None), (2, 8)):
                poison(rank)
                given = drawn(kind, size, each, rank)
                x = torch.randint(-99, 99, (tokens, 3, 8)).to(dtype)
                found = torch.full((2, size * each), -5)
                out = torch.full((capacity, 3, 8), LEFT).to(dtype)
                every, xs = gather(given), gather(x)
                starts = [g.cumsum(0) - g for g in every]
                if each == 1:
                    ops.all_to_all_vdev(x, out, given, found, group)
                    holds(out, found, arriving(every, starts, xs, rank, (1, True, 0)))
                    continue
                ops.all_to_all_vdev_2d(x, out, given, found, group, major_align=align)
                holds(out, found, arriving(every, starts, xs, rank, (each, True, align or 1)))
                # And back: what has come goes where it came from.
                back, found_back = torch.full_like(x, LEFT), torch.full_like(found, -5)
                ops.all_to_all_vdev_2d_offset(out, back, found, found_back, group)
                assert found_back.tolist() == [given.tolist(), starts[rank].tolist()]
                n = int(given.sum())
                assert torch.equal(back[:n], x[:n]) and (back[n:] == LEFT).all()
        assert sum(taken("all_to_all_vdev_2d").values()) == 4
        assert {by for by, _ in taken("all_to_all_vdev_2d_offset")} == {"weft"}
        if size > 1:
            assert taken("all_to_all_vdev") == {("weft", ""): 2}


@on_ranks(2)
def test_splits_in_any_order_with_rows_between(rank: int, size: int) -> None:
    with in_place() as group:
        sizes, starts = torch.tensor([3, 0, 2, 4]), torch.tensor([11, 30, 0, 5]) + rank
        # Rows of one number have any stride.
        for x, out in (
            (torch.randn(17, 2), torch.full((20, 2), LEFT)),
            (torch.randn(1, 17).t(), torch.full((1, 20), LEFT).t()),
        ):
            found = torch.empty(2, 4, dtype=torch.int64)
            ops.all_to_all_vdev_2d_offset(x, out, torch.stack([sizes, starts]), found, group)
            holds(out, found, arriving(gather(sizes), gather(starts), gather(x), rank, (2, False, 0)))


def small(rank: int, size: int, name: str) -> dict[str, Any]:
    given = torch.tensor([2, 1, 0, 3])
    if name == "all_to_all_vdev":
        given = torch.tensor([2, 3])
    found, x = torch.empty(2, given.numel(), dtype=torch.int64), torch.randn(6, 8)
    if name == "all_to_all_vdev_2d_offset":
        return {
            "input": x,
            "out": torch.zeros(12, 8),
            "in_splits_offsets": torch.stack([given, given.cumsum(0) - given]),
            "out_splits_offsets": found,
        }
    return {"input": x, "out": torch.zeros(12, 8), "in_splits": given, "out_splits_offsets": found}


NAMES = ["all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_what_is_refused_of_real_and_fake_tensors(rank: int, size: int, name: str) -> None:
    splits = "in_splits_offsets" if name == "all_to_all_vdev_2d_offset" else "in_splits"
    whole = small(rank, size, name)
    with in_place() as group:
        for argument, other, message in (
            ("input", torch.randn(8, 6).t(), "input: has strides .*, must be contiguous"),
            ("input", torch.zeros(6, 3, dtype=torch.uint8), "input: .* an even number of bytes"),
            ("out", torch.zeros(12, 9), "out: .* must have rows like input"),
            ("out", torch.zeros(12, 8).double(), "out: is torch.float64"),
            (splits, whole[splits].int(), f"{splits}: is torch.int32, must be torch.int64"),
            (splits, whole[splits][..., :1].clone(), f"{splits}: has shape .*1\\], must have"),
            ("out_splits_offsets", torch.zeros(3, dtype=torch.int64), "out_splits_offsets: has shape"),
        ):
            given = {**whole, argument: other}
            with pytest.raises((ValueError, TypeError), match=message):
                getattr(ops, name)(*given.values(), group)
            mode = FakeTensorMode()
            with mode, pytest.raises((ValueError, TypeError), match=message):
                getattr(ops, name)(*map(mode.from_tensor, given.values()), group)
        if name == "all_to_all_vdev":
            two = small(rank, size, "all_to_all_vdev_2d")
            with pytest.raises(ValueError, match=r"in_splits: has shape \[4\], must have 2 splits"):
                ops.all_to_all_vdev(*two.values(), group)
        if name == "all_to_all_vdev_2d":
            with pytest.raises(ValueError, match="major_align: is 0, must be at least 1"):
                ops.all_to_all_vdev_2d(*whole.values(), group, 0)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_rows_that_do_not_fit_and_splits_that_cannot_be(rank: int, size: int, name: str) -> None:
    """All ranks raise the same, nothing is written, and the group goes on."""
    op = getattr(ops, name)
    with in_place() as group:
        whole = small(rank, size, name)
        splits = next(key for key in whole if key.startswith("in_splits"))
        short = {**whole, "out": torch.full((3, 8), LEFT)}
        most = {"all_to_all_vdev": 6, "all_to_all_vdev_2d": 7, "all_to_all_vdev_2d_offset": 8}[name]
        with pytest.raises(
            ValueError, match=rf"out.shape\[0\]: is 3, must be at least {most}, the rows of the rank"
        ):
            op(*short.values(), group)
        assert (short["out"] == LEFT).all()
        for changed in (-1, 99):
            wrong = whole[splits].clone()
            if rank == 1:
                wrong.view(-1)[0] = changed
            with pytest.raises(
                ValueError, match=f"{splits}: must not be negative, overlap, .*of rank 1 are .*{changed}"
            ):
                op(*{**whole, splits: wrong}.values(), group)
        op(*whole.values(), group)
        assert whole["out"].any()


@on_ranks(2, fresh=True)
def test_a_rank_that_does_not_come(rank: int, size: int) -> None:
    """Named after the deadline; the group is right again after a reset."""
    whole = small(rank, size, "all_to_all_vdev")
    with in_place() as group:
        ops.all_to_all_vdev(*whole.values(), group)
        want = whole["out"].clone()
        symm_mem.set_timeout(0.3, group)
        if rank == 0:
            with pytest.raises(symm_mem.PeerTimeout, match="rank 1"):
                ops.all_to_all_vdev(*whole.values(), group)
            with pytest.raises(symm_mem.WeftError):
                ops.all_to_all_vdev(*whole.values(), group)
        dist.barrier()
        symm_mem.set_timeout(60, group)
        symm_mem.reset(group)
        whole["out"].zero_()
        ops.all_to_all_vdev(*whole.values(), group)
        assert torch.equal(whole["out"], want)


@on_ranks(2)
def test_compiled(rank: int, size: int) -> None:
    """What a graph makes itself, and a call whose result nothing uses: it is made, in its place."""

    def program(x: Tensor, given: Tensor, group: str) -> tuple[Tensor, Tensor]:
        out, found = x.new_full((24, 8), LEFT), given.new_empty(2, 4)
        ops.all_to_all_vdev_2d(x + 1, torch.empty_like(out), given, found, group, 4)
        ops.all_to_all_vdev_2d(x * 2, out, given, found, group, 4)
        back, other = torch.zeros_like(x), torch.empty_like(found)
        ops.all_to_all_vdev_2d_offset(out * 3, back, found, other, group)
        return back, found

    torch._dynamo.reset()
    with in_place() as group, inductor_config.patch(fx_graph_cache=False):
        run = torch.compile(program, fullgraph=True)
        for _ in range(2):
            x, given = torch.randn(16, 8), torch.randint(0, 4, (4,))
            back, found = run(x, given, group)
            n = int(given.sum())
            assert torch.equal(back[:n], 6 * x[:n]) and not back[n:].any()
            assert torch.equal(found, program(x, given, group)[1])
        assert taken("all_to_all_vdev_2d") == {("weft", ""): 8}
    torch._dynamo.reset()


@on_ranks(2)
def test_given_back(rank: int, size: int) -> None:
    whole = small(rank, size, "all_to_all_vdev")
    with in_place() as group:
        ops.all_to_all_vdev(*whole.values(), group)
    with pytest.raises(NotImplementedError):
        ops.all_to_all_vdev(*whole.values(), group)
    assert not weft.drop_in.installed() and dist.is_initialized()
