"""A compiled graph is for as many ranks as it was made for: caches on disk and exported programs outlive the group."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from opcommon import check, gather, world
from ranks import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter


def pair(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    _, (h,) = fused_all_gather_matmul(x, [W], 0, None, return_A=False)
    return fused_matmul_reduce_scatter(h, W.t(), "sum", 0, None)


def restarted(rank: int, world_size: int, folder: str) -> None:
    """The same program with the same caches: once more, and then with one rank in each group."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    for run, size in enumerate((world_size, world_size, 1)):
        dist.destroy_process_group()
        of = "all" if size > 1 else str(rank)
        store = f"file://{folder}/store-{run}-{of}"
        dist.init_process_group("gloo", init_method=store, rank=rank % size, world_size=size)
        torch._dynamo.reset()
        counters.clear()
        x, W, v = torch.randn(6, 4, requires_grad=True), torch.randn(4, 5), torch.randn(6, 4)
        # Products and nothing else: no C++ to be compiled.
        y = torch.compile(pair, fullgraph=True)(x, W)
        parts = [torch.cat(gather(x)) @ w @ w.t() for w in gather(W)]
        check(f"{size} ranks", y.detach(), sum(parts).chunk(size)[rank % size], 2e-6, parts)
        (found,) = torch.autograd.grad(y, x, v)
        check("gradient", found, torch.autograd.grad(pair(x, W), x, v)[0].double(), 2e-6)
        assert counters["aot_autograd"]["autograd_cache_hit"] == (run == 1), counters["aot_autograd"]


def test_a_cache_on_disk_serves_as_many_ranks_as_it_was_filled_by(tmp_path: Path) -> None:
    run_ranks(restarted, 2, str(tmp_path), fresh=True)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
        return pair(x, W)


def exported(rank: int, world_size: int) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(Pair(), (torch.randn(6, 4), torch.randn(4, 5))), file)
    return file.getvalue()


def loaded(rank: int, world_size: int, program: bytes) -> None:
    """By two ranks more than have exported it, and by others than those, they would compute something else."""
    module = torch.export.load(io.BytesIO(program)).module()
    x, W = torch.randn(6, 4), torch.randn(4, 5)
    if world_size == 2:
        assert torch.equal(module(x, W), pair(x, W))
        return
    with pytest.raises(ValueError, match="group_size: is 2, must be 3, the number of ranks of group '0'"):
        module(x, W)


def test_an_exported_program_names_the_number_of_ranks() -> None:
    program = run_ranks(exported, 2)[0]
    run_ranks(loaded, 2, program)
    run_ranks(loaded, 3, program)


def refused(rank: int, world_size: int) -> None:
    x, W, name = torch.randn(4, 6), torch.randn(6, 5), world().group_name
    mode = FakeTensorMode()
    for A, B in ((x, W), (x, W.clone().requires_grad_()), tuple(map(mode.from_tensor, (x, W)))):
        calls = (
            lambda n, A=A, B=B: torch.ops.weft.fused_all_gather_matmul(A, [B], 0, name, group_size=n)[1][0],
            lambda n, A=A, B=B: torch.ops.weft.fused_matmul_reduce_scatter(
                A, B, "sum", 0, name, group_size=n
            ),
        )
        for call in calls:
            assert call(world_size).shape == call(None).shape
            with pytest.raises(ValueError, match="group_size: is 7, must be 2, the number of ranks of group"):
                call(7)


def test_another_number_of_ranks_is_refused() -> None:
    run_ranks(refused, 2)
