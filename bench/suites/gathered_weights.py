"""A Llama whose weights are gathered inside of the compiled graph."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from suite import Run, Suite, words
from timer import meet
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from llama_model import LLAMA_8B, SMALL, LlamaBlock, Sizes, rotary_tables
from llama_profile import busy, intervals, kernels_of, slowest
from weft.fused_ops import FusionPass

c10d = torch.ops._c10d_functional
ORDERS = ("plain", "weft", "moved", "moved 0.1", "greedy", "iterative", "scheduled")
_PASSES = {
    "greedy": ["raise_comms", "sink_waits", "reorder_compute_for_overlap"],
    "iterative": ["reorder_communication_preserving_peak_memory", "sink_waits_iterative"],
}
_AGAIN = (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default)


class _Whole(nn.Module):
    """A parameter that is a DTensor, read whole, as SimpleFSDP of torchtitan writes it."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def shard_weights(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank keeps some rows of each weight, which a product gathers."""
    for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
        register_parametrization(linear, "weight", _Whole(), unsafe=True)


def _again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Gathered weights are not kept for the backward."""
    return CheckpointPolicy.MUST_RECOMPUTE if op in _AGAIN else CheckpointPolicy.PREFER_SAVE


class GatheredLlama(nn.Module):
    """Blocks alone, each of which gathers its weights, and again in the backward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _again)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=contexts)
        return x


class JoinedLlama(GatheredLlama):
    """Blocks of which each gathers all of its parameters by one call, and cuts what comes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        world, rank = dist.get_world_size(), dist.get_rank()
        for block in self.blocks:
            for parameter in block.parameters():
                parameter.data = parameter.data.chunk(world)[rank].clone()
            block.requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        world, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        for block in self.blocks:
            shards = dict(block.named_parameters())
            joined = torch.cat([shard.reshape(-1) for shard in shards.values()])
            whole = c10d.wait_tensor(c10d.all_gather_into_tensor(joined, world, group)).view(world, -1)
            parts = whole.split([shard.numel() for shard in shards.values()], 1)
            named = zip(shards.items(), parts, strict=True)
            weights = {name: part.reshape(-1, *shard.shape[1:]) for (name, shard), part in named}
            x = functional_call(block, weights, (x, cos, sin))
        return x


def options_for_order(order: str) -> tuple[dict[str, Any], FusionPass | None]:
    """Inductor's options, and the pass among them."""
    if order in _PASSES:
        return {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": _PASSES[order],
        }, None
    if order == "scheduled":
        return {"aten_distributed_optimizations.enable_overlap_scheduling": True}, None
    if order == "plain":
        return {}, None
    if order == "weft":
        fusion = FusionPass(reorder=True)
    else:
        fusion = FusionPass([], reorder=True if order == "moved" else 0.1)
    return fusion.options, fusion


def _step_of(
    model: nn.Module, inputs: tuple[Tensor, ...], order: str
) -> tuple[Callable[[], Tensor], Any, float]:
    """A compiled step, of training where the model trains, what the pass reports, and the seconds of its first run."""
    options, fusion = options_for_order(order)
    compiled = torch.compile(model, options=options, dynamic=False)

    def step() -> Tensor:
        with torch.set_grad_enabled(inputs[0].requires_grad):
            y = compiled(*inputs)
        if y.requires_grad:
            y.float().square().mean().backward()
            model.zero_grad(set_to_none=True)
        return y.detach()

    begin = time.perf_counter()
    with inductor_config.patch(fx_graph_cache=False):  # a graph from there has no report
        step()
    return step, fusion, time.perf_counter() - begin


class GatheredWeights(Suite):
    """A Llama whose weights are gathered inside of the compiled graph, in several orders, in turns.

    A training step: each weight is a DTensor, gathered for its product and again in the backward, and its gradient is
    scattered (SimpleFSDP). With --joined inference: all shards of a block are joined, gathered by one call, and cut.
    What is compared is where collectives start and are waited for, and who carries them.

    | order | is |
    |---|---|
    | plain | Inductor as it is |
    | weft | ``FusionPass(reorder=True)``: copy engines carry what no product takes |
    | moved | ``FusionPass([], reorder=True)``: the group's backend carries all |
    | moved 0.1 | that, with a tenth more memory |
    | greedy | torch's ``raise_comms``, ``sink_waits``, ``reorder_compute_for_overlap`` |
    | iterative | torch's ``reorder_communication_preserving_peak_memory``, ``sink_waits_iterative`` |
    | scheduled | torch's ``enable_overlap_scheduling`` |

    Rows: {"order", "ms", "peak_bytes", "compile_s", "exposed_ms"}; ``ms`` is a median over alternate series, of the
    slowest rank; ``exposed_ms`` what a step takes beyond the kernels of the first order that are none of NCCL's, from a
    profile of the rank where these take longest.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--layers", type=int, default=8)
        parser.add_argument("--seq", type=int, help="tokens; by default the model's")
        parser.add_argument("--joined", action="store_true", help="inference, a gather for each block")
        parser.add_argument("--orders", type=words, default=ORDERS, help="by commas")
        parser.add_argument("--steps", type=int, default=5)
        parser.add_argument("--picture", help="an SVG of the last order of weft's, of its largest graph")

    def rows(self, given: argparse.Namespace) -> tuple[str, ...]:
        if unknown := [order for order in given.orders if order not in ORDERS]:
            raise ValueError(f"--orders: {unknown} is not among {ORDERS}")
        orders: tuple[str, ...] = given.orders
        return orders

    def begin(self, run: Run) -> None:
        base = LLAMA_8B if run.on_gpus else SMALL
        given = {"layers": run.given.layers, "seq": run.given.seq or base.seq}
        sizes = Sizes(**{**vars(base), **given})
        dtype = getattr(torch, sizes.dtype)
        torch.manual_seed(0)
        trains = not run.given.joined
        with run.device:
            self._model = (GatheredLlama if trains else JoinedLlama)(sizes).to(dtype)
            x = torch.randn(sizes.batch, sizes.seq, sizes.dim, dtype=dtype, requires_grad=trains)
        if trains:
            shard_weights(self._model, init_device_mesh(run.device.type, (run.world,)))
        self._inputs = (x, *rotary_tables(sizes, run.device))
        self._made: dict[str, tuple[Callable[[], Tensor], float, int]] = {}
        self._expected: Tensor | None = None

    def measure(self, row: str, run: Run) -> None:
        """Compiles the order; ``end`` times all."""
        try:
            step, fusion, seconds = _step_of(self._model, self._inputs, row)
        except Exception as e:
            run.say(f"{row}: {type(e).__name__}: {str(e)[:300]}")
            return
        peak = 0
        if run.on_gpus:
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated()
        self._made[row] = step, seconds, peak
        y = step().float()
        if self._expected is None:
            self._expected = y
        off = slowest(float((y - self._expected).abs().max()), run.device)
        run.say(
            f"{row}: results differ from the first order's by {off:.3g} of {float(y.abs().max()):.3g} at most"
        )
        report = fusion.report() if fusion else None
        run.say(*(line for line in str(report).splitlines() if line.startswith("heap")))
        orders = report.orders if report else ()
        for change in orders:
            run.say(*str(change).splitlines()[:4])
        if run.given.picture and orders and run.rank == 0:
            largest = max(orders, key=lambda change: len(change.placed))
            Path(run.given.picture).write_text(largest.svg())

    def end(self, run: Run) -> None:
        times: dict[str, list[float]] = {order: [] for order in self._made}
        for order in list(self._made) * 3:  # alternately
            times[order].append(self._step_time(self._made[order][0], run))
        computing = None
        if run.on_gpus and self._made:
            kernels = kernels_of(next(iter(self._made.values()))[0])
            computing = slowest(busy(intervals(kernels)), run.device)
        for order, (_, seconds, peak) in self._made.items():
            ms = statistics.median(times[order])
            row = {"order": order, "ms": round(ms, 3), "peak_bytes": peak, "compile_s": round(seconds, 1)}
            row["exposed_ms"] = None if computing is None else round(ms - computing, 3)
            run.rows.append(row)
            run.say(row)

    def _step_time(self, step: Callable[[], Tensor], run: Run) -> float:
        """Milliseconds of a step, of the slowest rank."""
        step()
        meet(run.device)
        begin = time.perf_counter()
        for _ in range(run.given.steps):
            step()
        if run.on_gpus:
            torch.cuda.synchronize()
        return slowest((time.perf_counter() - begin) / run.given.steps * 1e3, run.device)


SUITE = GatheredWeights()
