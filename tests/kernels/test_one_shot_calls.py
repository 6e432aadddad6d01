"""Calls in one shot without a GPU: products on the CPU around launches that are only noted, and calls that fail."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.kernels.all_gather_matmul.configs import GatherKernelCall
from weft.kernels.all_gather_matmul.on_cuda import fused_gather, takes_rows
from weft.kernels.all_gather_matmul.one_shot_kernel import AllGatherMatmulOneShot
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.kernels.device.jit import program
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from weft.kernels.matmul_reduce_scatter.on_cuda import fused_scatter
from weft.kernels.matmul_reduce_scatter.one_shot_kernel import MatmulReduceScatterOneShot

WORLD_SIZE, M, K, N, STREAM = 3, 5, 16, 24, 7
BF16 = torch.bfloat16


class Lock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Driver:
    """Notes what is launched; ``launch`` may do something in its place. ``told`` is what the workspace is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[Any, int]] = []
        self.told: list[Any] = []
        self.launch: Callable[[Any], None] = lambda params: None
        self.grids: list[tuple[int, int]] = []
        loaded = SimpleNamespace(function=lambda name: self)
        monkeypatch.setattr(program, "program_of", lambda *_, **__: loaded)

    def bound(self, blocks: int, threads: int, params: Any) -> Callable[[int], None]:
        self.grids.append((blocks, threads))
        return lambda stream: self.run(params, stream)

    def run(self, params: Any, stream: int) -> None:
        self.told.append("launch")
        self.launched.append((params, stream))
        self.launch(params)

    def workspace(self) -> Any:
        return SimpleNamespace(
            rank=1, world_size=WORLD_SIZE, span=1 << 30, lock=Lock(), layout=ExchangeLayout(WORLD_SIZE, 64),
            address=1 << 20, fault=SimpleNamespace(address=1 << 19, record=0),
            raise_if_broken=lambda op, inside, grids: self.told.append(op),
            launched=lambda: self.told.append("launched"), abandon=self.told.append,
        )  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(BF16)


def put(address: int, x: torch.Tensor) -> None:
    ctypes.memmove(address, x.data_ptr(), x.nbytes)


@pytest.mark.parametrize("lead", [(M,), (M, 2)], ids=["matrix", "more dimensions"])
def test_matmuls_of_what_was_gathered(driver: Driver, lead: tuple[int, ...]) -> None:
    shards = [numbers(*lead, K + 8)[..., 8:] for _ in range(WORLD_SIZE)]
    rows = shards[1].flatten(0, -2)
    assert takes_rows(rows)
    bs = [numbers(K, N), numbers(8, K).t()]
    vectors = rows.numel() // 8
    kernel: Any = fused_gather(driver.workspace(), GatherKernelCall(rows, bs, 132), OneShotConfig(vectors))
    assert driver.grids == [(1, 32)]
    whole = torch.stack(shards)
    driver.launch = lambda p: put(p.gathered, whole)
    for _ in range(2):
        results = [torch.full((WORLD_SIZE, *lead, b.shape[1]), float("nan")).to(BF16) for b in bs]
        # In the sizes that the op gives them, the ranks' dimension joined to the first one.
        kernel.call(
            (shards[1], *bs), [x.flatten(0, 1) for x in results] if len(lead) == 1 else results, 5, STREAM
        )
        params, stream = driver.launched[-1]
        assert stream == STREAM and params.a == shards[1].data_ptr() and params.slots.watch.timeout_ns == 5
        assert (params.vectors, params.columns, params.stride) == (vectors, K // 8, (K + 8) // 8)
        for b, result in zip(bs, results, strict=True):
            assert torch.equal(result, (whole.float() @ b.float()).to(BF16))
    assert driver.told == ["fused_all_gather_matmul", "launch", "launched"] * 2


SHARES = {  # A as the op has it, and as the kernel's launcher is given it, [1, W, m, K]
    "matrix": (numbers(WORLD_SIZE * M, K + 8)[:, 8:], (1, WORLD_SIZE, M, K)),
    "more dimensions": (numbers(WORLD_SIZE * M, 2, K), (1, WORLD_SIZE, 2 * M, K)),
    "parts that lie apart": (numbers(WORLD_SIZE, M + 3, K)[:, :M], (1, WORLD_SIZE, M, K)),
}


@pytest.mark.parametrize("name", SHARES)
def test_partial_results_are_what_is_scattered(driver: Driver, name: str) -> None:
    A, shape = SHARES[name]
    parts, b, m = A.reshape(shape), numbers(N, K).t(), shape[2]
    assert parts.data_ptr() == A.data_ptr()
    terms = [numbers(N), numbers(m, N)]
    epilogue = Epilogue(BF16, average=True, bias=True, residual=True)
    config = OneShotConfig(m * N // 8)
    kernel: Any = fused_scatter(driver.workspace(), ScatterKernelCall(parts, b, 132, epilogue), config)
    got = torch.empty(WORLD_SIZE, m, N, dtype=BF16)
    driver.launch = lambda p: put(got.data_ptr(), torch.frombuffer(read(p.c, got.nbytes), dtype=BF16))
    for given in (parts, A):  # the slow path, and the fast one
        got.fill_(float("nan"))
        out = torch.empty(m, N, dtype=BF16)
        kernel.call((given, b, *terms), (out,), 5, STREAM)
        assert torch.equal(got, (parts[0].float() @ b.float()).to(BF16))
        params, stream = driver.launched[-1]
        assert (params.out, params.bias, params.residual) == tuple(x.data_ptr() for x in (out, *terms))
        assert (params.vectors, params.columns, params.average, stream) == (m * N // 8, N // 8, 1, STREAM)
    assert driver.told == ["fused_matmul_reduce_scatter", "launch"] * 2


@pytest.mark.parametrize(
    "b", [numbers(K, WORLD_SIZE * N), numbers(WORLD_SIZE * N, K).t()], ids=["rows", "columns"]
)
def test_columns_are_scattered_as_parts(driver: Driver, b: torch.Tensor) -> None:
    A = numbers(M, 2, K)
    rows, columns = A.flatten(0, -2), numbers(2 * M, N)
    config, epilogue = OneShotConfig(2 * M * N // 8), Epilogue(BF16, residual=True)
    call = ScatterKernelCall(rows[None, None], b, 132, epilogue, split_n=True)
    kernel: Any = fused_scatter(driver.workspace(), call, config)
    got = torch.empty(WORLD_SIZE, 2 * M, N, dtype=BF16)
    driver.launch = lambda p: put(got.data_ptr(), torch.frombuffer(read(p.c, got.nbytes), dtype=BF16))
    for given in (rows[None, None], A):
        got.fill_(float("nan"))
        kernel.call((given, b, columns), (torch.empty(2 * M, N, dtype=BF16),), 5, STREAM)
        assert torch.equal(torch.cat(list(got), 1), (rows.float() @ b.float()).to(BF16))
        params, _ = driver.launched[-1]
        assert (params.vectors, params.columns) == (2 * M * N // 8, N // 8)


def read(address: int, size: int) -> bytearray:
    return bytearray(ctypes.string_at(address, size))


@pytest.mark.parametrize("what", ["product", "launch"])
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_only_a_launch_that_fails_breaks_the_group(
    driver: Driver, op: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("no memory")

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    if what == "product":
        monkeypatch.setattr(torch, "mm", refuse)
    else:
        driver.launch = refuse
    workspace, b = driver.workspace(), numbers(K, N)
    kernel: AllGatherMatmulOneShot | MatmulReduceScatterOneShot
    if op == "gather":
        a, out = numbers(M, K), numbers(WORLD_SIZE * M, N)
        kernel = AllGatherMatmulOneShot(workspace, GatherKernelCall(a, [b], 132), OneShotConfig(M * K // 8))
    else:
        a, out = numbers(1, WORLD_SIZE, M, K), numbers(M, N)
        call = ScatterKernelCall(a, b, 132, Epilogue(BF16))
        kernel = MatmulReduceScatterOneShot(workspace, call, OneShotConfig(M * N // 8))
    with pytest.raises(RuntimeError, match="no memory"):
        kernel.call((a, b), (out,), 5, STREAM)
    if what == "launch":
        assert driver.told[1:] == ["launch", error]
    elif op == "gather":
        assert driver.told[1:] == ["launch", "launched"], "what peers wait for was sent"
    else:
        assert not driver.told, "nothing has begun"
