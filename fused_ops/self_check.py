"""The check of a group's first heap before kernels are taken that were never run on such GPUs, or over PCIe.

PCIe peer access has been seen to return wrong data on patched drivers, and an architecture that a kernel only compiles
for may order memory in another way than those it was run on. So every pair of ranks first exchanges patterns by plain
stores and loads. Then each collective is compared with its reference, which every rank computes by itself: what a rank
sends follows from its number.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from ..kernels.all_reduce_rms_norm.reference import Affine, NormKind, add_residual_and_norm
from ..kernels.device.capability import (
    arch_of,
    has_tensor_memory,
    is_untested,
    takes_untested,
    why_no_kernel_on,
)
from ..symm_mem import HeapUnavailable, PeerTimeout, WeftError
from ..symm_mem.heap.heap import Heap
from .ops import OP_OF
from .ops.experts.grouped_matmul import multiply
from .ops.op import on_device

_PATTERN = 1 << 18  # words from each rank to each, in each round
_ROUNDS = 3
_SMALL, _LARGE = 1 << 10, 2 << 20  # elements of all-reduces: in one trip, and in two
_ROWS, _HIDDEN, _EPS = 64, 1024, 1e-5
_PART_ROWS, _DEPTH, _COLUMNS = 384, 256, 1280  # of products
_CLOSE = 2**-7  # of numbers of bfloat16 that are rounded once
_log = logging.getLogger("weft.ops")
_warned: set[str] = set()


def check_new_heap(heap: Heap) -> None:
    """Does nothing but on GPUs that no kernel was run on, with WEFT_UNTESTED=1, and over PCIe. Collective.

    A rank by itself has nobody to check with.

    Raises:
        HeapUnavailable: on all ranks, if a check failed on one.
        PeerTimeout: a rank does not come.
    """
    if heap.device.type != "cuda" or heap.world_size == 1:
        return
    is_new = takes_untested() and is_untested(heap.device)
    untested = [f"on {arch_of(heap.device)}"] if is_new else []
    where = " ".join([*untested, *["over PCIe"] * heap.backend.over_pcie])
    if not where:
        return
    if where not in _warned:
        _warned.add(where)
        _log.warning("weft's kernels were never run %s: each group's first heap is checked", where)
    try:
        run_checks(heap)
    except PeerTimeout:
        raise
    except WeftError as e:
        raise HeapUnavailable(f"kernels that were never run {where} failed their check: {e}") from e


def run_checks(heap: Heap) -> None:
    """Patterns between all ranks, then each collective, where its kernels are taken.

    Raises:
        WeftError: on all ranks, if a check failed on one.
    """
    _check_patterns(heap)
    if why_no_kernel_on("all_reduce", heap.device) is not None:
        return
    collectives = (_all_reduce, _all_gather, _reduce_scatter, _norm)
    for check in (*collectives, _gathered_products, _scattered_products):
        step = partial(check, heap)
        heap.rendezvous.run_on_all(f"check {check.__name__.lstrip('_')}", step)


def _check_patterns(heap: Heap) -> None:
    size, rank = heap.world_size, heap.rank
    block = heap.allocate(size * _PATTERN * 4, "check of peer access")

    def slot(of: int, sender: int) -> Tensor:
        return heap.tensor(of, block.offset + sender * _PATTERN * 4, (_PATTERN,), torch.int32, block)

    def write(turn: int) -> None:
        for peer in range(size):
            pattern = _pattern(rank, peer, turn, heap.device)
            # By copy engines, and by SMs.
            if turn % 2:
                slot(peer, rank).copy_(pattern)
            else:
                torch.bitwise_not(~pattern, out=slot(peer, rank))
        _finish(heap)

    def read(turn: int) -> None:
        for owner in range(size):
            for sender in range(size):
                if not torch.equal(slot(owner, sender), _pattern(sender, owner, turn, heap.device)):
                    raise RuntimeError(f"memory of rank {owner} has not what rank {sender} wrote there")

    heap.rendezvous.run_on_all(
        "begin the check", partial(_finish, heap)
    )  # before a captured graph has a write
    for turn in range(_ROUNDS):
        heap.rendezvous.run_on_all("write patterns", partial(write, turn))
        heap.rendezvous.run_on_all("read patterns", partial(read, turn))


def _finish(heap: Heap) -> None:
    if not heap.backend.quiesce():
        raise RuntimeError("a CUDA graph is being captured: make a call before")


def _pattern(sender: int, receiver: int, turn: int, device: torch.device) -> Tensor:
    """Words that are nowhere else the same."""
    numbers = torch.arange(_PATTERN, dtype=torch.int64, device=device) * 2654435761
    return (numbers + (sender * 64 + receiver) * 40503 + turn * 2246822519).to(torch.int32)


def _sent(rank: int, shape: tuple[int, ...], heap: Heap) -> Tensor:
    """Whole numbers, whose sums bfloat16 has exactly."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.int64, device=heap.device)
    return ((numbers * (2 * rank + 3) // 5) % 9 - 4).to(torch.bfloat16).view(shape)


def _total(shape: tuple[int, ...], heap: Heap) -> Tensor:
    parts = [_sent(rank, shape, heap).float() for rank in range(heap.world_size)]
    return torch.stack(parts).sum(0).to(torch.bfloat16)


def _run(heap: Heap, name: str, *arguments: object) -> list[Tensor]:
    op = OP_OF[name]
    found = op.validate(op.record(*arguments, heap.group_name))
    choice = op.choose(*found)
    done = op.run(choice, heap, *found)
    return list(done) if isinstance(done, tuple) else [done]


def _compare(found: Tensor, wanted: Tensor, close: float = 0.0) -> None:
    wrong = (found.float() - wanted.float()).abs() > close * (1 + wanted.float().abs())
    if (count := int((wrong | found.isnan()).sum())) > 0:
        raise RuntimeError(f"{count} of {wanted.numel()} numbers are wrong")


def _all_reduce(heap: Heap) -> None:
    for count in (_SMALL, _LARGE):
        x = _sent(heap.rank, (count,), heap)
        _compare(_run(heap, "one_shot_all_reduce", x, "sum")[0], _total((count,), heap))


def _all_gather(heap: Heap) -> None:
    parts = [_sent(rank, (_SMALL, 64), heap) for rank in range(heap.world_size)]
    _compare(_run(heap, "one_shot_all_gather", parts[heap.rank], 0)[0], torch.cat(parts))


def _reduce_scatter(heap: Heap) -> None:
    shape = (heap.world_size * 64, _SMALL)
    x, wanted = _sent(heap.rank, shape, heap), _total(shape, heap).chunk(heap.world_size)[heap.rank]
    _compare(_run(heap, "one_shot_reduce_scatter", x, "sum", 0)[0], wanted)


def _norm(heap: Heap) -> None:
    x, residual = _sent(heap.rank, (_ROWS, _HIDDEN), heap), _sent(7, (_ROWS, _HIDDEN), heap)
    weight = _sent(8, (_HIDDEN,), heap)
    normed, sums = _run(heap, "fused_all_reduce_rms_norm", x, residual, weight, _EPS)
    total, affine = _total((_ROWS, _HIDDEN), heap), Affine(weight)
    wanted, wanted_sums = add_residual_and_norm(total, residual, affine, NormKind(_EPS))
    _compare(sums, wanted_sums)
    _compare(normed, wanted, _CLOSE)


def _weight(heap: Heap) -> Tensor | None:
    """Sums of its columns have at most 64 numbers up to 4. None where products are not by tcgen05."""
    if heap.device.type == "cuda" and not has_tensor_memory(heap.device):
        return None
    b = _sent(9, (_DEPTH, _COLUMNS), heap) // 4
    b[torch.arange(_DEPTH, device=heap.device) % 4 != 0] = 0
    return b


def _gathered_products(heap: Heap) -> None:
    """A call as no other algorithm takes, and a grouped product of the same rows."""
    if (b := _weight(heap)) is None:
        return
    shards = [_sent(rank, (_PART_ROWS, _DEPTH), heap) for rank in range(heap.world_size)]
    A, (C,) = _run(heap, "fused_all_gather_matmul", shards[heap.rank], [b], 0)
    _compare(A, torch.cat(shards))
    _compare(C, torch.cat(shards).float() @ b.float())
    ends = torch.tensor([100, 100, _PART_ROWS], dtype=torch.int32, device=heap.device)
    with on_device(A):
        (grouped,) = multiply(A[:_PART_ROWS], [(torch.stack([b, b, -b]), None)], ends, None)
    _compare(grouped, torch.cat([C[:100], -C[100:_PART_ROWS]]))


def _scattered_products(heap: Heap) -> None:
    """A call as no other algorithm takes."""
    if (b := _weight(heap)) is None:
        return
    parts = [_sent(rank, (2, heap.world_size * _PART_ROWS, _DEPTH), heap) for rank in range(heap.world_size)]
    total = torch.stack([part.float() @ b.float() for part in parts]).sum(0).to(torch.bfloat16)
    scattered = _run(heap, "fused_matmul_reduce_scatter", parts[heap.rank], b, "sum", 1)[0]
    _compare(scattered, total.chunk(heap.world_size, 1)[heap.rank])
