"""A compiled graph is for as many ranks as it was made for: caches on disk and exported programs outlive the group."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import check, gather, world
from ranks import on_ranks, run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from weft.fused_ops import (
    fused_all_gather_grouped_matmul,
    fused_all_gather_matmul,
    fused_all_reduce_layer_norm,
    fused_all_reduce_rms_norm,
    fused_all_to_all_matmul,
    fused_grouped_matmul_all_reduce,
    fused_grouped_matmul_reduce_scatter,
    fused_linear_cross_entropy,
    fused_matmul_all_reduce,
    fused_matmul_all_to_all,
    fused_matmul_reduce_scatter,
    fused_moe_combine_all_reduce,
    fused_moe_combine_all_reduce_rms_norm,
    fused_moe_combine_reduce_scatter,
    moe_combine,
    moe_dispatch,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_,
    one_shot_all_to_all,
    one_shot_reduce_scatter,
)
from weft.fused_ops.dispatch.callers import constant_in_graphs


def test_what_is_constant_in_graphs_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...

    def torchs() -> None: ...

    assert vars(constant_in_graphs(ours)) == vars(torch.compiler.assume_constant_result(torchs)) != {}


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


def normed(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    return fused_all_reduce_rms_norm(x, x, W[:, 0], 1e-5, GROUP)[0]


def layer_normed(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    return fused_all_reduce_layer_norm(x, None, W[:, 0], W[:, 1], 1e-5, GROUP)[0]


def losses(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(x.shape[0], dtype=torch.int64)
    return fused_linear_cross_entropy(x, W.t(), targets, GROUP, reduction="none")


def grouped(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    rows, offs = torch.arange(6, dtype=torch.int32), torch.tensor([2, 6], dtype=torch.int32)
    tokens, experts = torch.cat([x, x], 1), torch.stack([W, W]).repeat(1, 2, 2)[:, :, :8]
    return fused_all_gather_grouped_matmul(tokens, [experts], rows, offs, 0, GROUP)[1][0]


def combined(op: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    slots = torch.zeros(x.shape[0], 2, dtype=torch.int32)
    return op(x, slots, x.new_ones(x.shape[0], 2), *args)


def combined_and_normed(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    return combined(lambda *xs: fused_moe_combine_all_reduce_rms_norm(*xs)[0], x, x, W[:, 0], 1e-5, GROUP)


def multiplied(op: Callable[..., torch.Tensor], x: torch.Tensor, W: torch.Tensor, *args: Any) -> torch.Tensor:
    offs, slots = torch.tensor([2, 6], dtype=torch.int32), torch.arange(6, dtype=torch.int32)[:, None]
    rows, experts = torch.cat([x, x], 1), torch.stack([W, W]).repeat(1, 2, 2)[:, :, :8]
    return op(rows, experts, offs, slots, x.new_ones(6, 1), "avg", *args, GROUP)


def mixed(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    rows, _, handle = moe_dispatch(x, torch.zeros(x.shape[0], 1, dtype=torch.int32), 6, GROUP)
    return moe_combine(rows, handle, x[:, :1], GROUP)


#: By its name: of a ProcessGroup, and the default one, Dynamo sees that it is another one and makes a graph anew.
GROUP = "0"
PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all_gather_matmul": lambda x, W: fused_all_gather_matmul(x, [W], 0, GROUP, return_A=False)[1][0],
    "matmul_reduce_scatter": lambda x, W: fused_matmul_reduce_scatter(x, W, "avg", 0, GROUP),
    "all_reduce": lambda x, W: one_shot_all_reduce(x, "avg", GROUP),
    "all_reduce_": lambda x, W: one_shot_all_reduce_(x + 1, "avg", GROUP),
    "all_gather": lambda x, W: one_shot_all_gather(x, 1, GROUP),
    "reduce_scatter": lambda x, W: one_shot_reduce_scatter(x, "avg", 0, GROUP),
    "all_to_all": lambda x, W: one_shot_all_to_all(x, 0, 1, GROUP),
    "matmul_all_to_all": lambda x, W: fused_matmul_all_to_all(x, W.repeat(1, 6), 0, GROUP),
    "all_to_all_matmul": lambda x, W: fused_all_to_all_matmul(x, W.repeat(2, 1), 0, GROUP),
    "all_reduce_rms_norm": normed,
    "all_reduce_layer_norm": layer_normed,
    "all_gather_grouped_matmul": grouped,
    "grouped_matmul_all_reduce": lambda x, W: multiplied(fused_grouped_matmul_all_reduce, x, W),
    "grouped_matmul_reduce_scatter": lambda x, W: multiplied(fused_grouped_matmul_reduce_scatter, x, W, 0),
    "linear_cross_entropy": losses,
    "moe_combine_all_reduce": lambda x, W: combined(fused_moe_combine_all_reduce, x, GROUP),
    "moe_combine_all_reduce_rms_norm": combined_and_normed,
    "moe_combine_reduce_scatter": lambda x, W: combined(fused_moe_combine_reduce_scatter, x, 0, GROUP),
    "moe_dispatch and moe_combine": mixed,
    "matmul_all_reduce": lambda x, W: fused_matmul_all_reduce(x, W, "avg", GROUP),
}


class Program(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
        return PROGRAMS[self.name](x, W)


def exported(rank: int, world_size: int) -> dict[str, bytes]:
    files = {}
    for name, strict in product(PROGRAMS, (False, True)):
        program = torch.export.export(Program(name), (torch.randn(6, 4), torch.randn(4, 5)), strict=strict)
        torch.export.save(program, file := io.BytesIO())
        files[f"{name}, strict={strict}"] = file.getvalue()
    return files


def loaded(rank: int, world_size: int, programs: dict[str, bytes]) -> None:
    """By one rank more than have exported it, and by others than those, they would compute something else."""
    for name, program in programs.items():
        module = torch.export.load(io.BytesIO(program)).module()
        x, W = torch.randn(6, 4), torch.randn(4, 5)
        if world_size == 2:
            assert torch.equal(module(x, W), PROGRAMS[name.split(",")[0]](x, W)), name
            continue
        with pytest.raises(ValueError, match="group_size: is 2, must be 3, the number of ranks of group '0'"):
            module(x, W)


def test_an_exported_program_names_the_number_of_ranks() -> None:
    programs = run_ranks(exported, 2)[0]
    run_ranks(loaded, 2, programs)
    run_ranks(loaded, 3, programs)


def kept(rank: int, world_size: int, folder: str) -> None:
    """What was compiled stays in the process, whose group is made anew: of one rank."""
    torch._dynamo.reset()
    runs = []
    for name, program in PROGRAMS.items():
        inputs = [torch.randn(s, requires_grad=name != "all_reduce_") for s in ((6, 4), (4, 5))]
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        runs.append((name, compiled, inputs, compiled(*inputs)))
    dist.destroy_process_group()
    store = f"file://{folder}/store-{rank}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    for name, compiled, inputs, y in runs:
        words = f"^group_size: is {world_size}, must be 1, the number of ranks of group '0'"
        with pytest.raises(ValueError, match=words):
            compiled(*inputs)
        if y.requires_grad:
            with pytest.raises(ValueError, match=words):
                y.sum().backward()
        else:
            assert name == "all_reduce_"
    torch._dynamo.reset()


def test_what_was_compiled_is_refused_in_another_group_both_ways(tmp_path: Path) -> None:
    run_ranks(kept, 2, str(tmp_path), fresh=True)


@on_ranks(2)
def test_another_number_of_ranks_is_refused(rank: int, world_size: int) -> None:
    x, W, name = torch.randn(4, 6), torch.randn(6, 5), world().group_name
    mode, weft = FakeTensorMode(), torch.ops.weft
    for A, B in ((x, W), (x, W.clone().requires_grad_()), tuple(map(mode.from_tensor, (x, W)))):
        calls = (
            lambda n, A=A, B=B: weft.fused_all_gather_matmul(A, [B], 0, name, group_size=n)[1][0],
            lambda n, A=A, B=B: weft.fused_matmul_reduce_scatter(A, B, "sum", 0, name, group_size=n),
            lambda n, A=A, B=B: weft.fused_matmul_all_reduce(A, B, "sum", name, group_size=n),
            lambda n, A=A, B=B: weft.one_shot_all_reduce(B, "avg", name, group_size=n),
            lambda n, A=A, B=B: weft.one_shot_all_reduce_(A, "avg", name, group_size=n) or A,
            lambda n, A=A, B=B: weft.one_shot_all_gather(B, 1, name, group_size=n),
            lambda n, A=A, B=B: weft.one_shot_reduce_scatter(B, "avg", 0, name, group_size=n),
            lambda n, A=A, B=B: weft.one_shot_reduce_scatter_out(A[:2], A, "sum", 0, name, group_size=n) or A,
            lambda n, A=A, B=B: weft.one_shot_all_to_all(B, 0, 1, name, group_size=n),
            lambda n, A=A, B=B: weft.one_shot_gather(B.detach(), 0, 1, name, group_size=n),
            lambda n, A=A, B=B: weft.fused_matmul_all_to_all(A, B[:, :4], 0, name, group_size=n),
            lambda n, A=A, B=B: weft.fused_all_to_all_matmul(A[:, :3], B, 0, name, group_size=n)[0],
            lambda n, A=A, B=B: weft.fused_all_reduce_rms_norm(B, B, B[0], 1e-5, name, group_size=n)[0],
            lambda n, A=A, B=B: weft.fused_all_reduce_rms_norm_quant(
                B.detach(), None, B[0].detach(), 1e-5, name, group_size=n
            )[0],
            lambda n, A=A, B=B: weft.fused_all_reduce_layer_norm(B, B, None, None, 1e-5, name, group_size=n)[
                0
            ],
        )
        for call in calls:
            assert call(world_size).shape == call(None).shape
            with pytest.raises(ValueError, match="group_size: is 7, must be 2, the number of ranks of group"):
                call(7)
