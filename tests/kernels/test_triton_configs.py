"""Which problems the Triton kernels take, and how they are cut: all without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.tools.tensor_descriptor import TensorDescriptor
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.device.jit.launch import LAUNCHER_IS_KNOWN, Operand, is_transposed, raw_launcher, why_not
from weft.kernels.matmul_reduce_scatter import configs as scatter

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZE = st.integers(1, 20_000)


@given(SIZE, SIZE, SIZE, st.integers(1, 8), DTYPES)
def test_all_gather_matmul_chunks_are_whole_tiles_and_few(
    m: int, n: int, k: int, world_size: int, dtype: torch.dtype
) -> None:
    config = gather.choose_all_gather_matmul(m, n, k, world_size, dtype, 132)
    assert config.chunk_rows % config.tile.block_m == 0
    assert 1 <= config.group_m <= max(1, config.chunk_rows // config.tile.block_m)
    assert 1 <= gather.gather_flags_per_rank(m, config) <= 8
    layout = gather.copied_gather_layout(m, k, dtype, world_size, config)
    assert layout.buffer_bytes == world_size * m * k * dtype.itemsize
    assert layout.flags_per_rank * config.chunk_rows >= m


@given(SIZE, SIZE, SIZE, st.integers(1, 8), DTYPES, st.integers(1, 3))
def test_matmul_reduce_scatter_has_a_flag_for_each_tile(
    m: int, n: int, k: int, world_size: int, dtype: torch.dtype, batches: int
) -> None:
    problem = scatter.MatmulReduceScatterProblem(m, n, k, world_size, 132, batches)
    config = scatter.choose_matmul_reduce_scatter(problem, dtype)
    layout = scatter.tiled_scatter_layout(config, problem, dtype)
    rows, columns = -(-m // config.tile.block_m), -(-n // config.tile.block_n)
    assert layout.flags_per_rank == batches * rows * columns
    assert layout.buffer_bytes == world_size * batches * m * n * dtype.itemsize


def test_the_tiles_that_won_on_four_gpus_are_chosen() -> None:
    """m rows a rank, N and K of one rank; from measurements of both tiles on 132 SMs."""
    for m, n, k, block_n in [(256, 1536, 4096, 128), (2048, 1536, 4096, 256), (256, 7168, 4096, 256)]:
        assert gather.choose_all_gather_matmul(m, n, k, 4, torch.bfloat16, 132).tile.block_n == block_n
    for m, n, k, block_n in [(256, 4096, 1024, 128), (256, 8192, 7168, 256), (2048, 8192, 2048, 256)]:
        problem = scatter.MatmulReduceScatterProblem(m, n, k, 4, 132)
        assert scatter.choose_matmul_reduce_scatter(problem, torch.bfloat16).tile.block_n == block_n


def matrices(m: int = 64, n: int = 64, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)


def test_what_is_supported() -> None:
    a, b = matrices()
    assert why_not(a, b) is None
    assert why_not(a, torch.empty(64, 64, dtype=torch.bfloat16).t()) is None
    assert why_not(torch.empty(64, 80, dtype=torch.bfloat16)[:, 8:72], b) is None
    assert why_not(*matrices(dtype=torch.float32, k=36, n=4)) is None
    assert why_not(torch.empty(1, 3, 64, 64, dtype=torch.bfloat16), b) is None
    assert why_not(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), b.to("meta")) is None


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (*matrices(dtype=torch.float64), "dtype"),
        (matrices()[0], matrices(dtype=torch.float16)[1], "must be the same"),
        (*matrices(k=36), "K: rows of 36"),
        (*matrices(n=36), "N: rows of 36"),
        (*matrices(m=0), "empty"),
        (torch.empty(64, 64, dtype=torch.bfloat16).t(), matrices()[1], "A: strides"),
        (torch.empty(64, 68, dtype=torch.bfloat16)[:, :64], matrices()[1], "A: strides"),
        (torch.empty(64, dtype=torch.bfloat16).expand(64, 64), matrices()[1], "A: strides"),
        (torch.empty(64, 72, dtype=torch.bfloat16)[:, 1:65], matrices()[1], "A: starts 2 bytes"),
        (matrices()[0], torch.empty(64, 128, dtype=torch.bfloat16)[:, ::2], "B: strides"),
    ],
)
def test_what_is_not_supported(a: torch.Tensor, b: torch.Tensor, words: str) -> None:
    assert words in (why_not(a, b) or "")


def test_descriptors_of_single_rows() -> None:
    """The stride of a dimension of size 1 says nothing, but a descriptor looks at it."""
    x = torch.empty(1, 64, dtype=torch.bfloat16).as_strided((1, 64), (3, 1))
    described = Operand.of(x.shape, x.stride(), (64, 64)).describe(x)
    assert isinstance(described, TensorDescriptor)
    assert described.strides == [16, 1]
    assert Operand.contiguous((2, 3, 8), (1, 2, 8)).strides == (24, 8, 1)
    assert not is_transposed(torch.empty(8, 8))
    assert is_transposed(torch.empty(8, 8).t())


def test_the_launcher_that_takes_encoded_descriptors_is_found() -> None:
    """If Triton changes it, launches take the slow path and are right: but this library should learn of it."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    def launcher(*arguments: Any) -> None: ...

    wrapped = wrap_handle_tensordesc(launcher, {0: "tensordesc<bf16[64,64]>", 1: "i32"}, [{}])
    assert raw_launcher(wrapped) is launcher
    assert raw_launcher(None) is None
    assert raw_launcher(print) is None


class FakeDriver:
    """As much of Triton's driver as a launch touches."""

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> int:
        return 1000 + device


@pytest.fixture
def active_driver() -> Iterator[None]:
    """Triton is told to use it."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(FakeDriver())
    yield
    triton.runtime.driver.set_active(before)


@pytest.mark.skipif(not LAUNCHER_IS_KNOWN, reason="only Triton 3.6's launcher is called directly")
@pytest.mark.usefixtures("active_driver")
def test_repeated_launches_pass_what_triton_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver as nvidia
    from weft.kernels.device.jit import launch

    launched: list[tuple[Any, ...]] = []
    encoded: list[int] = []

    def encode(descriptor: TensorDescriptor, meta: Any) -> list[Any]:
        encoded.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr(), meta), *descriptor.shape, *descriptor.strides]

    def launcher(*arguments: Any) -> None:
        launched.append(arguments)

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", encode)
    signature = dict(
        enumerate(["tensordesc<bf16[8,8]>", "tensordesc<bf16[8,8]>", "*i32", "i32", "constexpr"])
    )
    metas = ["first", "second"]
    run = SimpleNamespace(
        launch=nvidia.wrap_handle_tensordesc(launcher, signature, metas),
        launch_cooperative_grid=False,
        launch_pdl=False,
        global_scratch_size=0,
        profile_scratch_size=0,
    )
    compiled = SimpleNamespace(
        run=run, metadata=SimpleNamespace(tensordesc_meta=metas), function=77, packed_metadata=(8, 1, 4096)
    )

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def through_triton(*arguments: Any, FINAL: bool, **options: Any) -> Any:
                assert options == {"num_warps": 8, "num_stages": 3, **launch.FIXED_OPTIONS}
                packed = (*grid, 1, 1, 1003, 77, False, False, None, None, (8, 1, 4096), None, None, None)
                run.launch(*packed, *arguments, FINAL)
                return compiled

            return through_triton

    x, y, word = torch.empty(8, 8), torch.empty(16, 8), torch.zeros(1, dtype=torch.int32)
    operands = [Operand.contiguous(t.shape, (8, 8)) for t in (x, y)]
    op = launch.Launch(Kernel(), operands, {"FINAL": True}, 8, 3)
    for _ in range(3):
        op(5, (x, y), (word,), (42,))
    first, *others = [[a.data_ptr() if a is word else a for a in arguments] for arguments in launched]
    assert others == [first, first]
    assert encoded == [t.data_ptr() for t in (x, y)] * 2, "by Triton once, and then once for each address"
    z = torch.empty(8, 8)
    op(5, (z, y), (word,), (42,))
    assert launched[-1][13][1] == z.data_ptr()
    assert len(encoded) == 5
    alive = [torch.empty(8, 8) for _ in range(3 * launch._MOST_ADDRESSES)]
    for t in alive:
        op(5, (t, y), (word,), (42,))
        assert launched[-1][13][1] == t.data_ptr()
        assert len(op._encoded[0]) <= launch._MOST_ADDRESSES


@pytest.mark.usefixtures("active_driver")
def test_another_triton_is_asked_for_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.device.jit import launch

    monkeypatch.setattr(launch, "LAUNCHER_IS_KNOWN", False)
    asked: list[tuple[Any, ...]] = []

    def looks_alike() -> Any:
        launcher = asked.clear

        def inner(*arguments: Any) -> None:
            launcher()

        return inner

    run = SimpleNamespace(launch=looks_alike(), global_scratch_size=0, profile_scratch_size=0)
    compiled = SimpleNamespace(
        run=run, metadata=SimpleNamespace(tensordesc_meta=["a"]), function=1, packed_metadata=(8, 1, 4096)
    )

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **_: asked.append((*grid, *arguments)) or compiled

    x = torch.empty(8, 8)
    op = launch.Launch(Kernel(), [Operand.contiguous(x.shape, (8, 8))], {"FINAL": True}, 8, 3)
    for number in range(3):
        op(5, (x,), (), (number,))
    assert [(call[0], call[-1]) for call in asked] == [(5, 0), (5, 1), (5, 2)]


def test_configs_need_no_gpu_and_no_interpreter() -> None:
    code = (
        "import torch; from weft.kernels.matmul_reduce_scatter import configs;"
        "problem = configs.MatmulReduceScatterProblem(1024, 4096, 3584, 4, 132);"
        "print(configs.choose_matmul_reduce_scatter(problem, torch.bfloat16).tile.block_m)"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert run.stdout.strip() == "128"
