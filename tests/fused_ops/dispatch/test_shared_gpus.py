"""Three and four ranks where there are fewer GPUs: each op's kernels for that many ranks, right to the last bit.

Processes take turns on a GPU, so a call takes milliseconds, and ranks meet in orders that they never see on GPUs of
their own. Every rank knows all ranks' operands and computes what must come out by itself: no collective is needed, and
gloo would be slow at them. Operands are small whole numbers: all roundings on the way are exact, in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from control import own_products
from opcommon import poison, world
from ranks import run_ranks
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import (
    fused_all_gather_matmul,
    fused_all_reduce_rms_norm,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    last_plan,
    one_shot_all_reduce,
    one_shot_all_reduce_,
)
from weft.fused_ops.dispatch.plan import forced
from weft.fused_ops.ops.all_reduce import run_all_reduce
from weft.kernels.all_reduce.configs import AllReduceConfig, all_reduce_layout, choose_all_reduce, launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ULP = {BF16: 2**-8, F16: 2**-10, F32: 2**-22}  # where an average or a norm is rounded
POOL = 4_000_037  # a prime: windows that wrap around it are other numbers each time
ROUNDS, GRAPHS, REPLAYS = 3, 3, 3


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
        shapes: of a rank's operands.
        call: what makes the results of the own operands.
        want: the same of the rank and of all ranks' operands, [W, ...] each, in float64.
        rounds: the results are not whole numbers.
        out_dtype: of the results, where it is not that of the operands.
    """

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., list[Tensor]]
    want: Callable[..., list[Tensor]]
    rounds: bool = False
    out_dtype: torch.dtype | None = None


def gathering(
    size: int,
    shape: tuple[int, ...],
    ns: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    *,
    transposed: bool,
    return_A: bool,
) -> Case:
    """``shape``: of a shard. ``transposed``: K is contiguous in the Bs."""
    k = shape[-1] * (size if dim == len(shape) - 1 else 1)

    def call(shard: Tensor, *bs: Tensor) -> list[Tensor]:
        given = [b.t() if transposed else b for b in bs]
        A, outs = fused_all_gather_matmul(shard, given, dim, world(), return_A=return_A)
        assert (A is not None) is return_A
        return outs if A is None else [A, *outs]

    def want(rank: int, shards: Tensor, *bs: Tensor) -> list[Tensor]:
        whole = torch.cat(list(shards), dim)
        outs = [whole @ (b[rank].t() if transposed else b[rank]) for b in bs]
        return [whole, *outs] if return_A else outs

    shapes = (shape, *((n, k) if transposed else (k, n) for n in ns))
    name = f"all-gather + matmul of {shape} along {dim}, {ns} columns, {dtype}, {transposed=}, {return_A=}"
    return Case(name, dtype, shapes, call, want)


def scattering(
    size: int,
    shape: tuple[int, ...],
    n: int,
    dim: int,
    dtype: torch.dtype,
    reduce_op: str = "sum",
    *,
    transposed: bool,
    terms: tuple[str, ...] = (),
    out_dtype: torch.dtype | None = None,
) -> Case:
    """``shape``: of a rank's part of A; ``n``: columns of its result. ``terms``: which are added to it."""
    last = dim == len(shape) - 1
    wide = shape if last else (*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    columns = size * n if last else n
    known = {"bias": (n,), "residual": (*shape[:-1], n)}

    def call(a: Tensor, b: Tensor, *added: Tensor) -> list[Tensor]:
        named = dict(zip(terms, added, strict=True))
        given = b.t() if transposed else b
        return [fused_matmul_reduce_scatter(a, given, reduce_op, dim, world(), out_dtype=out_dtype, **named)]

    def want(rank: int, a: Tensor, b: Tensor, *added: Tensor) -> list[Tensor]:
        total = sum(x @ (y.t() if transposed else y) for x, y in zip(a, b, strict=True))
        own = total.chunk(size, dim)[rank] / (size if reduce_op == "avg" else 1)
        return [own + sum(term[rank] for term in added)]

    b = (columns, shape[-1]) if transposed else (shape[-1], columns)
    shapes = (wide, b, *(known[term] for term in terms))
    name = f"matmul + reduce-scatter, {reduce_op} of {wide} along {dim}, {n} columns, {dtype} to {out_dtype}, {terms}"
    return Case(name, dtype, shapes, call, want, rounds=reduce_op == "avg", out_dtype=out_dtype)


def reducing(
    numel: int,
    reduce_op: str,
    dtype: torch.dtype,
    *,
    in_place: bool = False,
    config: AllReduceConfig | None = None,
) -> Case:
    """``config``: what the op does not choose by itself, if given; for CUDA."""

    def call(x: Tensor) -> list[Tensor]:
        if config is not None:
            return [run_all_reduce(x, reduce_op, world(), config=config)]
        if not in_place:
            return [one_shot_all_reduce(x, reduce_op, world())]
        out = x.clone()
        one_shot_all_reduce_(out, reduce_op, world())
        return [out]

    def want(rank: int, x: Tensor) -> list[Tensor]:
        return [{"sum": x.sum(0), "avg": x.mean(0), "max": x.amax(0), "min": x.amin(0)}[reduce_op]]

    name = f"all-reduce, {reduce_op} of {numel}, {dtype}, {in_place=}, {config}"
    return Case(name, dtype, ((numel,),), call, want, rounds=reduce_op == "avg")


def norming(rows: int, hidden: int, dtype: torch.dtype) -> Case:
    def call(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        return list(fused_all_reduce_rms_norm(x, residual, weight + 2, 1e-6, world()))

    def want(rank: int, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        sums = x.sum(0) + residual[rank]
        scale = (sums.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return [sums * scale * (weight[rank] + 2), sums]

    shapes = ((rows, hidden), (rows, hidden), (hidden,))
    return Case(f"all-reduce + norm of {rows} x {hidden}, {dtype}", dtype, shapes, call, want, rounds=True)


def multiplying(m: int, k: int, n: int, dtype: torch.dtype) -> Case:
    def call(a: Tensor, b: Tensor) -> list[Tensor]:
        return [fused_matmul_all_reduce(a, b, "sum", world())]

    def want(rank: int, a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.bmm(a, b).sum(0)]

    name = f"matmul + all-reduce of {m} x {k} x {n}, {dtype}"
    return Case(name, dtype, ((m, k), (k, n)), call, want)


def make_cases(size: int, large: bool) -> list[Case]:
    """Of every op. ``large``: several tiles, waves of tiles, bands of rows, on a GPU; else the same, small."""

    def at(n: int) -> int:
        return n if large else n // 20 + 1

    def shaped(*sizes: int) -> tuple[int, ...]:
        return tuple(map(at, sizes))

    both = ("bias", "residual")
    return [
        gathering(size, shaped(301, 1000), shaped(520), 0, BF16, transposed=True, return_A=True),
        gathering(size, shaped(1201, 200), shaped(2056), 0, BF16, transposed=True, return_A=False),
        gathering(size, shaped(457, 504), shaped(520, 1544, 264), 0, BF16, transposed=True, return_A=False),
        gathering(size, (3, *shaped(201, 264)), shaped(776), 1, F16, transposed=False, return_A=True),
        gathering(size, shaped(641, 328), shaped(2568), 1, BF16, transposed=True, return_A=True),
        gathering(
            size, (2, *shaped(190, 264)), shaped(520, 136, 1032), 2, F16, transposed=False, return_A=False
        ),
        gathering(size, shaped(300, 132), shaped(260), 0, F32, transposed=True, return_A=True),
        scattering(size, shaped(301, 520), at(1000), 0, BF16, transposed=True),
        scattering(size, shaped(641, 264), at(2056), 0, BF16, "avg", transposed=True),
        scattering(size, shaped(257, 1000), at(520), 0, BF16, transposed=True, terms=both),
        scattering(size, shaped(1400, 200), at(776), 0, F16, transposed=False, terms=both[1:]),
        scattering(
            size, (3, *shaped(165, 200)), at(136), 1, F16, "avg", transposed=False, terms=both, out_dtype=F32
        ),
        scattering(size, (3, *shaped(256, 72)), at(136), 0, BF16, transposed=True),
        scattering(size, shaped(301, 1000), at(520), 1, BF16, transposed=True, terms=both),
        scattering(size, (2, *shaped(1200, 200)), at(1032), 2, F16, transposed=False, out_dtype=F32),
        scattering(size, shaped(100, 132), at(260), 0, F32, transposed=True),
        *(reducing(at(n), "sum", BF16) for n in (7, 5001, 150_001, 700_003, 2_700_001)),
        *(reducing(at(n), "sum", BF16) for n in (12 << 20, (12 << 20) + 5)),  # in several uses of their slots
        reducing(at(100_003), "max", F32),
        reducing(at(333_333), "avg", F16, in_place=True),
        reducing(at(600_003), "sum", BF16, config=AllReduceConfig("two_shot", blocks=8, threads=256)),
        norming(at(37), at(1000), BF16),
        norming(at(300), at(4096), BF16),
        # In one kernel; but for float32.
        multiplying(*shaped(300, 1000, 520), BF16),
        multiplying(*shaped(2049, 200, 1544), BF16),
        multiplying(*shaped(1025, 200, 776), F32),
    ]


class Given:
    """Every rank's operands of a case: windows into numbers of which most are 0 and some 1 or -1."""

    def __init__(self) -> None:
        generator = torch.Generator("cpu").manual_seed(11)
        numbers = torch.randint(-9, 10, (POOL,), generator=generator, device="cpu")
        self._numbers = numbers.div(9, rounding_mode="trunc").to(torch.get_default_device())

    def __call__(self, case: Case, seed: int, size: int) -> list[Tensor]:
        """[W, ...] each, fresh for each seed."""
        starts = random.Random(seed)
        made = []
        for shape in case.shapes:
            count = size * torch.Size(shape).numel()
            window = (torch.arange(count) + starts.randrange(POOL)) % POOL
            made.append(self._numbers[window].to(case.dtype).view(size, *shape))
        return made


def compare(case: Case, got: list[Tensor], given: list[Tensor], rank: int) -> None:
    want = case.want(rank, *(x.double() for x in given))
    assert len(got) == len(want)
    for i, (result, expected) in enumerate(zip(got, want, strict=True)):
        what = f"result {i} of {case.name}"
        assert result.shape == expected.shape, f"{what}: {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert result.dtype == (case.out_dtype or case.dtype), f"{what}: {result.dtype}"
        # Element by element: NaN is never close to anything.
        allowed = ULP[result.dtype] * expected.abs() + 1e-6 if case.rounds else torch.zeros_like(expected)
        wrong = ~((result.double() - expected).abs() <= allowed)
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            numbers = f"{result[tuple(first)].item()}, not {expected[tuple(first)].item()}"
            control = f"; {own_products(result.device)}" if result.is_cuda else ""
            raise AssertionError(
                f"{what}: {int(wrong.sum())} elements are wrong, {first} is {numbers}{control}"
            )


def called(case: Case, own: list[Tensor]) -> list[Tensor]:
    got = case.call(*own)
    if torch.get_default_device().type == "cpu":
        assert last_plan().algorithm == "host", f"{case.name}: {last_plan()}"
    else:
        assert last_plan().algorithm not in ("unfused", "host"), f"{case.name}: {last_plan()}"
    return got


def right(rank: int, size: int, large: bool) -> None:
    """Rounds of every case in some order, queued one after the other; on CUDA then captured and replayed."""
    order, mine = random.Random(size), random.Random(rank)
    given, cases = Given(), make_cases(size, large)
    cuda = torch.get_default_device().type == "cuda"

    def late() -> None:
        if cuda and mine.random() < 0.1:
            torch.cuda._sleep(mine.randrange(5_000_000))

    with forced("fused"):
        for _ in range(ROUNDS):
            poison(rank)
            queued = []
            for case in order.sample(cases, len(cases)):
                seed = order.randrange(1 << 30)
                own = [x[rank].clone() for x in given(case, seed, size)]
                late()
                queued.append((case, seed, called(case, own)))
            for case, seed, got in queued:
                compare(case, got, given(case, seed, size), rank)
            symm_mem.check()
        if cuda:
            replayed(rank, size, given, cases, order, late)
    symm_mem.check()


def replayed(
    rank: int, size: int, given: Given, cases: list[Case], order: random.Random, late: Callable[[], None]
) -> None:
    """The cases in a few graphs, replayed with other numbers each time, and an eager call between them."""
    captured = []
    for part in range(GRAPHS):
        chosen = cases[part::GRAPHS]
        inputs = [[x[rank].clone() for x in given(case, 0, size)] for case in chosen]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [called(case, own) for case, own in zip(chosen, inputs, strict=True)]
        captured.append((graph, chosen, inputs, outs))
    for _ in range(REPLAYS):
        for graph, chosen, inputs, outs in captured:
            seed, between = order.randrange(1 << 30), order.choice(cases)
            fresh = [given(case, seed + i, size) for i, case in enumerate(chosen)]
            for own, new in zip(inputs, fresh, strict=True):
                for x, y in zip(own, new, strict=True):
                    x.copy_(y[rank])
            for got in outs:
                for out in got:
                    out.fill_(float("nan"))
            late()
            graph.replay()
            more = given(between, seed, size)
            compare(between, called(between, [x[rank].clone() for x in more]), more, rank)
            for case, got, new in zip(chosen, outs, fresh, strict=True):
                compare(case, got, new, rank)
            symm_mem.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_calls_between_cpu_ranks(world_size: int) -> None:
    run_ranks(right, world_size, False)


def wrong(rank: int, size: int) -> None:
    """One element of one result that is not what it must be."""
    given = Given()
    for case in make_cases(size, False):
        numbers = given(case, 1, size)
        got = [x.to(case.out_dtype or case.dtype) for x in case.want(rank, *(x.double() for x in numbers))]
        compare(case, got, numbers, rank)
        for bad in (float("nan"), 1.0):
            changed = [x.clone() for x in got]
            changed[-1].view(-1)[-1] += bad
            with pytest.raises(AssertionError, match="1 elements are wrong"):
                compare(case, changed, numbers, rank)


def test_a_wrong_element_is_noticed() -> None:
    run_ranks(wrong, 2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_kernel_of_the_all_reduce_is_reached(size: int) -> None:
    reached, several = set(), set()
    for case in make_cases(size, True):
        if case.name.startswith("all-reduce, sum") and case.name.endswith("None"):  # nothing given
            nbytes = case.shapes[0][0] * 2
            config = choose_all_reduce(nbytes, size)
            part = 16 * (size if config.form == "two_shot" else 1)
            found = launch(-(-nbytes // part), all_reduce_layout(nbytes, size, config), config)
            name = found.kernel + ("_any" if nbytes % part else "")
            reached.add(name)
            if found.epochs > 1:
                several.add(name)
    assert reached >= {"one_shot_any", "two_shot_any", "two_shot_rounds", "two_shot_rounds_any"}
    assert several == {"two_shot_rounds", "two_shot_rounds_any"}


def gpus_for(world_size: int) -> int:
    """Fewer than there are ranks, at most two."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for GPUs of compute capability 9.0")
    return min(2, torch.cuda.device_count(), world_size - 1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_share_gpus(world_size: int) -> None:
    env = {"WEFT_TIMEOUT": "60"}  # before the run counts as hung: who waits for whom is then said
    run_ranks(right, world_size, True, device="cuda", gpus=gpus_for(world_size), env=env)


def refused(rank: int, size: int) -> str | None:
    return symm_mem.unavailable(world(), "cuda")


@pytest.mark.gpu(1)
def test_that_is_only_done_where_it_is_asked_for() -> None:
    env = {"WEFT_SHARE_GPUS": "0"}
    for said in run_ranks(refused, 2, device="cuda", gpus=gpus_for(2), env=env, fresh=True):
        assert "ranks 0 and 1 share one GPU" in said and "WEFT_SHARE_GPUS=1" in said
