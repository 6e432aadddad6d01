"""What GPUs of other memory get: choices as they were measured on H100, and what a chip is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.device import device_spec
from weft.kernels.device.device_spec import H100, H200, DeviceSpec
from weft.kernels.device.gemm import gemm_tiles
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.kernels.matmul_reduce_scatter import configs as scatter
from weft.symm_mem.backends import cuda_state

SIZES = st.integers(1, 20_000)
RANKS = st.integers(2, 8)


@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "blocks"),
    [
        (2, 512, 3072, 4096, [(128, 192)]),
        (2, 1024, 3072, 4096, [(128, 192)]),
        (2, 256, 5120, 8192, [(128, 192)]),
        (2, 512, 5120, 8192, [(128, 320)]),
        (2, 512, 14336, 4096, [(128, 224)]),
        (4, 256, 2560, 8192, [(128, 192)]),
        (4, 256, 7168, 4096, [(128, 224)]),
        (4, 256, 14336, 8192, [(128, 224)]),
        (8, 256, 3584, 4096, [(128, 224), (128, 256)]),
    ],
)
def test_all_gather_matmul_takes_what_was_fast_for_an_h100_alone(
    world_size: int, m: int, n: int, k: int, blocks: list[tuple[int, int]]
) -> None:
    """The tiles that were the fastest where one H100 was one of so many ranks, or within 5 % of them
    (bench/results/h100-x1-alone.txt). What an H200 gets takes 2 to 18 % more in four of these."""
    tile = gather.rank_gather_pushes(gather.AllGatherMatmulProblem(m, (n,), k, world_size, 132, spec=H100))[
        0
    ][1].tile
    assert (tile.block_m, tile.block_n) in blocks


@pytest.mark.parametrize(("m", "n", "k"), [(256, 14336, 4096), (256, 28672, 8192), (256, 24576, 12288)])
def test_few_rows_of_a_wide_matrix_are_gathered_in_one_shot_between_h100s(m: int, n: int, k: int) -> None:
    """The kernel that weaves reads B for the own rows and once more for the peer's. 8b.upgate, 70b.upgate and gpt3.fc1,
    M = 512 (bench/results/h100-x2-all_gather_matmul.json)."""
    assert isinstance(
        gather.rank_gather_kernels(gather.AllGatherMatmulProblem(m, (n,), k, 2, 132, spec=H100))[0][1],
        OneShotConfig,
    )
    assert not isinstance(
        gather.rank_gather_kernels(gather.AllGatherMatmulProblem(m, (n,), k, 2, 132, spec=H200))[0][1],
        OneShotConfig,
    )
    assert not isinstance(
        gather.rank_gather_kernels(gather.AllGatherMatmulProblem(4 * m, (n,), k, 2, 132, spec=H100))[0][1],
        OneShotConfig,
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [(2048, 14336, 4096, 320), (4096, 14336, 4096, 320), (4096, 28672, 8192, 320), (4096, 7168, 4096, 256)],
)
@pytest.mark.parametrize("return_A", [False, True])
def test_wide_gathers_have_the_widest_tile_on_an_h100(
    m: int, n: int, k: int, columns: int, return_A: bool
) -> None:
    """2 to 3 % faster between two, where its last wave is as full (bench/results/h100-x2-sustained.txt)."""
    problem = gather.AllGatherMatmulProblem(m, (n,), k, 2, 132, return_A=return_A, spec=H100)
    assert gather.rank_gather_pushes(problem)[0][1].tile.block_n == columns


@pytest.mark.parametrize(
    ("m", "n", "k", "raster_group"),
    [(1024, 4096, 7168, 4), (2048, 4096, 2048, 8), (4096, 4096, 7168, 8), (2048, 8192, 4096, 8)],
)
def test_scatters_of_many_rows_have_wide_raster_groups(m: int, n: int, k: int, raster_group: int) -> None:
    """Up to 4 % faster between two (bench/results/h100-x2-sustained.txt)."""
    problem = scatter.MatmulReduceScatterProblem(m, n, k, 2, 132, spec=H100)
    assert scatter.rank_scatter_pushes(problem)[0][1].raster_group == raster_group


@pytest.mark.parametrize("of", [H100, H200])
def test_few_rows_that_are_all_reduced_leave_reading_a_large_matrix_to_cublas(of: DeviceSpec) -> None:
    """gpt3.fc2 between 2: 222 us in one kernel on H100, 209 in cuBLAS and an all-reduce; as long on H200."""
    for m, profitable in ((1, False), (16, False), (64, False), (1024, True)):
        problem = scatter.MatmulReduceScatterProblem(m, 12288, 24576, 2, 132, to_all=True, spec=of)
        assert scatter.sum_to_all_is_profitable(problem) is profitable


@pytest.mark.parametrize(
    ("of", "n", "k", "us"),
    [(H200, 12288, 24576, 140), (H200, 8192, 14336, 58), (H100, 12288, 24576, 199), (H100, 8192, 14336, 80)],
)
def test_cublas_reads_a_large_matrix_as_fast_as_it_was_measured_to(
    of: DeviceSpec, n: int, k: int, us: float
) -> None:
    assert gemm_tiles.matmul_us(1, n, k, of) == pytest.approx(us, rel=0.03)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, RANKS)
def test_no_op_is_thought_to_be_faster_with_slower_memory(m: int, n: int, k: int, world_size: int) -> None:
    for slow, fast in ((H100, H200), (replace(H200, memory=H200.memory // 2), H200)):
        assert gemm_tiles.matmul_us(m, n, k, slow) >= gemm_tiles.matmul_us(m, n, k, fast)
        ranked = [
            gather.rank_gather_kernels(gather.AllGatherMatmulProblem(m, (n,), k, world_size, 132, spec=c))[0][
                0
            ]
            for c in (slow, fast)
        ]
        assert ranked[0] >= ranked[1]
        ranked = [
            scatter.rank_scatter_kernels(
                scatter.MatmulReduceScatterProblem(m, n, k, world_size, 132, spec=c)
            )[0][0]
            for c in (slow, fast)
        ]
        assert ranked[0] >= ranked[1]


@given(st.integers(1, 1 << 27))
def test_tiles_of_larger_caches_are_as_they_were_fitted(more: int) -> None:
    for tile in (*gemm_tiles.TILES, gemm_tiles.WIDEST):
        assert tile.on(H200) == tile.on(replace(H200, l2=H200.l2 + more)) == tile
        assert tile.stage_us <= tile.on(H100).stage_us <= 1.21 * tile.stage_us


class Cuda(cuda_state.CudaState):
    """Of a virtual GPU, and an H100."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        return cuda_state.HOPPER

    def memory(self, device: torch.device) -> dict[str, int]:
        return [{"memory": 0, "l2": 1}, {"memory": H100.memory, "l2": H100.l2}][device.index]


def test_what_a_device_does_not_say_is_taken_for_an_h200s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_state, "state", Cuda())
    ask = device_spec.device_spec_of.__wrapped__  # its cache is everybody's
    assert ask(torch.device("cuda", 0)) == DeviceSpec(H200.memory, 1)
    assert ask(torch.device("cuda", 1)) == H100
    assert ask(torch.device("cpu")) == H200
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask(torch.device("cuda", 1)) == H200
