"""all_gather(A) @ B on CUDA, as far as it needs no GPU: shards that lie well or not, and where A is returned."""

from __future__ import annotations

import pytest
import torch
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
        call = configs.GatherKernelCall(a, bs, 132, split_k=True, preferred="push")
        return on_cuda.choose_gather_kernel(call, WORLD_SIZE)

    for bs in ([ordered], [crossed, crossed]):
        choice = choose(a, *bs)
        assert not isinstance(choice, str) and choice.algorithm == "push"
        assert isinstance(choice.config, configs.GatherPushConfig) and choice.config.split_k
    assert "some lie in rows and some in columns" in str(choose(a, ordered, crossed))
    copied = choose(a.float(), ordered.float())
    assert not isinstance(copied, str) and copied.algorithm == "copy_engine"
    # The rows of all parts of B together are a multiple of 16 bytes, those of one are not.
    for m in (1, M):
        assert "16" in str(choose(numbers(m, 4), numbers(WORLD_SIZE * 4, 16)))


@pytest.mark.parametrize("split_k", [False, True], ids=["stacked", "side by side"])
def test_where_gathered_rows_are_stored(split_k: bool) -> None:
    """The boxes of all ranks' shards cover what is returned, each number once."""
    boxes = cuda_kernel.boxes_returned((M, K), torch.bfloat16, WORLD_SIZE, split_k=split_k)
    assert boxes.shape == (1, WORLD_SIZE, M, K) and boxes.dtype == torch.bfloat16
    assert boxes.box == (1, 1, 64, 64)  # as hopper.cuh swizzles it
    shards = torch.randn(WORLD_SIZE, M, K)
    whole = torch.full((WORLD_SIZE * M * K,), float("nan"))
    whole.as_strided(boxes.shape, boxes.strides).copy_(shards[None])
    want = torch.cat([*shards], 1) if split_k else shards
    assert torch.equal(whole.view(want.shape), want)
