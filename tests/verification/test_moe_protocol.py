"""The CUDA moe_dispatch and moe_combine and their launcher on the CPU, threads as fibers: tokens that some ranks need,
one, all or none, epochs of one launch, and a rank that does not come."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import PATIENT, TORCH, Library, Ranks, build, same
from test_collective_protocols import any_bits
from weft.kernels.device.collective.combine import Combined
from weft.kernels.device.collective.rounds import RoundsConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.kernels.moe_dispatch import cuda_kernel
from weft.kernels.moe_dispatch.configs import MoeProblem, Routed
from weft.kernels.moe_dispatch.cuda_kernel import SOURCE, MoeLauncher, MoeParams, moe_defines
from weft.kernels.moe_dispatch.reference import ExpertRanks, rows_by_expert, sum_by_rank, take_tokens
from weft.kernels.moe_route import cuda_kernel as route
from weft.kernels.moe_route.reference import reference_route

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = ("dispatch_one_shot", "dispatch_rounds", "combine_one_shot", "combine_rounds", "moe_dispatch_route")
CLUSTER, THREADS = 2, 64  # that route
MISTAKES = {
    "a block that hears from no peer": (
        "if (has(needed[k], peer) || index == 0) exact",
        "if (has(needed[k], peer)) exact",
    ),
    "a token goes to the wrong rank": (
        "if (has(needed[k], peer) || i",
        "if (has(needed[k], weft::peer_of(1)) || i",
    ),
    "a block that hears no ids": ("s.at < vectors || s.index == 0;", "s.at < vectors;"),
    "rows past the capacity": ("fits ? static_cast<int>(place) : -1", "static_cast<int>(place)"),
    "rows that fill an expert's up are of a choice": (
        "p.rows[i] = -1;\n        }",
        "p.rows[i] = 0;\n        }",
    ),
    "no overflow is noted": ("lane != 0 || most <= p.capacity", "true"),
    "an own token is not stored": ("if (sent(k, src)) {", "if (src != RANK && sent(k, src)) {"),
    "tokens are stored before their places are known": ("if (p.words != 0) weft::wait_for_previous();", ";"),
    "an id of two words is taken for its first one": ("more == 0 ? expert : ~0u", "expert"),
    "a warp's second token goes where its first one does": (">= p.row ? 16 : 0", ">= p.row ? 0 : 0"),
    "who receives is an epoch ahead of the credits": ("credit_warp.all_emptied()", "credit_warp.emptied()"),
    "rows that fill experts' up stay as they were": ("if (!cleared) clear(s.index, threads);", ";"),
    "rows past the last one are written": ("used = p.offs[p.experts - 1], lane", "used = p.rows, lane"),
    "a part that no rows are of is added": (
        "return src == RANK ? own[k] : in",
        "return src == RANK ? own[k] : !sent(k, src) ? own[k] : in",
    ),
}


class Kernels:
    """A stand-in for a loaded program."""

    def __init__(self, ranks: Ranks) -> None:
        self.function = lambda name, shared=0: ranks.function(name)


def compiled(
    folder: Path, case: tuple[int, str, int, bool], instead: tuple[str, str] | None = None
) -> Library:
    size, dtype, choices, wide = case
    defines = moe_defines(size, TORCH[dtype], choices, wide)
    defines |= {"ID": "long" if size > 2 else "int", "CLUSTER": CLUSTER, "THREADS": THREADS}
    beside = [(route.SOURCE, KERNELS[-1:], route.DispatchRouteParams)]
    return build(folder, SOURCE, KERNELS[:-1], MoeParams, defines, beside, instead)


class Call:
    """Tokens of all ranks, of which choices are random, of "one" expert, or of "none"; and what becomes of them."""

    def __init__(self, size: int, tokens: int, hidden: int, case: tuple[int, str, int, bool]) -> None:
        _, dtype, choices, wide = case
        self.size, self.tokens, self.hidden, self.dtype = size, tokens, hidden, TORCH[dtype]
        experts = 2 * size
        ids = torch.randint(-1, experts + 1, (size * tokens, choices))
        if size > 2:
            ids += torch.randint(10, ids.shape).eq(0).long() << 32
        kind = random.choice(["random", "random", "one", "none", "own"])
        if kind == "own":
            ids = (torch.arange(size).repeat_interleave(tokens) * 2)[:, None].expand(-1, choices)
        elif kind != "random":
            ids = torch.full_like(ids, {"one": experts - 1, "none": -1}[kind])
        self.rows = random.choice([1, 2, 4]) * size * tokens * choices // 2 + 3
        self.ids, self.align = (
            ids.to(torch.int64 if size > 2 else torch.int32).contiguous(),
            random.choice([1, 3]),
        )
        self.offs, self.places = [], []
        for rank in range(size):
            of = self.of(rank)
            routed = reference_route(ids, of.first, of.each)[1:]
            offs, *places, needed = rows_by_expert(ids, routed, of, self.rows)
            self.offs.append(offs)
            self.places.append(places)
        most = int(needed.max())
        self.noted = [1, most, self.rows] if most > self.rows else [0, 0, 0]
        self.x = any_bits(size * tokens * hidden, self.dtype).view(size, tokens, hidden)
        self.y = torch.randn(size, self.rows, hidden).to(self.dtype)
        self.weights = torch.rand(size * tokens, choices).to(torch.float32 if wide else self.dtype)
        self.wide, self.choices = wide, choices
        self.found: dict[int, list[torch.Tensor]] = {}  # of each rank: what its routing kernel has written

    def of(self, rank: int) -> ExpertRanks:
        return ExpertRanks(2 * self.size, self.size, rank, self.align)

    def problem(self, way: str) -> MoeProblem:
        given = self.tokens, self.hidden, self.rows, self.choices, self.dtype, self.wide
        routed = Routed(2, self.ids.itemsize // 4, CLUSTER) if way == "routed" else None
        of = "combine" if way == "combine" else "dispatch"
        return MoeProblem(of, *given, 2 if self.align > 1 else 0, routed)

    def operands(self, way: str, rank: int) -> list[torch.Tensor]:
        slots, choices, ranks = self.places[rank]
        if way == "dispatch":
            return [self.x[rank], slots, ranks, *((choices, self.offs[rank]) if self.align > 1 else ())]
        return [self.y[rank], slots, ranks, self.weights]

    def wanted(self, way: str, rank: int) -> torch.Tensor:
        if way != "combine":
            rows = take_tokens(self.x.flatten(0, 1), self.places[rank][1], self.choices)
            rows[self.offs[rank][-1] :] = 7  # they stay as they were
            return rows
        parts = []
        for r in range(self.size):
            total = Combined(self.y[r], self.places[r][0], self.weights, None).total()
            parts.append(total.view(self.size, self.tokens, -1)[rank])
        return sum_by_rank(torch.stack(parts), self.places[rank][2].view(self.size, -1)[rank])


def launch(ranks: Ranks, call: Call, way: str, rank: int, config: RoundsConfig, polls: int) -> torch.Tensor:
    rows = call.tokens if way == "combine" else call.rows
    out = torch.full((rows + 1, call.hidden), 7.0, dtype=call.dtype)
    place = ranks.places[rank]
    kernel: Any = MoeLauncher(place, call.problem(way), config)
    given, results = call.operands(way, rank), [out]
    if way == "routed":
        call.found[rank] = [
            torch.full_like(t, 7) for t in (call.offs[rank], *call.places[rank], torch.zeros(3).long())
        ]
        *index, note = call.found[rank]
        of = call.of(rank)
        sizes = of.first, of.each, call.ids.numel(), call.choices, of.num_experts, call.rows, of.align
        kernel = route.DispatchLauncher(kernel, place, route.RouteSizes(*sizes), call.ids.dtype, note.zero_())
        given, results = [call.x[rank], call.ids.chunk(call.size)[rank]], [out, *index]
    kernel.launch(0, [t.data_ptr() for t in given], [t.data_ptr() for t in results], polls, rank)
    return out


def right(library: Library, case: tuple[int, str, int, bool], seed: int, calls: int) -> bool:
    """Whether calls of all kernels, one after the other, give what they must and leave their slots empty."""
    torch.manual_seed(seed)
    random.seed(seed)
    size, made = case[0], []
    ranks = Ranks(library, ExchangeLayout(size, 256))
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(cuda_kernel, "moe_program", lambda *a: Kernels(ranks))
        monkey.setattr(route, "dispatch_route_program", lambda *a: Kernels(ranks))
        monkey.setattr(route, "ROUTE_BLOCKS", CLUSTER)
        monkey.setattr(route, "THREADS", THREADS)
        for i in range(calls):
            tokens, row = random.choice([1, 2, 7]), random.choice([1, 3, 5, 33])
            if i % 3 == 2:  # by rounds
                tokens, row = random.choice([(40, 5), (61, 5), (10, 33)])
            call = Call(size, tokens, row * 16 // TORCH[case[1]].itemsize, case)
            for way in random.sample(["dispatch", "routed", "combine"], 3):
                grid = (128, 1, 64) if tokens * row > 64 else (64, random.choice([1, 2]), 32)
                config = RoundsConfig(*grid, way != "combine")
                outs = [
                    launch(ranks, call, way, r, config, PATIENT if calls > 8 else 500) for r in range(size)
                ]
                made.append((call, way, outs))
    if not ranks.ends(seed) or ranks.records.any() or not ranks.slots_are_empty():
        return False
    assert {KERNELS[n.kernel] for place in ranks.places for n in place.launches} == set(KERNELS)
    for call, way, outs in made:
        for rank, out in enumerate(outs):
            assert bool((out[-1] == 7).all()), "written past the end"
            want = call.wanted(way, rank)
            if way == "routed":
                index = call.offs[rank], *call.places[rank], torch.tensor(call.noted)
                if not all(map(torch.equal, call.found[rank], index)):
                    return False
            bits = torch.int16 if out.dtype.itemsize == 2 else torch.int32
            if not (
                same(out[:-1], want)
                if way == "combine"
                else torch.equal(out[:-1].view(bits), want.view(bits))
            ):
                return False
    return True


@pytest.mark.parametrize(
    "case",
    [(2, "bfloat16", 8, True), (3, "float32", 1, False), (4, "bfloat16", 2, False), (8, "bfloat16", 2, True)],
    ids=str,
)
def test_tokens_go_where_they_are_needed(tmp_path: Path, case: tuple[int, str, int, bool]) -> None:
    seed = random.randrange(1 << 30)
    assert right(compiled(tmp_path, case), case, seed, 24 // case[0] + 6), f"seed {seed}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, mistake: str) -> None:
    case = (3, "float32", 2, False)
    library = compiled(tmp_path, case, MISTAKES[mistake])
    assert not all(right(library, case, seed, 6) for seed in range(4))


@pytest.mark.parametrize("tokens", [4, 60])  # in one epoch, and by rounds
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by ranks that need nothing of it."""
    case = (3, "float32", 1, False)
    ranks = Ranks(compiled(tmp_path, case), ExchangeLayout(3, 256))
    monkeypatch.setattr(cuda_kernel, "moe_program", lambda *a: Kernels(ranks))
    monkeypatch.setattr(random, "choice", lambda among: among[-1])  # each token stays where it is
    call = Call(3, tokens, 12, case)
    kept = [launch(ranks, call, "dispatch", rank, RoundsConfig(128, 1, 64, True), 500) for rank in range(3)]
    ranks.check_that_rank_1_is_missed(MoeParams)
    assert len(kept) == 3
