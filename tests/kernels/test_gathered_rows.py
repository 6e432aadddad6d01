"""all_gather(A) @ B on CUDA, as far as it needs no GPU: shards that lie well or not, and copies of gathered rows."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda.bindings import driver
from weft.kernels.all_gather_matmul import configs, cuda_kernel, on_cuda

M, K, WORLD_SIZE = 7, 24, 4


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


SHARDS = {  # and whether they are taken as they lie
    "contiguous": (numbers(M, K), True),
    "columns": (numbers(M, 64)[:, 16 : 16 + K], True),
    "every other row": (numbers(2 * M, K)[::2], True),
    "one row": (numbers(1, 3 * K)[:, :K], True),
    "more dimensions": (numbers(5, M, 64)[..., :K], True),
    "rows at two distances": (numbers(5, M, K).movedim(1, 0), False),
    "rows of another alignment": (numbers(M, 65)[:, :K], False),
    "the same row": (numbers(1, K).expand(M, K), False),
    "overlapping": (numbers(10 * K).as_strided((M, K), (8, 1)), False),
    "elements apart": (numbers(K, M).t(), False),
    "float32": (numbers(M, K).float(), True),
    "columns of float32": (numbers(M, 64).float()[:, :K], False),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_is_copied_only_where_it_must_be(name: str) -> None:
    shard, as_it_lies = SHARDS[name]
    flat = shard.flatten(0, -2)  # a copy, where no view has these rows
    assert (on_cuda.takes_rows(flat) and flat.data_ptr() == shard.data_ptr()) is as_it_lies
    rows = flat if as_it_lies else flat.contiguous()
    assert cuda_kernel.row_stride(rows) == (K if rows.is_contiguous() else rows.stride(0))


def test_what_no_kernel_takes_of_the_last_dimension() -> None:
    a = numbers(M, K)
    ordered, crossed = numbers(WORLD_SIZE * K, 16), numbers(16, WORLD_SIZE * K).t()

    def choose(a: torch.Tensor, *bs: torch.Tensor) -> object:
        call = configs.GatherKernelCall(a, bs, 132, split_k=True)
        return on_cuda.choose_gather_kernel(call, WORLD_SIZE)

    for bs in ([ordered], [crossed, crossed]):
        choice = choose(a, *bs)
        assert not isinstance(choice, str) and choice.algorithm == "push"
        assert isinstance(choice.config, configs.GatherPushConfig) and choice.config.split_k
    assert "Bs of both orders" in str(choose(a, ordered, crossed))
    assert "torch.float32 operands" in str(choose(a.float(), ordered.float()))
    # The rows of all parts of B together are a multiple of 16 bytes, those of one are not.
    for m in (1, M):
        assert "16" in str(choose(numbers(m, 4), numbers(WORLD_SIZE * 4, 16)))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The driver's copies, done at once; the streams that they were asked for."""
    streams: list[int] = []

    def copy(to: int, start: int, size: int, stream: int) -> tuple[driver.CUresult]:
        streams.append(stream)
        ctypes.memmove(int(to), int(start), size)
        return (driver.CUresult.CUDA_SUCCESS,)

    def copy_2d(rows: driver.CUDA_MEMCPY2D, stream: int) -> tuple[driver.CUresult]:
        device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        assert rows.srcMemoryType == rows.dstMemoryType == device
        assert rows.WidthInBytes <= min(rows.srcPitch, rows.dstPitch), "the driver refuses it"
        for row in range(rows.Height):
            start = int(rows.srcDevice) + row * rows.srcPitch
            copy(int(rows.dstDevice) + row * rows.dstPitch, start, rows.WidthInBytes, stream)
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuMemcpyDtoDAsync", copy)
    monkeypatch.setattr(driver, "cuMemcpy2DAsync", copy_2d)
    return streams


@pytest.mark.parametrize("columns", [K, 64], ids=["contiguous", "columns"])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_copies_of_the_gathered_rows(rank: int, columns: int, copies: list[int]) -> None:
    a, buffer = numbers(M, columns)[:, :K], numbers(WORLD_SIZE, M, K)
    want = buffer.clone()
    want[rank] = a
    buffer[rank] = float("nan")  # the own shard is not there
    for kind, shape in (
        (cuda_kernel._Stacked, (WORLD_SIZE, M, K)),
        (cuda_kernel._SideBySide, (M, WORLD_SIZE, K)),
    ):
        out = torch.full((WORLD_SIZE * M * K + 1,), 7.0).bfloat16()
        kind(a, WORLD_SIZE, rank).copy(out.data_ptr(), buffer.data_ptr(), a.data_ptr(), 5)
        got = out[:-1].view(shape)
        assert torch.equal(got if kind is cuda_kernel._Stacked else got.movedim(1, 0), want)
        assert out[-1] == 7, "past the end"
    assert set(copies) == {5}
