"""The public ops as the tables of faults call them. An op that has an entry in ``OPS`` goes through every fault.

Numbers are so small that every sum is exact: a result that a call returns is right to the bit, or it is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from references import Arguments, exact, results_of
from torch import Tensor
from weft import fused_ops
from weft.kernels.device.collective.combine import Combined
from weft.kernels.moe_dispatch.reference import ExpertRanks, rows_by_expert, take_tokens

FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """A call of an op at one step: ``call()`` is this rank's, ``want()`` its exact result, ``other()`` a call with
    another argument."""

    call: Callable[[], Tensor]
    want: Callable[[], Tensor]
    other: Callable[[], Tensor]


@dataclass(frozen=True)
class At:
    """A rank of so many at a step, which says which numbers; the unit of the sizes, and by how much they are larger."""

    rank: int
    size: int
    step: int
    unit: int
    more: int

    @property
    def tokens(self) -> int:
        return 2 * self.unit + self.more

    def of_ranks(self, seed: int, *shape: int) -> list[Tensor]:
        """Of every rank, others in each step."""
        return [numbers(seed + 100 * self.step + r, *shape) for r in range(self.size)]

    def fixed(self, seed: int, *shape: int) -> list[Tensor]:
        return [numbers(seed + r, *shape) for r in range(self.size)]


def numbers(seed: int, *shape: int) -> Tensor:
    """-1, 0 and 1, the same for the same seed on every rank; bfloat16 on CUDA, whose kernels are made for it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randint(-1, 2, shape, generator=generator, device="cpu")
    device = torch.get_default_device()
    return x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


Made = tuple[Sequence[Arguments], Arguments]  # of every rank; and what is other than this rank's


def case_of(made: Callable[[At], Made], op: str, of: tuple[int, int, int, int, Any, int]) -> Case:
    rank, size, step, unit, group, more = of
    every, other = made(At(rank, size, step, unit, more))
    mine, function = {**every[rank], "group": group}, getattr(fused_ops, op)
    into = mine["x"].clone() if op.endswith("_") else None

    def call(arguments: Arguments) -> Tensor:
        if into is not None:
            arguments = {**arguments, "x": into.copy_(arguments["x"])}
        results = results_of(function(**arguments))
        results = [results[0].float(), results[-1]] if "quant" in op else results
        return torch.stack(results) if "norm" in op else results[0]

    def want() -> Tensor:
        results = [want.to(dtype) for want, _ in exact(op, every, rank)]
        results = [results[0], results[-1]] if "quant" in op else results
        return torch.stack(results) if "norm" in op else results[0]

    of_loss = "entropy" in op or "log_probs" in op
    dtype = mine.get("out_dtype") or (torch.float32 if of_loss else results_of(mine)[0].dtype)
    dtype = mine.get("out_dtypes", [dtype])[0]
    return Case(lambda: call(mine), want, lambda: call({**mine, **other}))


def _gathered(at: At) -> Made:
    m, k, n = 2 * at.unit + 3 * at.more, 8 * at.unit, 5 * at.unit if at.unit == 1 else 8 * at.unit
    pairs = zip(at.of_ranks(0, m, k), at.fixed(1000, k, n), strict=True)
    every = [{"A_shard": a, "Bs": [b], "gather_dim": 0, "return_A": False} for a, b in pairs]
    a = every[at.rank]["A_shard"]
    return every, {"A_shard": torch.cat([a, a[:1]])}


def _scattered(at: At) -> Made:
    rows = at.unit + at.more if at.unit == 1 else 2 * at.unit + 8 * at.more
    k, n = 8 * at.unit, 6 * at.unit if at.unit == 1 else 8 * at.unit
    pairs = zip(at.of_ranks(0, rows * at.size, k), at.fixed(1000, k, n), strict=True)
    every = [{"A": a, "B": b, "reduce_op": "sum", "scatter_dim": 0} for a, b in pairs]
    b = every[at.rank]["B"]
    return every, {"B": torch.cat([b, b[:, : 8 if at.unit > 1 else 1]], 1)}


def _gathered_fp8(at: At) -> Made:
    """Scales of rows travel with them. Cast before a call: in a forked child CUDA itself would refuse that."""
    m, k, n = 2 * at.unit + 3 * at.more, 16 * at.unit, 16
    every: list[Arguments] = []
    for r, (a, b) in enumerate(zip(at.of_ranks(0, m, k), at.fixed(1000, n, k), strict=True)):
        scale, of_b = 3 + numbers(200 * at.step + r, m, 1).float(), 3 + numbers(2000 + r, 1, n).float()
        every.append({"A_shard": a.to(FP8), "Bs": [b.to(FP8).t()], "A_scale": scale, "B_scales": [of_b]})
        every[-1] |= {"gather_dim": 0, "out_dtypes": [torch.float32], "return_A": False}
    a, scale = (every[at.rank][name] for name in ("A_shard", "A_scale"))
    longer = torch.cat([a.float(), a[:1].float()]).to(FP8)
    return every, {"A_shard": longer, "A_scale": torch.cat([scale, scale[:1]])}


def _scattered_fp8(at: At) -> Made:
    rows = at.unit + at.more if at.unit == 1 else 2 * at.unit + 8 * at.more
    pairs = zip(at.of_ranks(0, rows * at.size, 16 * at.unit), at.fixed(1000, 16, 16 * at.unit), strict=True)
    one = torch.ones(())
    how = {"A_scale": one, "B_scale": one, "reduce_op": "sum", "scatter_dim": 0}
    return [{"A": a.to(FP8), "B": b.to(FP8).t(), **how, "out_dtype": a.dtype} for a, b in pairs], {
        "reduce_op": "avg"
    }


def _reduced(at: At, other: str = "avg") -> Made:
    return [{"x": x, "reduce_op": "sum"} for x in at.of_ranks(0, 7 * at.unit + at.more)], {"reduce_op": other}


def _gathered_alone(at: At) -> Made:
    return [{"x": x, "gather_dim": 1} for x in at.of_ranks(0, 3, 7 * at.unit + at.more)], {"gather_dim": 0}


def _gathered_to_one(at: At) -> Made:
    xs = at.of_ranks(0, 3, 7 * at.unit + at.more)
    return [{"x": x, "gather_dim": 1, "root": at.size - 1} for x in xs], {"root": 0}


def _scattered_alone(at: At) -> Made:
    xs = at.of_ranks(0, at.size, (7 * at.unit + at.more) * at.size)
    return [{"x": x, "reduce_op": "sum", "scatter_dim": 1} for x in xs], {"scatter_dim": 0}


def _exchanged(at: At) -> Made:
    xs = at.of_ranks(0, at.size, (7 * at.unit + at.more) * at.size)
    return [{"x": x, "scatter_dim": 1, "gather_dim": 0} for x in xs], {"scatter_dim": 0, "gather_dim": 1}


def _product_exchanged(at: At) -> Made:
    k, b = 8 * at.unit, numbers(1000, 8 * at.unit, 8 * at.unit * at.size)
    every = [{"A": a, "B": b, "gather_dim": 0} for a in at.of_ranks(0, 3 * at.unit + at.more, k)]
    return every, {"A": every[at.rank]["A"][:-1]}


def _multiplied_and_gathered(at: At) -> Made:
    k, x = 8 * at.unit, numbers(100 * at.step, 3 * at.unit + at.more, 8 * at.unit)
    return [{"A": x, "B": b} for b in at.fixed(1000, k, 8 * at.unit)], {"A": x[:-1]}


def _exchanged_and_multiplied(at: At) -> Made:
    k, n, rows = 8 * at.unit, 8 * at.unit, at.size * (3 * at.unit + at.more)
    pairs = zip(at.of_ranks(0, rows, k), at.fixed(1000, k * at.size, n), strict=True)
    every = [{"A": a, "B": b, "scatter_dim": 0} for a, b in pairs]
    return every, {"A": every[at.rank]["A"][: -at.size]}


def _reduced_product(at: At) -> Made:
    """Between CPU ranks the parts of the rows are uneven, and the last ranks may have none."""
    m, k = (1 if at.unit == 1 else 2 * at.unit) + 3 * at.more, 8 * at.unit
    pairs = zip(at.of_ranks(0, m, k), at.fixed(1000, k, 6 if at.unit == 1 else 8 * at.unit), strict=True)
    return [{"A": a, "B": b, "reduce_op": "sum"} for a, b in pairs], {"reduce_op": "avg"}


def _signs(at: At, seed: int, *shape: int) -> list[Tensor]:
    return [2 * x.abs() - 1 for x in at.of_ranks(seed, *shape)]


def _normed(at: At, seed: int = 2000, quantized: bool = False) -> Made:
    """Every sum is 8 or -8, so that the norm is exact, too: 2 to 4, numbers of fp8. Residuals and weights differ from
    rank to rank."""
    rows, hidden = at.tokens, 5 if at.unit == 1 else 8 * at.unit
    xs, weights = at.of_ranks(0, rows, hidden), at.fixed(seed + 1000, hidden)
    every: list[Arguments] = []
    for x, signs, weight in zip(xs, _signs(at, seed, rows, hidden), weights, strict=True):
        every.append({"x": x, "residual": 8 * signs - sum(xs), "weight": 3 + weight, "eps": 0.0})
        every[-1] |= {"scale": torch.ones(()), "scale_op": "divide"} if quantized else {}
    return every, {"scale_op": "multiply"} if quantized else {"eps": 1.0}


def _layer_normed(at: At) -> Made:
    """Every sum is 24 or 8, each in half of its row, so that mean and root are exact."""
    rows, hidden = at.tokens, 6 if at.unit == 1 else 8 * at.unit
    xs, terms = at.of_ranks(0, rows, hidden), (at.fixed(seed, hidden) for seed in (5000, 6000))
    every = []
    for x, signs, weight, bias in zip(xs, _signs(at, 4000, rows, hidden // 2), *terms, strict=True):
        residual = 16 + 8 * torch.cat([signs, -signs], 1) - sum(xs)
        every.append({"x": x, "residual": residual, "weight": 3 + weight, "bias": 3 + bias, "eps": 0.0})
    return every, {"eps": 1.0}


def _loss(at: At, of_logits: bool = False) -> Made:
    """One column of the last rank is so far above all others that a row's sum of exponentials is its own."""
    rows, columns = at.tokens, 5 * at.unit
    x, weights = numbers(100 * at.step, rows, 8), at.fixed(9000, columns, 8)
    x[:, 0] = 1
    weights[-1][0] = 0
    weights[-1][0, 0] = 1024
    how: Arguments = {"targets": torch.arange(rows, device=x.device) % (columns * at.size)}
    if of_logits:
        return [{"logits_shard": x @ w.t(), **how, "reduction": "none"} for w in weights], {
            "temperature": 2.0
        }
    return [{"x": x, "weight_shard": w, **how} for w in weights], {"temperature": 2.0}


def _rows_of_losses(at: At) -> Made:
    every, other = _loss(at)
    return [{**each, "reduction": "none"} for each in every], other


def _chosen(tokens: int, device: torch.device) -> Arguments:
    """Each token goes to two of three experts; the second choice's weight is 2."""
    ids = torch.stack([torch.arange(tokens) % 3, torch.arange(tokens) // 2 % 3], 1).to(device)
    return dict(zip(("rows", "offs", "slots"), fused_ops.moe_route(ids, 3), strict=True))


def _weights(tokens: int, device: torch.device) -> Tensor:
    return torch.tensor([[1.0, 2.0]], device=device).expand(tokens, 2)


def _gathered_to_experts(at: At) -> Made:
    shards, Bs = at.of_ranks(0, at.tokens, 8 * at.unit), at.fixed(9500, 3, 8 * at.unit, 16)
    index = _chosen(at.tokens * at.size, Bs[0].device)
    index.pop("slots")
    pairs = zip(shards, Bs, strict=True)
    return [{"A_shard": a, "Bs": [B], **index, "gather_dim": 0} for a, B in pairs], {"return_A": True}


def _combined(at: At, kind: str = "sum") -> Made:
    """Two choices of each token, in reverse; the norm's sums are 8 or -8."""
    tokens, hidden = at.tokens * at.size, (5 if at.unit == 1 else 8 * at.unit) * at.size
    ys = at.of_ranks(0, 2 * tokens, hidden)
    slots = torch.arange(2 * tokens, dtype=torch.int32, device=ys[0].device).flip(0).view(tokens, 2)
    weights = _weights(tokens, slots.device)
    every: list[Arguments] = [{"y": y, "slots": slots, "weights": weights} for y in ys]
    if kind == "part":
        return [{**each, "scatter_dim": 0} for each in every], {"scatter_dim": 1}
    if kind == "sum":
        return every, {"slots": slots[: tokens // 2], "weights": weights[: tokens // 2]}
    total = sum(y.flip(0)[0::2] + 2 * y.flip(0)[1::2] for y in ys)
    for each, signs, weight in zip(
        every, _signs(at, 2000, tokens, hidden), at.fixed(3000, hidden), strict=True
    ):
        each |= {"residual": 8 * signs - total, "weight": 3 + weight, "eps": 0.0}
    return every, {"eps": 1.0}


def _multiplied_and_combined(at: At, part: bool) -> Made:
    tokens, k, n = at.tokens * at.size, 8 * at.unit, 8 * at.size
    As, Bs = at.of_ranks(0, 2 * tokens, k), at.fixed(9700, 3, k, n)
    index = _chosen(tokens, As[0].device) | {"weights": _weights(tokens, As[0].device), "reduce_op": "sum"}
    index.pop("rows")
    every = [{"A": A, "B": B, **index} for A, B in zip(As, Bs, strict=True)]
    if part:
        return [{**each, "scatter_dim": 0} for each in every], {"scatter_dim": 1}
    half = tokens // 2
    return every, {"slots": index["slots"][:half], "weights": index["weights"][:half]}


def _sent_to_experts(
    rank: int, size: int, step: int, unit: int, group: Any, more: int, *, back: bool
) -> Case:
    """Two of two experts a rank for each token, with weights 1 and 2; ``back``: from them."""
    tokens, hidden, experts = 2 * unit + more, 8 * unit, 2 * size
    xs = [numbers(100 * step + r, tokens, hidden) for r in range(size)]
    first = (torch.arange(tokens * size) % experts).to(xs[0].device)
    ids = torch.stack([first, (first + 1) % experts], 1)
    capacity, weights = 2 * tokens * size, torch.tensor([[1.0, 2.0]], device=first.device).expand(tokens, 2)
    handles = []
    for r in range(size):
        of = ExpertRanks(experts, size, r, 1)
        _, *routed = fused_ops.moe_route(ids, experts, first_expert=of.first, num_local_experts=of.each)
        handles.append(fused_ops.MoeHandle(*rows_by_expert(ids, (routed[0], routed[1]), of, capacity)[1:4]))
    own = slice(rank * tokens, (rank + 1) * tokens)
    if not back:
        # A forked child may not even slice on a GPU.
        every, given, there = torch.cat(xs), (xs[rank], ids[own], experts, group), handles[rank].choices
        there = there[there >= 0]

        def rows(align: int) -> torch.Tensor:
            return fused_ops.moe_dispatch(*given, capacity=capacity, align=align)[0][: len(there)]

        return Case(lambda: rows(1), lambda: take_tokens(every, there, 2), lambda: rows(2))
    ys = [numbers(9800 + r, capacity, hidden) for r in range(size)]
    parts = [Combined(y, h.slots[own], weights, None).total() for y, h in zip(ys, handles, strict=True)]
    return Case(
        lambda: fused_ops.moe_combine(ys[rank], handles[rank], weights, group),
        lambda: sum(parts),
        lambda: fused_ops.moe_combine(ys[rank][:, :8].repeat(1, 2), handles[rank], weights, group),
    )


_MADE: dict[str, Callable[[At], Made]] = {
    "fused_all_gather_matmul": _gathered,
    "fused_matmul_reduce_scatter": _scattered,
    "fused_all_gather_scaled_matmul": _gathered_fp8,
    "fused_scaled_matmul_reduce_scatter": _scattered_fp8,
    "fused_matmul_all_reduce": _reduced_product,
    "one_shot_all_reduce": _reduced,
    "one_shot_all_reduce_": partial(_reduced, other="max"),
    "one_shot_all_gather": _gathered_alone,
    "one_shot_reduce_scatter": _scattered_alone,
    "fused_all_reduce_rms_norm": _normed,
    "fused_all_reduce_layer_norm": _layer_normed,
    "fused_all_reduce_rms_norm_quant": partial(_normed, seed=7000, quantized=True),
    "fused_all_gather_grouped_matmul": _gathered_to_experts,
    "fused_grouped_matmul_all_reduce": partial(_multiplied_and_combined, part=False),
    "fused_grouped_matmul_reduce_scatter": partial(_multiplied_and_combined, part=True),
    "fused_linear_cross_entropy": _rows_of_losses,
    "fused_linear_log_probs": _loss,
    "cross_entropy_of_sharded_logits": partial(_loss, of_logits=True),
    "fused_moe_combine_all_reduce": _combined,
    "fused_moe_combine_all_reduce_rms_norm": partial(_combined, kind="norm"),
    "fused_moe_combine_reduce_scatter": partial(_combined, kind="part"),
    "one_shot_all_to_all": _exchanged,
    "one_shot_gather": _gathered_to_one,
    "fused_matmul_all_to_all": _product_exchanged,
    "fused_matmul_all_gather": _multiplied_and_gathered,
    "fused_all_to_all_matmul": _exchanged_and_multiplied,
}
# Rank, ranks, step, unit of the sizes, group, and by how much the sizes are larger.
OPS: dict[str, Callable[[int, int, int, int, Any, int], Case]] = {
    **{op: lambda *of, op=op, made=made: case_of(made, op, of) for op, made in _MADE.items()},  # type: ignore[misc]
    "moe_dispatch": partial(_sent_to_experts, back=False),
    "moe_combine": partial(_sent_to_experts, back=True),
}
