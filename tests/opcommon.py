"""What the tests of the ops share: random input, the float64 reference, the error bound, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from weft.fused_ops import last_plan
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import Workspace

# Rounding of one product in the dtype and of its result; float32 sums of a few hundred terms.
BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DTYPES = list(BOUND)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cells(
    sizes: Sequence[int], rows: Sequence[tuple[Any, ...]], dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Any]:
    """``(world_size, device, *row, dtype)`` of a table: all cells on GPUs, which have a kernel for each. CPU ranks have
    one way, of which dtypes change the rounding alone: there any two values of two columns meet.
    """
    found, most = [], min(len(sizes), len(rows), len(dtypes))
    for (w, size), (r, row), (d, dtype) in product(*map(enumerate, (sizes, rows, dtypes))):
        if (w + r + d) % most == 0:
            found.append((size, "cpu", *row, dtype))
        found.append(pytest.param(size, "cuda", *row, dtype, marks=pytest.mark.gpu))
    return found


def world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Mostly zeros, some ones and minus ones: their products are exact in any order, as long as sums stay below 256."""
    return torch.randint(-9, 10, shape).div(9, rounding_mode="trunc").to(dtype)


def matrix(k: int, n: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """Such numbers as [K, N], with K contiguous if ``transposed``."""
    return whole(n, k, dtype=dtype).t() if transposed else whole(k, n, dtype=dtype)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Every rank's x, [W, ...]."""
    out = x.new_empty(world().size() * x.numel())
    dist.all_gather_into_tensor(out, x.contiguous().view(-1))
    return out.view(-1, *x.shape)


def same_on_all(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Fresh random numbers, the same on every rank."""
    x = torch.randn(*shape, dtype=torch.float64)
    if x.numel():
        dist.broadcast(x, 0)
    return x.to(dtype)


def gather(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x, in float64."""
    mine = x.detach().double().contiguous()
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    if mine.numel():
        dist.all_gather(out, mine)
    return out


def assert_alike(x: torch.Tensor) -> None:
    """On all ranks."""
    bits = gather(x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32))
    assert all(torch.equal(b, bits[0]) for b in bits), "ranks got other bits"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def check(
    name: str, got: torch.Tensor, want: torch.Tensor, bound: float, parts: list[torch.Tensor] | None = None
) -> None:
    """The difference relative to the reference's norm is below ``bound``; NaN is not.

    ``parts``: what the reference is the sum of. Each is rounded before it is sent, so where they cancel out it
    is their norm that the difference is held against.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return
    norm = torch.stack([p.norm() for p in parts]).norm() if parts else want.norm()
    if want.numel() < 64:  # too few for roundings to average out: what they can add up to
        bound *= 1 + len(parts or []) ** 0.5
    error = ((got.double() - want).norm() / norm.clamp_min(1e-30)).item()
    assert error <= bound, f"{name}: relative error {error:.3g} above {bound:.3g}"


def compiled_like_eager(
    f: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    operands: Callable[[int], list[torch.Tensor]],
    sizes: tuple[int, ...],
    bound: float = 1e-6,
) -> None:
    """``f``'s results and gradients: as AOTAutograd traces it, the last size alone and then all of them as one.

    All operands of floating point get gradients. In Inductor's code ops are in compiled/test_many_ops.py.
    """
    for dynamic, of in ((False, sizes[-1:]), (True, sizes)):
        torch._dynamo.reset()
        g = torch.compile(f, backend="aot_eager", dynamic=dynamic, fullgraph=True)
        for args in map(operands, of):
            inputs, expect = (
                [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args] for _ in range(2)
            )
            found, wanted = ((y,) if isinstance(y, torch.Tensor) else y for y in (g(*inputs), f(*expect)))
            weights = [torch.randn_like(want) for want in wanted]
            for i, (out, want) in enumerate(zip(found, wanted, strict=True)):
                check(f"result {i}", out.detach(), want.detach().double(), 1e-6)
            for each in (found, wanted):
                torch.autograd.backward(each, weights)
            for i, (a, b) in enumerate(zip(inputs, expect, strict=True)):
                assert (a.grad is None) == (b.grad is None) == (not a.is_floating_point()), i
                if a.grad is not None and b.grad is not None:
                    check(f"gradient {i}", a.grad, b.grad.double(), bound)


def assert_fused() -> None:
    """The last call took the CPU ranks' algorithm. On CUDA the small and odd shapes of these tests may run unfused."""
    if torch.get_default_device().type == "cpu":
        assert last_plan().algorithm == "host", last_plan()


def meet() -> None:
    """All ranks are here, and what they have queued is done: a barrier of gloo does not wait for a stream."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def graph_of(
    body: Callable[[], Any], mode: Literal["global", "thread_local"] = "global"
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``body``, which was called before, and what it returns: there replays leave theirs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = body()
    return graph, result


def spoil(workspace: Workspace[Layout], buffer: int) -> None:
    """0xFF into an own buffer: what it has held must not matter. Where data is its own flag, it must hold nothing."""
    held = workspace.buffer(workspace.rank, buffer, (workspace.layout.buffer_bytes,), torch.uint8)
    if workspace.layout.ll_protocol:
        assert not held.any(), "a call has left something in a buffer"
    else:
        held.fill_(0xFF)


def poison(rank: int) -> None:
    """NaN into every half of every workspace, so that reading what no peer wrote shows; see ``spoil``."""
    meet()
    where = get_heap(world(), torch.get_default_device()) if dist.get_world_size() > 1 else None
    for ws in where.workspaces.values() if where else ():
        if isinstance(ws.layout, Layout):
            for buffer in range(2):
                spoil(ws, buffer)
    meet()


def refuses(op: Callable[..., Any], args: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    """The op raises that for real and for fake tensors, whether they want gradients or not."""
    for grad in (False, True):
        given = tree_map_only(
            torch.Tensor, lambda t, g=grad: t.detach().requires_grad_(g and t.is_floating_point()), args
        )
        with pytest.raises(kind, match=words):
            op(*given)
        with torch._subclasses.FakeTensorMode() as mode, pytest.raises(kind, match=words):
            op(*tree_map_only(torch.Tensor, mode.from_tensor, given))
