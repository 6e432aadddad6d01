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
import weft
from suite import Run, Suite, words
from timer import meet
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from llama_model import LLAMA_8B, SMALL, LlamaBlock, Sizes, rotary_tables
from llama_profile import busy, intervals, kernels_of, slowest
from weft.fused_ops import FusionPass

c10d = torch.ops._c10d_functional
ORDERS = ("plain", "weft", "moved", "moved 0.1", "buckets", "greedy", "iterative", "scheduled")
_PASSES = {
    "greedy": ["raise_comms", "sink_waits", "reorder_compute_for_overlap"],
    "iterative": ["reorder_communication_preserving_peak_memory", "sink_waits_iterative"],
}
_AGAIN = (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default)


class _GatheredWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        world, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, world, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        world, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "avg", world, group))


class ShardedLinear(nn.Module):
    """``nn.Linear`` without bias, of which each rank has some rows of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        parts = linear.weight.detach().chunk(dist.get_world_size())
        self.shard = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, _GatheredWeight.apply(self.shard))


def _again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Gathered weights are not kept for the backward."""
    return CheckpointPolicy.MUST_RECOMPUTE if op in _AGAIN else CheckpointPolicy.PREFER_SAVE


class GatheredLlama(nn.Module):
    """Blocks alone, each of which gathers its weights again in the backward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        blocks = [LlamaBlock(sizes) for _ in range(sizes.layers)]
        for block in blocks:
            for part in (block.attention, block.feed_forward):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, ShardedLinear(linear))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _again)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=contexts)
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
        fusion = FusionPass([], reorder=True if order == "moved" else 0.1, buckets=order == "buckets")
    return fusion.options, fusion


def _step_of(
    model: nn.Module, inputs: tuple[Tensor, ...], order: str
) -> tuple[Callable[[], None], Any, float]:
    """A compiled training step, what the pass reports, and the seconds of its first run."""
    options, fusion = options_for_order(order)
    compiled = torch.compile(model, options=options, dynamic=False)

    def step() -> None:
        compiled(*inputs).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    with inductor_config.patch(fx_graph_cache=False):  # a graph from there has no report
        step()
    return step, fusion, time.perf_counter() - begin


class GatheredWeights(Suite):
    """A Llama whose weights are gathered inside of the compiled graph: a training step in several orders, in turns.

    Each weight is a shard of a rank; it is gathered for its product, again in the backward, and its gradient is
    scattered (FSDP, as SimpleFSDP writes it). What is compared is where collectives start and are waited for, and who
    carries them.

    | order | is |
    |---|---|
    | plain | Inductor as it is |
    | weft | ``FusionPass(reorder=True)``: copy engines carry what no product takes |
    | moved | ``FusionPass([], reorder=True)``: the group's backend carries all |
    | moved 0.1 | that, with a tenth more memory |
    | buckets | that, and small collectives in buckets |
    | greedy | torch's ``raise_comms``, ``sink_waits``, ``reorder_compute_for_overlap`` |
    | iterative | torch's ``reorder_communication_preserving_peak_memory``, ``sink_waits_iterative`` |
    | scheduled | torch's ``enable_overlap_scheduling`` |

    Rows: {"order", "ms", "peak_bytes", "compile_s", "exposed_ms"}; ``ms`` is a median over alternate series, of the
    slowest rank; ``exposed_ms`` what a step takes beyond the kernels of the first order that are none of NCCL's, from a
    profile of the rank where these take longest. With --measure weft's orders are by costs that are measured first.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--layers", type=int, default=8)
        parser.add_argument("--orders", type=words, default=ORDERS, help="by commas")
        parser.add_argument("--steps", type=int, default=5)
        parser.add_argument("--measure", action="store_true", help="weft.passes.measure_costs() first")
        parser.add_argument("--picture", help="an SVG of the last order of weft's, of its largest graph")

    def rows(self, given: argparse.Namespace) -> tuple[str, ...]:
        if unknown := [order for order in given.orders if order not in ORDERS]:
            raise ValueError(f"--orders: {unknown} is not among {ORDERS}")
        orders: tuple[str, ...] = given.orders
        return orders

    def begin(self, run: Run) -> None:
        if run.given.measure:
            run.say(weft.passes.measure_costs())
        base = LLAMA_8B if run.on_gpus else SMALL
        sizes = Sizes(**{**vars(base), "layers": run.given.layers})
        dtype = getattr(torch, sizes.dtype)
        torch.manual_seed(0)
        with run.device:
            self._model = GatheredLlama(sizes).to(dtype)
            x = torch.randn(sizes.batch, sizes.seq, sizes.dim, dtype=dtype, requires_grad=True)
        self._inputs = (x, *rotary_tables(sizes, run.device))
        self._made: dict[str, tuple[Callable[[], None], float, int]] = {}

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
        orders = fusion.report().orders if fusion else ()
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

    def _step_time(self, step: Callable[[], None], run: Run) -> float:
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
