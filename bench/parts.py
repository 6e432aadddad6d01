"""What the contenders of several ops are made of: inputs, the kernel that writes them, torch's own group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accuracy import Expected
from registry import Row
from timer import Call
from torch import Tensor

HIDDEN = ("product", "producer")  # no contenders: terms of the limit, and what is subtracted


@dataclass(frozen=True)
class Bench:
    """A row's contenders. ``expected`` are this rank's results of set 0, of all of them or by contender."""

    calls: Mapping[str, Call]
    expected: list[Expected] | dict[str, list[Expected]]
    sets: int
    flops: float = 0.0
    bytes_received: float = 0.0

    def expected_of(self, name: str) -> list[Expected]:
        """None, if the contender is there for its time alone."""
        if isinstance(self.expected, dict):
            return self.expected.get(name, [])
        return [] if name in HIDDEN else self.expected


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def sets_of(bytes_of_one: int, device: torch.device) -> int:
    """Input sets of a product that together are twice the L2 cache; at most 16."""
    if device.type == "cpu":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(16, math.ceil(2 * l2 / bytes_of_one)))


def divisible(size: int, world: int, what: str, row: Row) -> int:
    if size % world:
        raise ValueError(f"{what}: is {size} in {row.id}, must be a multiple of {world} ranks")
    return size // world


def has_torch_symm(group: str, device: torch.device) -> bool:
    """Whether torch's own ops can run here; before 2.13 they want the group to be announced."""
    if device.type != "cuda":
        return False
    import torch.distributed._symmetric_memory as torch_symm

    torch_symm.enable_symm_mem_for_group(group)  # type: ignore[arg-type]
    return True


def symmetric(like: Tensor, group: str) -> Tensor:
    """Memory of torch's own ops."""
    import torch.distributed._symmetric_memory as torch_symm

    memory = torch_symm.empty(like.shape, dtype=like.dtype, device=like.device)
    torch_symm.rendezvous(memory, group)  # type: ignore[arg-type]
    return memory


def summed(x: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: (the sum over ranks, that of absolute values)."""
    total = x.double()
    terms = total.abs()
    dist.all_reduce(total)
    dist.all_reduce(terms)
    return total, terms


def after_producer(x: Tensor, source: Tensor, call: Callable[[], Sequence[Tensor]]) -> Call:
    """``call`` after a kernel that writes its input ``x``: as in a model, and as ops in place need it."""

    def produce_and_call(i: int) -> Sequence[Tensor]:
        x.copy_(source)
        return call()

    return produce_and_call
