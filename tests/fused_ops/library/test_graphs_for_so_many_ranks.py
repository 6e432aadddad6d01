"""A compiled graph is for as many ranks as it was made for: caches on disk and exported programs outlive the group."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_table import OpCall, op_calls
from opcommon import check, gather, world
from ranks import on_ranks, run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from weft.fused_ops import (
    cross_entropy_of_sharded_logits,
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
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


#: By its name: of a ProcessGroup, and the default one, Dynamo sees that it is another one and makes a graph anew.
GROUP = "0"


class Program(nn.Module):
    def __init__(self, call: OpCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.call.first(*tensors)


def exported(rank: int, world_size: int) -> dict[str, bytes]:
    """By Dynamo, too, some: that all name it in its graphs is told by ``kept``."""
    files = {}
    for i, (name, call) in enumerate(op_calls(world_size, GROUP).items()):
        if name == "one_shot_gather":  # its graph is one rank's
            continue
        for strict in (False, True)[: 1 + (i % 4 == 0)]:
            program = torch.export.export(Program(call), tuple(call.tensors), strict=strict)
            torch.export.save(program, file := io.BytesIO())
            files[f"{name}, strict={strict}"] = file.getvalue()
    return files


def loaded(rank: int, world_size: int, programs: dict[str, bytes]) -> None:
    """By one rank more than have exported it, and by others than those, they would compute something else."""
    calls = op_calls(2, GROUP)
    for name, program in programs.items():
        module, call = torch.export.load(io.BytesIO(program)).module(), calls[name.split(",")[0]]
        if world_size == 2:
            found, wanted = (of(*[x.clone() for x in call.tensors]).float() for of in (module, call.first))
            assert torch.equal(found, wanted), name
            continue
        with pytest.raises(ValueError, match="group_size: is 2, must be 3, the number of ranks of group '0'"):
            module(*call.tensors)


def test_an_exported_program_names_the_number_of_ranks() -> None:
    programs = run_ranks(exported, 2)[0]
    run_ranks(loaded, 2, programs)
    run_ranks(loaded, 3, programs)


def kept(rank: int, world_size: int, folder: str) -> None:
    """What was compiled stays in the process, whose group is made anew: of one rank."""
    torch._dynamo.reset()
    runs = []
    for call in op_calls(world_size, GROUP).values():
        inputs = [with_gradient(call, x) for x in call.tensors]
        compiled = torch.compile(call.first, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(recompile_limit=64):  # they are one function's
            runs.append((call, compiled, inputs, compiled(*inputs)))
    dist.destroy_process_group()
    store = f"file://{folder}/store-{rank}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    for call, compiled, inputs, y in runs:
        words = f"^group_size: is {world_size}, must be 1, the number of ranks of group '0'"
        with pytest.raises(ValueError, match=words):
            compiled(*inputs)
        assert y.requires_grad == call.has_gradient
        if (
            y.requires_grad and call.function is not cross_entropy_of_sharded_logits
        ):  # its backward sends nothing
            with pytest.raises(ValueError, match=words):
                y.sum().backward()
    torch._dynamo.reset()


def test_what_was_compiled_is_refused_in_another_group_both_ways(tmp_path: Path) -> None:
    run_ranks(kept, 2, str(tmp_path), fresh=True)


def with_gradient(call: OpCall, x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(call.has_gradient and x.is_floating_point())


@on_ranks(2)
def test_another_number_of_ranks_is_refused(rank: int, world_size: int) -> None:
    mode, asked = FakeTensorMode(), set()
    for call in op_calls(world_size).values():
        if (found := call.of_torch(world().group_name)) is None:
            continue
        op, given = found
        asked.add(op)
        for change in (torch.clone, partial(with_gradient, call), mode.from_tensor):
            named = tree_map_only(torch.Tensor, change, given)

            def shapes(size: int | None, op: Any = op, named: dict[str, Any] = named) -> list[object]:
                return [x.shape for x in tree_leaves(op(**named, group_size=size)) if x is not None]

            assert shapes(world_size) == shapes(None)
            with pytest.raises(ValueError, match="group_size: is 7, must be 2, the number of ranks of group"):
                shapes(7)
    assert len(asked) >= 12
