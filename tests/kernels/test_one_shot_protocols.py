"""The exchanges in one shot, on the CPU, threads as fibers: what is read is the right range of the right rank.

The kernels and their launchers run as they are but for assembly; stores to peers become visible late and in any order
(products.cpp). What is summed are small whole numbers: all sums are exact.
"""

from __future__ import annotations

import random
import shutil
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from fibers import Library
from products import Products, build
from test_product_protocols import uses, wrong
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import one_shot_kernel as gather
from weft.kernels.device.one_shot import OneShotConfig
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import one_shot_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue
from weft.symm_mem.fault import Fault
from weft.symm_mem.workspace import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
ROUNDED = Epilogue(BF16)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(BF16)


@dataclass
class Gather:
    """The shards [m, K] of all ranks on one workspace of each."""

    size: int
    m: int
    k: int
    blocks: int
    apart: int = 0  # what lies between two rows of a shard, in elements

    def shard(self) -> torch.Tensor:
        return numbers(self.m, self.k + self.apart)[:, self.apart :]

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        defines = gather.defines(self.size)
        return build(gather.SOURCE, gather._Params, defines, instead, "all_gather_one_shot")

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Products:
        config = OneShotConfig(self.blocks)
        layout = gather_configs.one_shot_layout(self.m, self.k, self.size, config)
        self.ranks = Products(monkeypatch, library, layout, pace)
        self.kernels = [
            gather.AllGatherMatmulOneShot(place, self.shard(), config) for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, half: int, polls: int) -> None:
        shards = [self.shard() for _ in self.kernels]
        for rank, kernel in enumerate(self.kernels):
            gathered = torch.full((self.size, self.m, self.k), float("nan")).to(BF16)
            kernel.launch(half, shards[rank].data_ptr(), gathered.data_ptr(), polls, rank)
            self.wanted.append((gathered, torch.stack(shards)))
        self.kept += shards


@dataclass
class Scatter:
    """The sum over all ranks of what each has computed for each."""

    size: int
    m: int
    n: int
    blocks: int
    epilogue: Epilogue = ROUNDED

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        defines = scatter.defines(BF16, self.size, self.epilogue)
        return build(scatter.SOURCE, scatter._Params, defines, instead, "reduce_scatter_one_shot")

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Products:
        config = OneShotConfig(self.blocks)
        nbytes, flags = scatter_configs.one_shot_needs(self.m, self.n, self.size, config)
        self.ranks = Products(monkeypatch, library, Layout(self.size, flags, nbytes), pace)
        a, b = numbers(1, self.size, self.m, 8), numbers(8, self.n)
        self.kernels = [
            scatter.MatmulReduceScatterOneShot(place, a, b, config, self.epilogue)
            for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, half: int, polls: int) -> None:
        partial = [numbers(self.size, self.m, self.n) for _ in self.kernels]
        total = torch.stack(partial).float().sum(0)
        epilogue, shape = self.epilogue, (self.m, self.n)
        scale = torch.tensor(1.0) / self.size if epilogue.average else torch.tensor(1.0)
        for rank, kernel in enumerate(self.kernels):
            out = torch.full(shape, float("nan"), dtype=epilogue.out_dtype)
            terms = [numbers(self.n)] * epilogue.bias + [numbers(*shape)] * epilogue.residual
            addresses = [term.data_ptr() for term in terms]
            kernel.launch(half, partial[rank].data_ptr(), addresses, out.data_ptr(), polls, rank)
            self.wanted.append((out, sum(terms, start=total[rank] * scale).to(epilogue.out_dtype)))
            self.kept += terms
        self.kept += partial


Op = Gather | Scatter

# Ranges that are longer than what a thread has on its way at once, and empty ones.
GATHERS = {
    "2": Gather(2, 67, 136, 2),
    "long": Gather(2, 147, 264, 1, apart=24),
    "3": Gather(3, 65, 72, 3, apart=8),
    "4": Gather(4, 33, 72, 2),
    "empty": Gather(2, 1, 8, 3),
    "9": Gather(9, 35, 136, 1),
}
SCATTERS = {
    "2": Scatter(2, 67, 136, 2),
    "long": Scatter(2, 147, 264, 1, Epilogue(torch.float32, bias=True, residual=True)),
    "3": Scatter(3, 65, 72, 3, Epilogue(BF16, average=True, bias=True)),
    "4": Scatter(4, 33, 72, 2, Epilogue(BF16, residual=True)),
    "empty": Scatter(2, 1, 8, 3, Epilogue(torch.float32, average=True)),
    "9": Scatter(9, 35, 136, 1, Epilogue(BF16, bias=True)),
}
OPS = [*GATHERS.values(), *SCATTERS.values()]
NAMES = [*(f"gather-{name}" for name in GATHERS), *(f"scatter-{name}" for name in SCATTERS)]


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_uses_of_both_halves(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert not wrong(op, uses(op, monkeypatch, op.compiled().result(), seed))


@pytest.mark.parametrize("op", [GATHERS["3"], SCATTERS["3"]], ids=["gather", "scatter"])
@pytest.mark.parametrize("told", [False, True], ids=["expires", "had-expired"])
def test_a_rank_that_gives_up_sends_nothing(op: Op, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = op.prepare(monkeypatch, op.compiled().result(), (1, 2000))
    op.launch(0, polls=100)
    layout, words = ranks.layout, ranks.memory.view(torch.int32)
    # As if this were the second use, and the last rank were still in the first one.
    words[0, layout.EPOCH] = 1
    words[0, layout.done(0) : layout.done(0) + op.size - 1] = 1
    ranks.faults[0, Fault.BROKEN] = int(told)
    if told:
        words[0, layout.done(0) + op.size - 1] = 1
    before = ranks.memory.clone()
    ranks.run_alone(0)
    after = ranks.memory[1:].view(torch.int32)
    assert (after[:, layout.done(0)] == 2).all()  # it ends the use all the same
    after[:, layout.done(0)] = 0
    assert torch.equal(ranks.memory[1:], before[1:])
    assert ranks.records[0, :2].tolist() == ([0, 0] if told else [1, ranks.places[0].address])


@pytest.mark.parametrize("op", [GATHERS["3"], SCATTERS["3"]], ids=["gather", "scatter"])
def test_a_late_rank_is_right_or_told(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins in the midst of what the others do, one of which waits for longer than the other."""
    library, outcomes = op.compiled().result(), []
    for seed in range(4):
        choice = random.Random(seed)
        torch.manual_seed(seed)
        ranks = op.prepare(monkeypatch, library, (choice.choice([1, 10]), 20_000))
        for call in range(4):
            op.launch(call // 2, polls=choice.choice([20, 200]))
        told = ranks.run_late(seed, late=1, turns=choice.randrange(300_000))
        for i, (got, want) in enumerate(op.wanted):
            call, rank = divmod(i, op.size)
            outcomes.append(torch.equal(got, want))
            assert outcomes[-1] or told[rank][call], f"seed {seed}: call {call} of rank {rank} is wrong"
    assert not all(outcomes), "nobody was late"


# What must stand in the kernels' text, and what a mistake would look like there.
MISTAKES = {
    "no-fence": ("__threadfence_system();\n        for", "for"),
    "threads-not-awaited": (
        "__syncthreads();\n    if (threadIdx.x == 0 && sends)",
        "if (threadIdx.x == 0 && sends)",
    ),
    "flag-not-awaited-by-all": ("    }\n    __syncthreads();\n}", "    }\n}"),
    "flag-of-another-block-set": (
        "watch.rank * half.flags_per_rank + blockIdx.x;",
        "watch.rank * half.flags_per_rank + (blockIdx.x + 1) % gridDim.x;",
    ),
    "flags-not-awaited": ("if (peer < WORLD_SIZE", "if (peer < 0"),
    "half-not-free": ("half.done + lane, use - 1", "half.done + lane, use - 2"),
    "half-not-asked-for": ("__syncthreads_and(threadIdx.x >= 32 || may_send(watch, half, use))", "true"),
}
MAY_SHOW: dict[str, Op] = {"gather": Gather(3, 67, 136, 2), "scatter": Scatter(3, 67, 136, 2)}


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """What the tests to come need is compiled while those before them run."""
    for item in request.session.items:
        params = item.callspec.params if item.path == request.path and hasattr(item, "callspec") else {}
        if "mistake" in params:
            MAY_SHOW[params["shows"]].compiled(MISTAKES[params["mistake"]])
        elif "op" in params:
            params["op"].compiled()


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("shows", MAY_SHOW)
def test_mistakes_are_found(shows: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = MAY_SHOW[shows]
    library = op.compiled(MISTAKES[mistake]).result()
    assert any(wrong(op, uses(op, monkeypatch, library, seed)) for seed in range(40))
