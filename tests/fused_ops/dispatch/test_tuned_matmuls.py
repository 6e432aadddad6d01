"""Both products with the tuner on: CPU ranks stand in for GPUs, and kernels that only meet each other for CUDA's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_gpu import Gpu, run_on_cuda
from ranks import run_ranks
from weft.fused_ops import last_plan
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.ops import all_gather_matmul, matmul_reduce_scatter
from weft.fused_ops.ops.all_gather_matmul import AllGatherMatmulCall
from weft.fused_ops.ops.matmul_reduce_scatter import MatmulReduceScatterCall
from weft.kernels.all_gather_matmul import on_cuda as gather
from weft.kernels.all_gather_matmul.configs import GatherKernelCall
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.kernels.device.tuning import benchmark, tuner
from weft.kernels.device.tuning.choice import KernelChoices
from weft.kernels.device.tuning.tuned_file import TunedFile
from weft.kernels.matmul_reduce_scatter import on_cuda as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import HostEpoch, Workspace

FASTEST = [(128, 96), "one_shot"]  # the tile, or the algorithm, where all ranks are looked at


class Kernel:
    """Of one configuration. A launch meets the peers', and counts in ``launched``."""

    launched: ClassVar[list[Any]] = []

    def __init__(self, workspace: Workspace[Layout], config: Any) -> None:
        self.workspace, self.config = workspace, config

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        workspace = self.workspace
        with HostEpoch(workspace, "a kernel") as use:
            peer = 1 - workspace.rank
            use.wait_free(peer)
            use.post(peer, 0)
            use.wait(peer, 0)
        self.launched.append((self.config, list(operands), timeout_ns))


class OneShot:
    """The same in one shot, in a workspace of the LL protocol."""

    def __init__(self, workspace: Workspace[ExchangeLayout], config: OneShotConfig) -> None:
        assert workspace.layout.slots >= config.layout(2).slots
        self.workspace, self.config = workspace, config

    def call(self, tensors: Any, results: Any, timeout_ns: int, stream: int) -> None:
        ws = self.workspace
        ws.raise_if_broken("a kernel")
        own, peers = ExchangeLayout.FIRST - 2, ExchangeLayout.FIRST - 1  # words that no block counts in
        count = ws.word(ws.rank, own).value + 1
        ws.word(1 - ws.rank, peers).value = count
        deadline = time.monotonic() + 30
        while ws.word(ws.rank, peers).value < count:
            assert time.monotonic() < deadline, "the peer does not come"
        ws.word(ws.rank, own).value = count
        Kernel.launched.append((self.config, [x.data_ptr() for x in tensors], timeout_ns))


def made(workspace: Workspace[Any], call: object, config: Any) -> Kernel | OneShot:
    return OneShot(workspace, config) if isinstance(config, OneShotConfig) else Kernel(workspace, config)


def name_of(config: Any) -> Any:
    """A tile, or an algorithm that has none."""
    one_shot = isinstance(config, OneShotConfig)
    return "one_shot" if one_shot else (config.tile.block_m, config.tile.block_n)


@contextmanager
def stage(folder: str, on: bool, fastest: Any) -> Iterator[Heap]:
    def median_us(launches: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
        times = []
        for launch in launches:
            launch()
            config, _, timeout_ns = Kernel.launched[-1]
            assert timeout_ns <= 10_000_000_000, "who launched nothing is not waited for as long as usual"
            times.append(50.0 if name_of(config) == fastest else 10.0 if dist.get_rank() else 60.0)
        return times

    where = get_heap(dist.group.WORLD, torch.device("cpu"))
    where.workspaces.clear()
    where.tuner = None
    Kernel.launched.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"WEFT_CACHE_DIR": folder}))
        stack.enter_context(forced("fused"))
        for target, name, value in (
            (gather, "_choices", KernelChoices()),
            (scatter, "_choices", KernelChoices()),
            (gather, "fused_gather", made),
            (scatter, "fused_scatter", made),
            (benchmark, "median_us", median_us),
            (tuner, "is_tuning", lambda: on),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if fastest == "one_shot":  # the model thinks a little less of it than of the best that pushes
            for configs, ranked, estimate in (
                (gather.configs, gather.configs.rank_gather_pushes, "estimate_one_shot_gather_us"),
                (scatter.configs, scatter.configs.rank_scatter_pushes, "estimate_one_shot_scatter_us"),
            ):

                def slower(problem: Any, ranked: Any = ranked) -> float:
                    return float(ranked(problem)[0][0]) + 1e-3

                stack.enter_context(mock.patch.object(configs, estimate, slower))
        stack.enter_context(mock.patch.object(cuda_state, "state", Gpu()))
        yield where


def operands(rank: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The shard, the Bs, and A of the reduce-scatter. Ranks may lay out their own as they like."""
    a, bs = torch.randn(256, 64).bfloat16(), [torch.randn(64, n).bfloat16() for n in (256, 512)]
    if rank:
        bs = [b.t().contiguous().t() for b in bs]
    return a, bs, torch.randn(512, 64).bfloat16()


def calls(where: Heap, rank: int, out_dtype: torch.dtype) -> list[tuple[str, Any]]:
    """After each op: how its configuration was come by, and the name of what was launched last, on its operands."""
    said = []
    a, bs, wide = operands(rank)
    for op in ("all_gather_matmul", "last dimension", "matmul_reduce_scatter", "scattered last dimension"):
        if op == "all_gather_matmul":
            _, outs = run_on_cuda(all_gather_matmul, where, AllGatherMatmulCall(a, bs, 0, "a group", False))
            assert [out.shape for out in outs] == [(512, 256), (512, 512)]
            given = [x.data_ptr() for x in (a, *bs)]
        elif op == "last dimension":
            deep = torch.cat([bs[0].t()] * 2, 1).t() if rank else torch.cat([bs[0]] * 2)
            _, outs = run_on_cuda(
                all_gather_matmul, where, AllGatherMatmulCall(a, [deep], 1, "a group", False)
            )
            assert [out.shape for out in outs] == [(256, 256)]
            given = [x.data_ptr() for x in (a, deep)]
        else:
            dim = int(op == "scattered last dimension")
            A, B = (a, bs[1]) if dim else (wide, bs[0])
            call = MatmulReduceScatterCall(A, B, "sum", dim, "a group", out_dtype)
            out = run_on_cuda(matmul_reduce_scatter, where, call)
            assert isinstance(out, torch.Tensor) and out.dtype == out_dtype
            given = [A.data_ptr(), B.data_ptr()]
        config, addresses, _ = Kernel.launched[-1]
        assert addresses == given
        said.append((last_plan().chosen, name_of(config)))
        assert last_plan().algorithm == ("one_shot" if said[-1][1] == "one_shot" else "push")
    return said


def tuned(rank: int, world_size: int, folder: str, fastest: Any) -> None:
    buffers, ours = torch.bfloat16, [("tuned", fastest)] * 4
    with stage(folder, False, fastest) as where:
        model = calls(where, rank, buffers)
        assert {how for how, _ in model} == {"from the model"}
        assert len(Kernel.launched) == 4 and where.tuner is None and not Path(folder).exists()
    assert all(name != fastest for _, name in model), "or there is nothing to see here"
    with stage(folder, True, fastest) as where:
        assert calls(where, rank, buffers) == ours
        launched = len(Kernel.launched)
        assert launched > 10
        assert calls(where, rank, buffers) == ours
        assert len(Kernel.launched) == launched + 4, "tuned once"
        assert calls(where, rank, torch.float32) == ours
        assert len(Kernel.launched) > launched + 8, "another result is another kind"
        launched, bias = len(Kernel.launched), torch.randn(256).bfloat16()
        _, (B, _), wide = operands(rank)
        call = MatmulReduceScatterCall(wide, B, "sum", 0, "a group", buffers, bias)
        run_on_cuda(matmul_reduce_scatter, where, call)
        assert len(Kernel.launched) > launched + 2, "with a bias it is another kind"
        assert Kernel.launched[-1][1] == [x.data_ptr() for x in (wide, B, bias)]
        kinds = {kind: ws.prepared for (kind, *_), ws in where.workspaces.items()}
        assert set(kinds) == ({"one_shot"} if fastest == "one_shot" else {"matmul", "ll_protocol"})
        remembered = [k for prepared in kinds.values() for k in prepared if isinstance(k, tuple)]
        assert {k[0] for k in remembered} >= {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}
    with stage(folder, True, fastest) as where:  # as the next process
        assert calls(where, rank, buffers) == ours
        assert len(Kernel.launched) == 4
        tuned_kinds = TunedFile("cpu", world_size).read()
        assert len(tuned_kinds) == 7
        for last, count in (("256 x 64 @ 128 x 256", 1), ("1 x 2 x 256 x 64 @ 64 x 256", 2)):
            assert sum(f"of the last dimension {last}" in kind for kind in tuned_kinds) == count


@pytest.mark.parametrize("fastest", FASTEST)
def test_both_matmuls_take_what_was_measured(tmp_path: Path, fastest: Any) -> None:
    run_ranks(tuned, 2, str(tmp_path / "cache"), fastest, fresh=True)


def test_nothing_is_asked_for_what_cannot_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, and anything while it is off: no heap, no file."""
    a, bs, wide = operands(0)
    for dtype, on, chosen in ((torch.float32, True, ""), (torch.bfloat16, False, "from the model")):
        monkeypatch.setattr(tuner, "is_tuning", lambda on=on: on)
        x, ys, parts = a.to(dtype), [b.to(dtype) for b in bs], wide.to(dtype).view(1, 2, 256, 64)
        nowhere: Any = None
        if dtype == torch.bfloat16:
            gathers = GatherKernelCall(x, ys, 132)
            choice = gather.choose_gather_kernel(gathers, 2)
            assert not isinstance(choice, str)
            assert gather.tuned_gather(choice, nowhere, gathers) == (choice, chosen)
        scatters = ScatterKernelCall(parts, ys[0], 132, Epilogue(dtype))
        choice = scatter.choose_scatter_kernel(scatters, 2)
        assert not isinstance(choice, str)
        assert scatter.tuned_scatter(choice, nowhere, scatters) == (choice, chosen)
