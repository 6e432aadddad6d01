"""One call of the soak: what is asked for, its operands for every rank, and what must come out, exactly.

All numbers are small integers, so products and sums are exact in every dtype and the result is compared bit for bit.
Operands are windows into a pool of random integers that is the same on every rank: each rank knows them all, and
computes the expected result by itself, without any communication that could fail in the same way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from dispatched import expected_dispatched, run_dispatched
from exchanged import OF_EXCHANGES, expected_exchanged, run_exchanged
from losses import expected_loss, run_loss
from torch import Tensor
from weft import fused_ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST_DIMENSION = ("all_gather_matmul", "matmul_reduce_scatter")  # what has a kernel for it
OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    *OF_EXCHANGES,
    "all_gather_scaled_matmul",
    "scaled_matmul_reduce_scatter",
    "all_gather_started",
    "reduce_scatter_started",
    "all_gather_grouped_matmul",
    "grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter",
    "moe_dispatch",
    "linear_cross_entropy",
    "cross_entropy",
)
OF_EXPERTS, OF_A_VOCABULARY = OPS[-6:-2], OPS[-2:]
EXPERTS, CHOICES = 3, 2  # of each token
SCALED = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")  # operands of fp8, results of 16 bits
# As reordered graphs call them: a start and its wait.
STARTED = ("all_gather_started", "reduce_scatter_started")
FIRST = (*STARTED, *OF_EXCHANGES[2:])  # of the first dimension
ALONE = ("all_gather", "gather", "reduce_scatter", "all_to_all", *STARTED)  # of a part [*lead, n]
POOL = 1 << 22  #: elements


class Pool:
    """Random integers on a device, by dtype, the same on every rank.

    One element in four is 1 or -1, the others are 0: sums of a thousand products stay far below 256, up to which
    bfloat16 has every integer.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        numbers = torch.randint(
            0, 8, (POOL,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
        )
        signs = (numbers == 0).int() - (numbers == 1).int()
        self.by_dtype = {dtype: signs.to(device=device, dtype=dtype) for dtype in DTYPES}

    def window(self, dtype: torch.dtype, start: float, *shape: int, grain: int = 1) -> Tensor:
        """A contiguous view of ``shape``, from a multiple of ``grain`` elements; ``start`` from 0 to 1 says which."""
        count = 1
        for size in shape:
            count *= size
        first = int(start * (POOL - count)) // grain * grain
        return self.by_dtype[dtype][first : first + count].view(shape)


@dataclass(frozen=True)
class Call:
    """What all ranks of a group ask for.

    Attributes:
        lead: sizes of the shard (all-gather), of the own part (reduce-scatter) or of all rows (matmul_all_reduce),
            without the last one.
        k, n: of the product [k, n]; for all_reduce ``n`` is the number of elements, for what stands alone the last
            size.
        dim: gathered or scattered; may be the last one. Of all_to_all the first one is gathered.
        starts: where in the pool the operands lie, from 0 to 1.
        grain: operands begin at a multiple of so many elements.
        columns: B's columns are contiguous, not its rows.
        average: where the number of ranks is a power of 2, so that the average is exact. Of scaled operands:
            tensor-wise scales, else row-wise ones.
    """

    op: str
    dtype: torch.dtype
    lead: tuple[int, ...]
    k: int
    n: int
    dim: int
    average: bool
    products: int
    return_A: bool
    columns: bool
    grain: int
    starts: tuple[float, float]

    @property
    def unscaled(self) -> str:
        return self.op.replace("scaled_", "").removesuffix("_started")

    def reduce_op(self, world_size: int) -> str:
        return "avg" if self.average and world_size & (world_size - 1) == 0 else "sum"

    @property
    def split(self) -> bool:
        """Whether the last dimension is gathered or scattered."""
        return self.dim == len(self.lead)


def draw(rng: random.Random, device: str, op: str, big: bool = False) -> Call:
    """A random call of an op. On CUDA it is one that the fused kernels take: rows of 16 bytes, and the last dimension
    only of 16 bits.

    ``big``: an all_reduce that makes workspaces grow.
    """
    cuda = device == "cuda"
    others = tuple(
        rng.randint(1, 2 if cuda else 6) for _ in range(rng.choice((0, 1) if cuda else (0, 0, 1, 2)))
    )
    dtype = rng.choice(DTYPES)
    # On the CPU torch keeps a program for each shape of a 16-bit product: few of them, or it is they that grow.
    few = not cuda and dtype != torch.float32
    rows = (
        rng.choice((64, 100, 129, 200, 300))
        if cuda
        else rng.choice((1, 5, 24))
        if few
        else rng.randint(1, 24)
    )
    lead = (rows, *others) if rng.random() < 0.5 else (*others, rows)
    k = rng.choice((64, 72, 128, 256)) if cuda else rng.choice((1, 17, 48)) if few else rng.randint(1, 48)
    n = rng.choice((64, 72, 136, 264)) if cuda else rng.choice((1, 16, 33)) if few else rng.randint(1, 40)
    if op in OF_EXPERTS or op in OF_A_VOCABULARY:
        lead = (rows,)
    if op in SCALED or op in OF_EXPERTS:
        k, n = -(-k // 16) * 16, -(-n // 16) * 16
    if op in SCALED:
        dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    if op == "all_reduce":
        n = (
            rng.randint(POOL // 64, POOL // 8)
            if big
            # The largest is reduced in two trips by four ranks.
            else rng.choice((1, 7, 1000, 4096, 200_000 if cuda else 16384, rng.randint(1, 3000)))
        )
    last_too = not cuda or op in ALONE or (op in LAST_DIMENSION and dtype != torch.float32)
    return Call(
        op,
        dtype,
        lead,
        k,
        n,
        0 if op in (*FIRST, *OF_EXPERTS, *OF_A_VOCABULARY) else rng.randrange(len(lead) + last_too),
        rng.random() < 0.3,
        rng.choice((1, 1, 1, 2)),
        rng.random() < 0.3,
        rng.random() < 0.7 or op in SCALED,
        8 if cuda and rng.random() < 0.9 else 1,
        (rng.random(), rng.random()),
    )


def operands(call: Call, pool: Pool, world_size: int) -> tuple[Tensor, list[Tensor]]:
    """The left operand and the right ones of every rank: [W, ...] each."""
    where, w = (call.dtype, call.starts[0]), world_size
    if call.op == "all_reduce":
        return pool.window(*where, w, call.n, grain=call.grain), []
    lead, k, n = list(call.lead), call.k, call.n
    if call.op in ALONE:
        shape = [*lead, n]
        if call.unscaled in ("reduce_scatter", "all_to_all"):
            shape[call.dim] *= w
        return pool.window(*where, w, *shape, grain=call.grain), []
    if call.op in OF_A_VOCABULARY:
        a = pool.window(*where, 1, *lead, k, grain=call.grain).expand(w, -1, -1)
        return a, [pool.window(call.dtype, call.starts[1], w, n, k, grain=call.grain)]
    if call.op == "moe_dispatch":
        return pool.window(*where, w, lead[0], k, grain=call.grain), []
    if call.op in OF_EXPERTS:
        rows = lead[0] if call.op == "all_gather_grouped_matmul" else lead[0] * w * CHOICES
        a = pool.window(*where, w, rows, k, grain=call.grain)
        b = pool.window(call.dtype, call.starts[1], w, EXPERTS, n, k, grain=call.grain)
        return a, [b.transpose(2, 3)]
    scatters = call.unscaled == "matmul_reduce_scatter"
    if call.op == "matmul_all_to_all" or (scatters and call.split):
        n *= w
    elif scatters or call.op == "all_to_all_matmul":
        lead[call.dim] *= w
    if call.op == "all_to_all_matmul" or (call.split and call.unscaled == "all_gather_matmul"):
        k *= w
    a = pool.window(*where, w, *lead, call.k, grain=call.grain)
    bs = []
    for i in range(call.products if call.unscaled == "all_gather_matmul" else 1):
        start = (call.starts[1] + i / 7) % 1
        if call.columns:
            bs.append(pool.window(call.dtype, start, w, n, k, grain=call.grain).transpose(1, 2))
        else:
            bs.append(pool.window(call.dtype, start, w, k, n, grain=call.grain))
    return a, bs


def _alone_shape(call: Call, world_size: int) -> list[int]:
    shape = [*call.lead, call.n]
    if call.op == "all_gather":
        shape[call.dim] *= world_size
    return shape


def _scales(call: Call, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """1 and 2, of this rank's A and B."""
    if call.average:
        return torch.full((), 2.0, device=a.device), torch.ones((), device=a.device)
    rows, columns = a.shape[:-1].numel(), b.shape[1]
    of_a, of_b = torch.arange(rank, rank + rows, device=a.device), torch.arange(columns, device=a.device)
    return (of_a % 2 + 1.0).view(*a.shape[:-1], 1), (of_b % 2 + 1.0).view(1, columns)


def _run_scaled(call: Call, a: Tensor, bs: list[Tensor], rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    fp8, size = torch.float8_e4m3fn, a.shape[0]
    mine, matrices = a[rank].to(fp8), [b[rank].to(fp8) for b in bs]
    pairs = [_scales(call, mine, b, rank) for b in matrices]
    if call.unscaled == "matmul_reduce_scatter":
        given = mine, matrices[0], *pairs[0], call.reduce_op(size), call.dim, group
        return [fused_ops.fused_scaled_matmul_reduce_scatter(*given, out_dtype=call.dtype)]
    gathered, outs = fused_ops.fused_all_gather_scaled_matmul(
        *(mine, matrices, pairs[0][0], [of_b for _, of_b in pairs], call.dim, group),
        out_dtypes=[call.dtype] * len(bs),
        return_A=call.return_A,
    )
    return outs if gathered is None else [gathered.to(call.dtype), *outs]


def _run_started(call: Call, x: Tensor, size: int, name: str) -> Tensor:
    """Its operand is made by the program, and its memory may be another one's from the wait on."""
    mine, ops = x + 0, torch.ops.weft
    if call.op == "reduce_scatter_started":
        token = ops.reduce_scatter_start(mine, call.reduce_op(size), name)
        return ops.reduce_scatter_wait(token, mine, name)  # type: ignore[no-any-return]
    token = ops.all_gather_start(mine, name, placed=call.return_A)
    gathered = ops.all_gather_wait(token, mine, name, placed=call.return_A)
    del mine
    if not call.return_A:
        return gathered  # type: ignore[no-any-return]
    result = gathered.clone()
    ops.all_gather_release(token, gathered, name)
    return result  # type: ignore[no-any-return]


def _chosen(call: Call, a: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of all ranks' tokens, of which some are none, and the choices' weights."""
    tokens = torch.arange(call.lead[0] * a.shape[0], device=a.device)
    ids = torch.stack([tokens * 5 % (EXPERTS + 1), (tokens // 3 + 1) % (EXPERTS + 1)], 1)
    # Filled on the device: a graph that is captured copies nothing from the host.
    return ids, torch.arange(1.0, 1.0 + CHOICES, device=a.device).expand(len(tokens), CHOICES)


def _run_experts(
    call: Call, a: Tensor, bs: list[Tensor], rank: int, group: dist.ProcessGroup
) -> list[Tensor]:
    if call.op == "moe_dispatch":
        return run_dispatched(a, rank, group, 2 if call.columns else 1)
    ids, weights = _chosen(call, a)
    rows, offs, slots = fused_ops.moe_route(ids, EXPERTS)
    if call.op == "all_gather_grouped_matmul":
        given = a[rank], [bs[0][rank]], rows, offs, 0, group
        gathered, (out,) = fused_ops.fused_all_gather_grouped_matmul(*given, return_A=call.return_A)
        out = torch.where((slots >= 0)[..., None], out[slots.clamp(min=0).long()], 0)
        return [out] if gathered is None else [gathered, out]
    product, reduce_op = (a[rank], bs[0][rank], offs, slots, weights), call.reduce_op(a.shape[0])
    if call.op == "grouped_matmul_all_reduce":
        return [fused_ops.fused_grouped_matmul_all_reduce(*product, reduce_op, group)]
    return [fused_ops.fused_grouped_matmul_reduce_scatter(*product, reduce_op, 0, group)]


def _expected_experts(call: Call, a: Tensor, bs: list[Tensor], rank: int) -> list[Tensor]:
    if call.op == "moe_dispatch":
        return expected_dispatched(a, rank)
    ids, weights = _chosen(call, a)
    there, of = (ids < EXPERTS)[..., None], ids.clamp(max=EXPERTS - 1)
    if call.op == "all_gather_grouped_matmul":
        whole = a.flatten(0, 1)
        every = torch.einsum("tk,ekn->ten", whole.float(), bs[0][rank].float())
        out = (every.gather(1, of[..., None].expand(*of.shape, call.n)) * there).to(call.dtype)
        return [whole, out] if call.return_A else [out]
    *_, slots = fused_ops.moe_route(ids, EXPERTS)
    total = torch.zeros(len(ids), call.n, device=a.device)
    for x, b in zip(a.float(), bs[0].float(), strict=True):
        every = torch.einsum("tjk,ekn->tjen", x[slots.clamp(min=0).long()], b)
        index = of[..., None, None].expand(*of.shape, 1, call.n)
        total += (every.gather(2, index).squeeze(2) * there * weights[..., None]).sum(1)
    total /= a.shape[0] if call.reduce_op(a.shape[0]) == "avg" else 1
    scattered = call.op == "grouped_matmul_reduce_scatter"
    return [(total.chunk(a.shape[0])[rank] if scattered else total).to(call.dtype)]


def run(call: Call, a: Tensor, bs: list[Tensor], rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    """This rank's results."""
    if call.op in OF_A_VOCABULARY:
        return run_loss(call.op, a, bs[0], (rank, call.return_A), group)
    if call.op in OF_EXPERTS:
        return _run_experts(call, a, bs, rank, group)
    if call.op in SCALED:
        return _run_scaled(call, a, bs, rank, group)
    if call.op == "all_reduce":
        return [fused_ops.one_shot_all_reduce(a[rank], call.reduce_op(a.shape[0]), group)]
    if call.op in STARTED:
        return [_run_started(call, a[rank], a.shape[0], group.group_name)]
    if call.op in OF_EXCHANGES:
        return [run_exchanged(call.op, a, bs, (rank, call.dim), group)]
    if call.op in ALONE:
        # Every other one into a given tensor.
        into = None if call.return_A else a.new_empty(_alone_shape(call, a.shape[0]))
        if call.op == "all_gather":
            return [fused_ops.one_shot_all_gather(a[rank], call.dim, group, out=into)]
        return [
            fused_ops.one_shot_reduce_scatter(a[rank], call.reduce_op(a.shape[0]), call.dim, group, out=into)
        ]
    if call.op == "matmul_all_reduce":
        return [fused_ops.fused_matmul_all_reduce(a[rank], bs[0][rank], call.reduce_op(a.shape[0]), group)]
    if call.op == "matmul_reduce_scatter":
        return [
            fused_ops.fused_matmul_reduce_scatter(
                a[rank], bs[0][rank], call.reduce_op(a.shape[0]), call.dim, group
            )
        ]
    gathered, outs = fused_ops.fused_all_gather_matmul(
        a[rank], [b[rank] for b in bs], call.dim, group, return_A=call.return_A
    )
    return outs if gathered is None else [gathered, *outs]


def expected(call: Call, a: Tensor, bs: list[Tensor], rank: int) -> list[Tensor]:
    """What ``run`` must give."""
    if call.op in OF_A_VOCABULARY:
        return expected_loss(call.op, a, bs[0])
    if call.op in OF_EXPERTS:
        return _expected_experts(call, a, bs, rank)
    w = a.shape[0]
    scale = w if call.reduce_op(w) == "avg" else 1
    if call.op == "all_reduce":
        return [(a.float().sum(0) / scale).to(call.dtype)]
    if call.unscaled == "all_gather":
        return [torch.cat(list(a), call.dim)]
    if call.unscaled == "reduce_scatter":
        return [(a.float().sum(0).chunk(w, call.dim)[rank] / scale).to(call.dtype)]
    if call.op in OF_EXCHANGES:
        return [expected_exchanged(call.op, a, bs, (rank, call.dim))]
    if call.op in SCALED:
        return _expected_scaled(call, a, bs, rank)
    scattered = call.op == "matmul_reduce_scatter"
    if scattered or call.op == "matmul_all_reduce":
        products = torch.bmm(a.flatten(1, -2).float(), bs[0].float()).view(*a.shape[:-1], bs[0].shape[-1])
        parts = products.sum(0) / scale
        return [(parts.chunk(w, call.dim)[rank] if scattered else parts).to(call.dtype)]
    whole = torch.cat(list(a), call.dim)
    outs = [(whole.float() @ b[rank].float()).to(call.dtype) for b in bs]
    return [whole, *outs] if call.return_A else outs


def _expected_scaled(call: Call, a: Tensor, bs: list[Tensor], rank: int) -> list[Tensor]:
    size, gathers = a.shape[0], call.unscaled == "all_gather_matmul"
    of_ranks = [a[r].float() * _scales(call, a[r], bs[0][r], r)[0] for r in range(size)]
    if not gathers:
        products = [
            x @ (b.float() * _scales(call, x, b, r)[1])
            for r, (x, b) in enumerate(zip(of_ranks, bs[0], strict=True))
        ]
        total = torch.stack(products).sum(0) / (size if call.reduce_op(size) == "avg" else 1)
        return [total.chunk(size, call.dim)[rank].to(call.dtype)]
    whole = torch.cat(of_ranks, call.dim)
    outs = [(whole @ (b[rank].float() * _scales(call, a[rank], b[rank], rank)[1])).to(call.dtype) for b in bs]
    return [torch.cat(list(a), call.dim), *outs] if call.return_A else outs


def differs(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Whether any element differs, as a bool tensor on the device; NaN differs."""
    if [x.shape for x in got] != [x.shape for x in want]:
        raise AssertionError(
            f"shapes {[tuple(x.shape) for x in got]}, expected {[tuple(x.shape) for x in want]}"
        )
    return torch.stack([(x != y).any() for x, y in zip(got, want, strict=True)]).any()
