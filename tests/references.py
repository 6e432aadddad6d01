"""What each op must give in float64, by plain torch, from its arguments on every rank; and calls held against that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from opcommon import BOUND, check, gather
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Arguments = dict[str, Any]  #: by the names of the op's function
Exact = tuple[Tensor, list[Tensor]]  #: a result, and what it is the sum of
REDUCTIONS = {"sum": "sum", "avg": "mean", "max": "amax", "min": "amin"}
# Three or two bits, rounded.
BOUNDS = {**BOUND, torch.float8_e4m3fn: 0.04, torch.float8_e5m2: 0.08}


def exact(op: str, every: Sequence[Arguments], rank: int) -> list[Exact]:
    """The results of ``rank`` that are of floating point; a gathered A comes first.

    Gradients flow as through the op: what ranks have copies of, such as a bias, gets the whole gradient in each.
    """
    every = [tree_map_only(Tensor, _wide, args) for args in every]
    mine, (first, *_) = every[rank], zip(*(args.values() for args in every), strict=True)
    if op in _SENT:
        sent = _SENT[op](first, every, rank)
        return [(each, []) for each in (sent if isinstance(sent, list) else [sent])]
    if "entropy" in op or "log_probs" in op:
        return [(each, []) for each in _of_a_vocabulary(op, every, rank)]
    if op == "fused_matmul_reduce_scatter" or op == "fused_matmul_all_reduce":
        terms = [a @ args["B"] for a, args in zip(first, every, strict=True)]
    elif op == "fused_scaled_matmul_reduce_scatter":
        terms = [_scaled_product(args) for args in every]
    elif "combine" in op:
        terms = [_of_choices(args["y"], args) for args in every]
    elif "grouped" in op:
        terms = [
            _of_choices(grouped(args["A"], args["B"], args["offs"], args.get("bias")), args) for args in every
        ]
    else:
        terms = list(first)
    scattered = op.endswith("reduce_scatter")
    if scattered:
        terms = [_part(term, mine["scatter_dim"], rank, len(every), mine.get("counts")) for term in terms]
    reduce_op = mine.get("reduce_op", "sum")
    total = getattr(torch.stack(terms), REDUCTIONS[reduce_op])(0)
    terms = [term / (len(every) if reduce_op == "avg" else 1) for term in terms]
    if op == "fused_matmul_reduce_scatter" and mine.get("bias") is not None:
        whole = mine["scatter_dim"] % mine["A"].dim() < mine["A"].dim() - 1
        copies = [args["bias"] for args in every if args.get("bias") is not None]
        terms.append((_copied(mine["bias"], copies) if whole else mine["bias"]).expand_as(total))
        total = total + terms[-1]
    if mine.get("residual") is not None:
        terms.append(mine["residual"])
        total = total + mine["residual"]
    if "norm" not in op:
        return [(total, terms)]
    normed = norm(op, mine, total)
    if "quant" not in op:
        return [(normed, []), (total, terms)]
    scale = mine.get("scale")
    scale = (
        normed.abs().amax(-1, keepdim=True) / torch.finfo(_quantized_to(mine)).max if scale is None else scale
    )
    inverse = mine.get("scale_op") == "multiply"
    return [(normed / scale, []), (1 / scale if inverse else scale, []), (total, terms)]


def norm(op: str, args: Arguments, sums: Tensor) -> Tensor:
    """Of a row's sums."""
    if "layer_norm" in op:
        sums = sums - sums.mean(-1, keepdim=True)
    out = sums / (sums.square().mean(-1, keepdim=True) + float(args["eps"])).sqrt()
    weight, bias = args["weight"], args.get("bias")
    out = out if weight is None else out * (_wide(weight) + float(args.get("weight_offset", 0.0)))
    return out if bias is None else out + _wide(bias)


def grouped(A: Tensor, B: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """Zeros in rows of no expert."""
    ends, rows = [0, *offs.tolist()], []
    for e, (begin, end) in enumerate(itertools.pairwise(ends)):
        rows.append(A[begin:end] @ B[e] + (0 if bias is None else bias[e]))
    return torch.cat([*rows, A.new_zeros(max(len(A) - ends[-1], 0), B.shape[2])])


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _quantized_to(args: Arguments) -> torch.dtype:
    return args.get("out_dtype", torch.float8_e4m3fn)  # type: ignore[no-any-return]


def _copied(mine: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """``mine``, with the gradient of every copy."""
    return mine.detach() + sum(copy - copy.detach() for copy in copies)


def _part(x: Tensor, dim: int, rank: int, size: int, counts: Sequence[int] | None = None) -> Tensor:
    return x.split(list(counts), dim)[rank] if counts else x.tensor_split(size, dim)[rank]


def _scaled_product(args: Arguments) -> Tensor:
    product: Tensor = (args["A"] * args["A_scale"]) @ (args["B"] * args["B_scale"])
    return product if args.get("bias") is None else product + args["bias"]


def _of_choices(y: Tensor, args: Arguments) -> Tensor:
    """Rows of tokens: those of their choices by the weights, and what is shared. A slot below 0 is none."""
    slots, rows = args["slots"].long(), torch.cat([y, y.new_zeros(1, y.shape[1])])
    there = (slots >= 0) & (slots < len(y))
    chosen = torch.where(there[..., None], rows[slots.where(there, len(y))], 0)
    total: Tensor = (chosen * torch.where(there, args["weights"], 0)[..., None]).sum(1)
    return total if args.get("shared") is None else total + args["shared"]


def _gathered(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    return torch.cat(list(first), every[rank]["gather_dim"])


def _gathered_to_one(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    dim, root = every[rank]["gather_dim"], every[rank]["root"]
    return torch.cat(list(first), dim) if rank == root else first[rank].narrow(dim, 0, 0)


def _exchanged(first: Sequence[Tensor], dims: tuple[int, int], rank: int) -> Tensor:
    """``dims``: the one that is scattered, and the one that is gathered."""
    return torch.cat([_part(x, dims[0], rank, len(first)) for x in first], dims[1])


def _all_to_all(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    return _exchanged(first, (every[rank]["scatter_dim"], every[rank]["gather_dim"]), rank)


def _product_exchanged(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    products = [a @ args["B"] for a, args in zip(first, every, strict=True)]
    return _exchanged(products, (-1, every[rank]["gather_dim"]), rank)


def _product_gathered(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    return torch.cat([a @ args["B"] for a, args in zip(first, every, strict=True)], -1)


def _exchanged_product(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    product: Tensor = _exchanged(first, (every[rank]["scatter_dim"], -1), rank) @ every[rank]["B"]
    return product


def _with_A(args: Arguments, A: Tensor, products: list[Tensor], default: bool = True) -> list[Tensor]:
    return [A, *products] if args.get("return_A", default) else products


def _gathered_product(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> list[Tensor]:
    A, mine = _gathered(first, every, rank), every[rank]
    return _with_A(mine, A, [A @ B for B in mine["Bs"]])


def _gathered_scaled(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> list[Tensor]:
    mine, dim = every[rank], every[rank]["gather_dim"]
    scales = [args["A_scale"] for args in every]
    if scales[0].numel() == 1 and scales[0].shape != (*first[0].shape[:-1], 1):
        scales = [mine["A_scale"]] * len(every)  # a rank's own for all
    A = torch.cat([a * scale for a, scale in zip(first, scales, strict=True)], dim)
    biases = [0 if bias is None else bias for bias in mine.get("biases") or [None] * len(mine["Bs"])]
    triples = zip(mine["Bs"], mine["B_scales"], biases, strict=True)
    return _with_A(mine, torch.cat(list(first), dim), [A @ (B * scale) + bias for B, scale, bias in triples])


def _gathered_grouped(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> list[Tensor]:
    """As far as experts have rows."""
    A, mine = torch.cat(list(first)), every[rank]
    taken, count = A[mine["rows"].long()] if len(A) else A, int(mine["offs"][-1])
    biases = mine.get("biases") or [None] * len(mine["Bs"])
    pairs = zip(mine["Bs"], biases, strict=True)
    return _with_A(
        mine, A, [grouped(taken, B, mine["offs"], bias)[:count] for B, bias in pairs], default=False
    )


def _grouped_alone(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    mine, A = every[rank], first[rank]
    taken = A if mine.get("rows") is None or not len(A) else A[mine["rows"].long()]
    return grouped(taken, mine["B"], mine["offs"], mine.get("bias"))[: int(mine["offs"][-1])]


def _sent_and_back(first: Sequence[Tensor], every: Sequence[Arguments], rank: int) -> Tensor:
    """Of experts that change nothing, six."""
    mine = every[rank]
    there = (mine["topk_ids"] >= 0) & (mine["topk_ids"] < 6)
    return first[rank] * (mine["weights"] * there).sum(1, keepdim=True)  # type: ignore[no-any-return]


_SENT: dict[str, Callable[[Sequence[Tensor], Sequence[Arguments], int], Tensor | list[Tensor]]] = {
    "one_shot_all_gather": _gathered,
    "one_shot_gather": _gathered_to_one,
    "one_shot_all_to_all": _all_to_all,
    "fused_matmul_all_to_all": _product_exchanged,
    "fused_matmul_all_gather": _product_gathered,
    "fused_all_to_all_matmul": _exchanged_product,
    "fused_all_gather_matmul": _gathered_product,
    "fused_all_gather_scaled_matmul": _gathered_scaled,
    "fused_all_gather_grouped_matmul": _gathered_grouped,
    "grouped_matmul": _grouped_alone,
    "sent_to_experts_and_back": _sent_and_back,
}


def _of_a_vocabulary(op: str, every: Sequence[Arguments], rank: int) -> list[Tensor]:
    mine, dim = every[rank], every[rank].get("sequence_dim")
    if op.startswith("cross"):
        scores = torch.cat([args["logits_shard"] for args in every], -1)
    else:
        x = mine["x"] if dim is None else torch.cat([args["x"] for args in every], dim)
        scores = x @ torch.cat([args["weight_shard"] for args in every]).mT
        if mine.get("bias") is not None:
            scores = scores + torch.cat([args["bias"] for args in every])
    if mine.get("softcap") is not None:
        scores = mine["softcap"] * (scores / mine["softcap"]).tanh()
    scores = scores / mine.get("temperature", 1.0)
    log_probs, targets = scores.log_softmax(-1), mine["targets"]
    counts, there = targets != mine.get("ignore_index", -100), targets >= 0
    own = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(there, -torch.inf)
    if op == "fused_linear_log_probs":
        entropy = [-(log_probs.exp() * log_probs).sum(-1)] if mine.get("return_entropy") else []
        return [each.where(counts, 0) for each in (own, *entropy)]
    smoothing = mine.get("label_smoothing", 0.0)
    rows = (-(1 - smoothing) * own).where(own > -torch.inf, torch.inf)  # also of a target that has no weight
    if smoothing:
        rows = rows - smoothing * log_probs.mean(-1)
    rows = (rows + mine.get("z_loss", 0.0) * scores.logsumexp(-1).square()).where(counts, 0)
    reduction = mine.get("reduction", "mean")
    if reduction == "none":
        return [rows]
    return [rows.sum() / (counts.sum() if reduction == "mean" else 1)]


def of_every_rank(arguments: Arguments) -> list[Arguments]:
    """The arguments of all ranks, what is of floating point in float64: sizes are the same, and all else is."""
    leaves, spec = tree_flatten(arguments)
    size = dist.get_world_size()
    all_of = [gather(x) if isinstance(x, Tensor) and x.is_floating_point() else [x] * size for x in leaves]
    return [tree_unflatten(list(of_rank), spec) for of_rank in zip(*all_of, strict=True)]


def results_of(got: Any) -> list[Tensor]:
    return [x for x in tree_leaves(got) if isinstance(x, Tensor) and x.is_floating_point()]


def bound_of(arguments: Arguments) -> float:
    """Of the coarsest dtype that is sent or multiplied, but for fp8, whose numbers are exact."""
    dtypes = [x.dtype for x in results_of(arguments)]
    return max(BOUND[dtype] for dtype in dtypes if dtype in BOUND)


def held(function: Callable[..., Any], bound: float | None = None, **arguments: Any) -> Any:
    """What the call returns, each result of it held against float64."""
    name = getattr(function, "__name__", "")
    wanted = exact(name, of_every_rank(arguments), dist.get_rank())  # of what a call may overwrite
    got = function(**arguments)
    for i, (out, (want, parts)) in enumerate(zip(results_of(got), wanted, strict=True)):
        of = bound or max(bound_of(arguments), BOUNDS.get(out.dtype, 0.0))
        check(
            f"{name}, result {i}",
            out[: len(want)].detach() if "grouped" in name else out.detach(),
            want,
            of,
            parts,
        )
    return got


def held_gradients(function: Callable[..., Any], bound: float = 1e-6, **arguments: Any) -> None:
    """The gradients of all that requires one: those of the sum of all ranks' losses in float64."""
    rank, name = dist.get_rank(), getattr(function, "__name__", "")
    every = tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), of_every_rank(arguments))
    outputs = results_of(function(**arguments))
    weights = [torch.randn_like(out) for out in outputs]
    torch.autograd.backward(outputs, weights)
    losses = []
    for other, of_rank in enumerate(zip(*map(gather, weights), strict=True)):
        wanted = exact(name, every, other)
        losses += [
            (want * w[: len(want)] if want.dim() else want * w).sum()
            for (want, _), w in zip(wanted, of_rank, strict=True)
        ]
    sum(losses).backward()
    for i, (x, want) in enumerate(zip(results_of(arguments), results_of(every[rank]), strict=True)):
        if x.requires_grad:
            assert x.grad is not None, f"{name}, gradient {i}"
            check(f"{name}, gradient {i}", x.grad, want.grad, bound)
        else:
            assert x.grad is None


def held_second_gradients(function: Callable[..., Any], bound: float = 2e-5, **arguments: Any) -> None:
    """The gradients, by all that requires one, of the squares of the gradients of all ranks' losses in float64."""
    rank, name = dist.get_rank(), getattr(function, "__name__", "")
    mine, every = results_of(arguments), of_every_rank(arguments)
    given = [
        [x.requires_grad_(y.requires_grad) for x, y in zip(results_of(e), mine, strict=True)] for e in every
    ]
    outputs = results_of(function(**arguments))
    weights = [torch.randn_like(out) for out in outputs]
    got = _second([outputs], [weights], [mine])
    results = [[want for want, _ in exact(name, every, other)] for other in range(len(every))]
    wanted = _second(results, list(zip(*map(gather, weights), strict=True)), given)
    for i, x in enumerate(got):
        check(f"{name}, argument {i} of {len(every)} ranks", x, wanted[rank * len(got) + i], bound)


def _second(
    results: Sequence[Any], weights: Sequence[Any], given: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Of what each rank gives and gets."""
    flat = [x for rank in given for x in rank if x.requires_grad]
    pairs = [pair for each in zip(results, weights, strict=True) for pair in zip(*each, strict=True)]
    first = torch.autograd.grad(sum((x.sin() * w).sum() for x, w in pairs), flat, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), flat))
