"""Ordinary tensors as peers, between CPU ranks: what is mapped, what is copied, and what is refused."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from weft import symm_mem

KINDS = ("private", "shared", "heap", "view")


def make(kind: str, *shape: int) -> torch.Tensor:
    if kind == "shared":
        return torch.randn(*shape).share_memory_()
    if kind == "heap":
        block = symm_mem.empty(20, 20)  # of one size on all ranks
        return block[3 : 3 + shape[0], 2 : 2 + shape[1]].copy_(torch.randn(*shape))
    if kind == "view":  # rows and columns of something larger, transposed
        wide = torch.randn(shape[-1] * 2 + 1, 3 + shape[0])
        return wide[1::2, 2 : 2 + shape[0]].t()
    return torch.randn(*shape)


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    return (rank + 1) % world_size, (rank - 1) % world_size


def gathered(x: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Each rank's, of any size."""
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, x.double())
    return found


@pytest.mark.parametrize("kind", KINDS)
@on_ranks([1, 2, 3, 4])
def test_data_goes_both_ways(rank: int, world_size: int, kind: str) -> None:
    right, left = neighbours(rank, world_size)
    for turn in range(3):
        mine = make(kind, 5 + rank, 7)
        (x,) = symm_mem.register([mine])
        assert [tuple(shape) for shape in x.shapes] == [(5 + r, 7) for r in range(world_size)]
        before = gathered(mine, world_size)
        x.signal(left)
        out = torch.full((5 + right, 7), float("nan"))
        assert x.get(out, right) is out
        assert torch.equal(out.double(), before[right])
        x.wait(left)
        sent = torch.randn(7, 5 + right).t()
        x.signal(left)
        x.put(sent, right)
        x.wait(left)
        assert torch.equal(mine.double(), gathered(sent, world_size)[left])
        if turn == 1:
            symm_mem.unregister([x])


@on_ranks([2, 4])
def test_kinds_and_sizes_that_differ_by_rank(rank: int, world_size: int) -> None:
    """Each rank's tensor lies in memory of another kind, and has another size."""
    right, left = neighbours(rank, world_size)
    tensors = {kind: make(kind, 4, 3 + rank) for kind in KINDS}
    x, y = symm_mem.register([tensors[KINDS[rank % len(KINDS)]], torch.arange(rank)])
    for _ in range(50):
        x.signal(left)
        x.put(torch.full((4, 3 + right), float(right)), right)
        x.wait(left)
        assert (x.tensor == rank).all()
        x.tensor.fill_(-1)
    y.signal(left)
    assert y.get(torch.full((right,), -1), right).tolist() == list(range(right))
    y.wait(left)
    symm_mem.unregister([x, y])


@on_ranks(3, fresh=True)
def test_a_segment_is_mapped_once(rank: int, world_size: int) -> None:
    whole = torch.zeros(100).share_memory_()
    a, b = symm_mem.register([whole[:10], whole[50:].view(5, 10).t()])
    for x in (a, b):
        assert all(tensor is not None for tensor in x.tensors)
        assert x.tensors[rank] is x.tensor
    stats = symm_mem.stats()
    assert (stats.registered, stats.segments) == (2, world_size)
    assert stats.reserved == 400 * (world_size - 1)
    right, left = neighbours(rank, world_size)
    b.signal(left)
    b.put(torch.full((10, 5), rank + 1.0), right)
    b.wait(left)
    assert (whole[50:] == left + 1).all() and (whole[:50] == 0).all()
    (c,) = symm_mem.register([torch.zeros(3)])
    assert [tensor is None for tensor in c.tensors] == [r != rank for r in range(world_size)]
    assert symm_mem.stats().reserved == stats.reserved, "copies take no addresses"
    view = b.tensors[right]
    symm_mem.unregister([a, b, c])
    assert view is not None and view.sum() == 50 * (rank + 1), "a tensor keeps what it lies in"


@on_ranks(2, fresh=True)
def test_more_than_a_slab(rank: int, world_size: int) -> None:
    """More registrations than one slab of semaphores has room for."""
    xs = symm_mem.register([torch.zeros(1) for _ in range(600)])
    right, left = neighbours(rank, world_size)
    for x in (xs[0], xs[255], xs[256], xs[599]):
        x.signal(left)
        x.put(torch.full((1,), float(x.number)), right)
        x.wait(left)
        assert x.tensor.item() == x.number
    slots = {x.of.slot for x in xs}
    assert slots == set(range(600))
    symm_mem.unregister(xs)
    assert symm_mem.stats().registered == 0


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    for bad, kind, words in [
        (torch.zeros(2), TypeError, "tensors: is of type Tensor"),
        ([], ValueError, "tensors: is empty"),
        ([3], TypeError, r"tensors\[0\]: is of type int"),
        ([torch.zeros(2), torch.zeros(1).expand(4)], ValueError, r"tensors\[1\]: has strides \(0,\)"),
        ([torch.zeros(2, dtype=torch.complex64).conj()], ValueError, "conjugated"),
        ([torch.eye(2).to_sparse()], ValueError, "must be strided"),
        ([torch.zeros(2, device="meta")], ValueError, "is on meta"),
    ]:
        with pytest.raises(kind, match=words):
            symm_mem.register(bad)  # type: ignore[arg-type]
    (x,) = symm_mem.register([torch.zeros(2, 3)])
    right = (rank + 1) % world_size
    for source, words in [
        (torch.zeros(3, 2), r"source: is torch.float32\[3, 2\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "source: is torch.float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            x.put(source, right)
    with pytest.raises(ValueError, match="out: has strides"):
        x.get(torch.zeros(1, 1).expand(2, 3), right)
    with pytest.raises(ValueError, match="peer: is 2, must be a rank from 0 to 1"):
        x.signal(2)
    with pytest.raises(TypeError, match="source: is of type list"):
        x.put([1], right)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="registered: has a Tensor"):
        symm_mem.unregister([torch.zeros(1)])  # type: ignore[list-item]
    x.signal(rank)
    x.put(torch.ones(2, 3, requires_grad=True), rank)
    x.wait(rank)


@on_ranks(2)
def test_shared_memory_without_a_descriptor(rank: int, world_size: int) -> None:
    """Shared memory that this process cannot hand on is copied from."""
    right, left = neighbours(rank, world_size)
    memory = mmap.mmap(-1, 4096)  # shared, and of no file that has a name
    x_tensor = torch.frombuffer(memory, dtype=torch.float32)
    (x,) = symm_mem.register([x_tensor])
    x.signal(left)
    x.put(torch.full((1024,), rank + 1.0), right)
    x.wait(left)
    assert (x_tensor == left + 1).all()
    symm_mem.unregister([x])


@on_ranks(2)
def test_parameters_and_modes(rank: int, world_size: int) -> None:
    """Parameters and results of autograd: what is moved is outside of it."""
    right, left = neighbours(rank, world_size)
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    (x,) = symm_mem.register([weight])
    loss = (weight * torch.ones(3, requires_grad=True)).exp()
    x.signal(left)
    x.put(loss, right)
    x.wait(left)
    assert torch.allclose(weight.detach(), torch.full((3,), float(left)).exp())
    with torch.inference_mode():
        x.signal(left)
        out = x.get(torch.empty(3), right)
        x.wait(left)
    assert torch.allclose(out, torch.full((3,), float(rank)).exp()) and weight.requires_grad
