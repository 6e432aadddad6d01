"""What the launchers of both products write into a kernel's arguments, without a driver: maps, addresses, order."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import cuda_kernel as gather
from weft.kernels.all_gather_matmul.on_cuda import fused_gather
from weft.kernels.device.gemm.gemm import THREADS
from weft.kernels.device.jit.program import Function, Program
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter.on_cuda import fused_scatter
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.layout import Layout

WORLD_SIZE, M, K, N = 3, 64, 64, 64
A, OUT, HALF, STREAM = 0x1000, 0x900000, 0x100000, 7


class Noted(Function):
    """A kernel that notes its launches: (name of the program, arguments, stream)."""

    def __init__(self, name: str, done: list[tuple[Any, ...]]) -> None:
        self.name, self.done = name, done

    def most_clusters(self, cluster: int, block: int, shared: int) -> int:
        return 1 << 20

    def bound(
        self, grid: int, block: int, args: ctypes.Structure, shared: int = 0, *, dependent: bool = False
    ) -> Callable[[int], None]:
        assert grid % 2 == 0 < grid and block == THREADS and not dependent
        return lambda stream: self.done.append((self.name, type(args).from_buffer_copy(args), stream))


class Cuda(cuda_state.CudaState):
    """Its kernels note their launches. A tensor map begins with its address."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []

    def function(self, program: Program, name: str, shared: int) -> Function:
        assert program.path.parent.name == name
        return Noted(name, self.done)

    def tensor_map(self, *tiled: Any) -> bytes:
        _, dimensions, address, _, _, box, *_ = tiled
        return struct.pack("16Q", address, *map(int, box), *[0] * (15 - dimensions))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the driver, in order."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_state, "state", cuda)
    return cuda.done


class Lock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


ROOM = Layout(WORLD_SIZE, 1 << 14, 1 << 20)


def workspace(rank: int, layout: Layout = ROOM) -> Any:
    made = SimpleNamespace(rank=rank, world_size=WORLD_SIZE, span=1 << 30, lock=Lock())
    made.layout, made.address = layout, HALF - layout.buffer(1)
    made.fault = SimpleNamespace(address=1 << 20, record=0)
    return made


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_all_gather_matmul(done: list[tuple[Any, ...]], count: int, return_A: bool, rank: int) -> None:
    bs = [bfloat16(K, N) for _ in range(count)]
    config = gather_configs.rank_gather_pushes(
        gather_configs.AllGatherMatmulProblem(M, (N,) * count, K, WORLD_SIZE, 132)
    )[0][1]
    call = gather_configs.GatherKernelCall(bfloat16(M, K), bs, 132, return_A=return_A)
    kernels: Any = fused_gather(workspace(rank), call, config)
    for turn in (1, 2):  # other addresses at every launch
        done.clear()
        at = [turn << 20 | i << 12 for i in range(1, count + 1)]
        to = [address << 4 for address in at]
        results = [*to, OUT] if return_A else to
        kernels.launch(1, [A * turn, *at], results, 5 * turn, STREAM)
        assert {(name, stream) for name, _, stream in done} == {("all_gather_matmul", STREAM)}
        launched = [params for _, params, _ in done]
        assert len(launched) == -(-count // gather.MOST_BS)
        assert [p.own[0] for p in launched] == [p.a for p in launched] == [A * turn] * len(launched)
        assert [p.b[i][0] for p in launched for i in range(p.bs)] == at
        assert [p.c[i] for p in launched for i in range(p.bs)] == to
        assert {p.watch.timeout_ns for p in launched} == {5 * turn}
        assert [p.push for p in launched] == [not config.comm_sms] + [0] * (len(launched) - 1)
        assert [p.final for p in launched] == [0] * (len(launched) - 1) + [1]
        # One of them writes what is returned.
        assert [p.returned[0] for p in launched] == [OUT if return_A else 0] + [0] * (len(launched) - 1)


@pytest.mark.parametrize("more", [(), (8, 200)], ids=["one product", "three"])
def test_matmul_reduce_scatter(done: list[tuple[Any, ...]], more: tuple[int, ...]) -> None:
    ks = (K, *more)
    problem = scatter_configs.MatmulReduceScatterProblem(M, N, sum(ks), WORLD_SIZE, 132)
    config = scatter_configs.rank_scatter_pushes(problem)[0][1]
    factors = [x for k in ks for x in (bfloat16(1, WORLD_SIZE, M, k), bfloat16(k, N))]
    for bias, residual in product((False, True), repeat=2):
        epilogue = scatter_configs.Epilogue(torch.bfloat16, bias=bias, residual=residual)
        layout = scatter_configs.scatter_push_layout(config, replace(problem, num_sms=8))
        a, b, *others = factors
        call = scatter_configs.ScatterKernelCall(a, b, 8, epilogue, more=others)
        kernel: Any = fused_scatter(workspace(0, layout), call, config)
        for turn in (1, 2):
            at = [A * turn + 64 * i for i in range(len(factors))]
            terms = [A * turn + 1024] * bias + [A * turn + 2048] * residual
            kernel.launch(1, [*at, *terms], [OUT * turn], turn, STREAM)
            name, params, stream = done.pop()
            assert (name, stream) == ("matmul_reduce_scatter", STREAM)
            assert (params.products, params.depth) == (len(ks), sum(-(-k // 64) for k in ks))
            assert list(params.depths)[: len(ks)] == [-(-k // 64) for k in ks]
            assert [params.a[i][0] for i in range(len(ks))] == at[::2]
            assert [params.b[i][0] for i in range(len(ks))] == at[1::2]
            assert params.out == OUT * turn
            assert params.bias == (A * turn + 1024 if bias else 0)
            assert params.residual == (A * turn + 2048 if residual else 0)
            assert params.watch.timeout_ns == turn


def test_products_around_an_all_to_all(done: list[tuple[Any, ...]]) -> None:
    """Sizes are those of the part that a rank sends to another one."""
    rows = gather_configs.GatherKernelCall(
        bfloat16(WORLD_SIZE * M, K), [bfloat16(WORLD_SIZE * K, N)], 132, True, True, exchanged=True
    )
    gathers = gather_configs.rank_gather_pushes(rows.problem(WORLD_SIZE))[0][1]
    kernel: Any = fused_gather(workspace(1), rows, gathers)
    kernel.launch(0, [A, 2 * A], [OUT, 2 * OUT], 5, STREAM)
    _, params, _ = done.pop()
    assert (params.m, params.k, params.n[0], params.a, params.own[0]) == (M, K, N, A, A)
    assert (params.c[0], params.returned[0]) == (OUT, 2 * OUT)

    epilogue = scatter_configs.Epilogue(torch.bfloat16, apart=True)
    columns = scatter_configs.ScatterKernelCall(
        bfloat16(1, 1, M, K), bfloat16(K, WORLD_SIZE * N), 8, epilogue, split_n=True
    )
    problem = columns.problem(WORLD_SIZE)
    scatters = scatter_configs.rank_scatter_pushes(problem)[0][1]
    layout = scatter_configs.scatter_push_layout(scatters, problem)
    kernel = fused_scatter(workspace(1, layout), columns, scatters)
    kernel.launch(0, [A, 2 * A], [OUT], 5, STREAM)
    _, params, _ = done.pop()
    assert (params.batches, params.m, params.n, params.out) == (1, M, N, OUT)
