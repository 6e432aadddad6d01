"""One op, one fault, all ranks: what each rank sees, how long it takes, and whether the group comes back.

Numbers are so small that every sum is exact: a result that a call returns is right to the bit, or it is a bug.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.inject import Fault
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, one_shot_all_reduce
from weft.fused_ops.plan import forced

STEPS = 5
STRIKES_AT = 2
PATIENCE = 30.0  # seconds: the deadline of everything that is expected to work


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """-1, 0 and 1, the same for the same seed on every rank; bfloat16 on CUDA, whose kernels are made for it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randint(-1, 2, shape, generator=generator, device="cpu")
    device = torch.get_default_device()
    return x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


@dataclass
class Case:
    """A call of an op at one step: ``call()`` is this rank's, ``want()`` its exact result, ``other()`` a call with
    another argument."""

    call: Callable[[], torch.Tensor]
    want: Callable[[], torch.Tensor]
    other: Callable[[], torch.Tensor]


def _gathered(rank: int, size: int, step: int, unit: int, group: Any) -> Case:
    m, k, n = 2 * unit + 3 * step, 8 * unit, 5 * unit if unit == 1 else 8 * unit
    shards = [numbers(100 * step + r, m, k) for r in range(size)]
    b = numbers(1000 + rank, k, n)

    def call(a: torch.Tensor) -> torch.Tensor:
        return fused_all_gather_matmul(a, [b], 0, group, return_A=False)[1][0]

    more = torch.cat([shards[rank], shards[rank][:1]])
    return Case(lambda: call(shards[rank]), lambda: torch.cat(shards) @ b, lambda: call(more))


def _scattered(rank: int, size: int, step: int, unit: int, group: Any) -> Case:
    m, k, n = (unit + step) * size * (64 if unit > 1 else 1), 8 * unit, 6 * unit if unit == 1 else 8 * unit
    a = [numbers(100 * step + r, m, k) for r in range(size)]
    b = [numbers(1000 + r, k, n) for r in range(size)]
    wide = torch.cat([b[rank], b[rank][:, : 8 if unit > 1 else 1]], 1)

    def call(b: torch.Tensor) -> torch.Tensor:
        return fused_matmul_reduce_scatter(a[rank], b, "sum", 0, group)

    def want() -> torch.Tensor:
        return sum(x @ y for x, y in zip(a, b, strict=True)).chunk(size)[rank]

    return Case(lambda: call(b[rank]), want, lambda: call(wide))


def _reduced(rank: int, size: int, step: int, unit: int, group: Any) -> Case:
    xs = [numbers(100 * step + r, 7 * unit + step) for r in range(size)]
    return Case(
        lambda: one_shot_all_reduce(xs[rank], "sum", group),
        lambda: sum(xs),
        lambda: one_shot_all_reduce(xs[rank], "avg", group),
    )


OPS: dict[str, Callable[[int, int, int, int, Any], Case]] = {
    "fused_all_gather_matmul": _gathered,
    "fused_matmul_reduce_scatter": _scattered,
    "one_shot_all_reduce": _reduced,
}


@dataclass
class Seen:
    """What one rank saw. ``error``: class, text and attributes of what its call raised, ``seconds`` after it began."""

    error: dict[str, Any] | None = None
    seconds: float = 0.0
    step: int = -1
    again: str = ""
    wrong: list[int] = field(default_factory=list)
    threads: int = 0


def _fields(e: BaseException) -> dict[str, Any]:
    named = {k: v for k, v in vars(e).items() if isinstance(v, str | int | float | bool)}
    return {"kind": type(e).__name__, "text": str(e), **named}


def _finish(device: str) -> None:
    """On CUDA a call has come to its end now, and what its waits ran into is raised."""
    if device == "cuda":
        torch.cuda.synchronize()
        symm_mem.check()


def steps(rank: int, size: int, op: str, fault: Fault, group: Any, deadline: float) -> Seen:
    """The program: STEPS calls of different sizes, until one fails."""
    seen = Seen()
    device = torch.get_default_device().type
    unit = 1 if device == "cpu" else 64
    for step in range(STEPS):
        case = OPS[op](rank, size, step, unit, group)
        if step == fault.step:
            symm_mem.set_timeout(deadline, group)
        begin = time.monotonic()
        try:
            with forced("fused"), fault.at(rank, step) as struck:
                if struck and fault.kind == "skip":
                    continue
                got = case.other() if struck and fault.kind == "corrupt" else case.call()
                _finish(device)
        except Exception as e:
            seen.error, seen.seconds, seen.step = _fields(e), time.monotonic() - begin, step
            break
        if not torch.equal(got, case.want()) and not (struck and fault.kind == "corrupt"):
            seen.wrong.append(step)
    return seen


def strike(rank: int, size: int, op: str, fault: Fault, deadline: float, checked: bool) -> Seen:
    """The program with a fault; then the same words again, another group, a reset, and the program without a fault."""
    world, other = dist.group.WORLD, other_group()
    device = torch.get_default_device().type
    symm_mem.set_timeout(PATIENCE, world)
    symm_mem.set_checked(checked)
    dist.barrier()
    seen = steps(rank, size, op, fault, world, deadline)
    if seen.error is not None and seen.error["kind"] != "RankMismatch":
        try:
            OPS[op](rank, size, 0, 1 if device == "cpu" else 64, world).call()
        except Exception as e:
            seen.again = str(e)
    symm_mem.set_timeout(PATIENCE, world)
    if fault.kind == "kill":
        with pytest.raises(symm_mem.PeerTimeout) as error:  # no group is reset without one of its ranks
            symm_mem.reset(world)
        assert error.value.culprit == fault.rank and error.value.ended, error.value
        return seen
    none = Fault("delay", -1, -1)
    beside = steps(rank, size, op, none, other, PATIENCE)  # another group of the same ranks does not notice
    assert beside.error is None and not beside.wrong, beside
    if not checked:  # ranks that compare have all refused the same call, and nothing is broken
        symm_mem.reset(world)
    after = steps(rank, size, op, none, world, PATIENCE)
    assert after.error is None and not after.wrong, after
    symm_mem.set_checked(False)
    seen.threads = sum(t.name.startswith("weft") for t in threading.enumerate())
    return seen


_other: list[Any] = []


def other_group() -> Any:
    """A second group of all ranks of this process."""
    if not _other:
        _other.append(dist.new_group(list(range(dist.get_world_size()))))
        symm_mem.set_timeout(PATIENCE, _other[0])
    return _other[0]


def strikes(rank: int, size: int, op: str, faults: list[Fault], deadline: float) -> list[Seen]:
    """One fault after the other in one group: each time it is reset and goes on."""
    return [strike(rank, size, op, fault, deadline, fault.kind in ("skip", "corrupt")) for fault in faults]
