"""The products that send by themselves, on the CPU: what is read is the right row or part (matmul_ops.py)."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

import pytest
import torch
from fibers import PATIENT, drawn_seed
from matmul_ops import GATHERS, LARGE_BUT_ONE, OF_EIGHT, SCATTERS, Op, uses, wrong
from weft.symm_mem.failure.fault import Fault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """What the tests to come need is compiled while those before them run."""
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec") and "op" in item.callspec.params:
            item.callspec.params["op"].compiled()


@pytest.mark.parametrize("op", [*GATHERS.values(), *SCATTERS.values()], ids=[*GATHERS, *SCATTERS])
def test_epochs_of_both_buffers(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = drawn_seed()
    assert not wrong(op, uses(op, monkeypatch, op.compiled().result(), seed, count=4))


@pytest.mark.parametrize("op", OF_EIGHT.values(), ids=OF_EIGHT)
def test_eight_ranks(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = drawn_seed()
    paces = [(1, 2000), (3, 2000), (3, 20_000)]  # not as late as PACES have it
    assert not wrong(op, uses(op, monkeypatch, op.compiled().result(), seed, count=2, paces=paces))


OF_CROWDED = (
    "beside",
    "comm_sms",
    "split",
    "returned-split",
    "2",
    "two-blocks-3",
    "4",
    "to-all",
    "to-all-3",
    "batches",
)
CROWDED = [{**GATHERS, **SCATTERS}[name] for name in OF_CROWDED]


@pytest.mark.parametrize("op", CROWDED, ids=OF_CROWDED)
@pytest.mark.parametrize("room", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_most_blocks_find_no_room_beside_other_kernels(
    op: Op, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are there wait for nothing that those would do which are not."""
    seed = drawn_seed()
    crowded = replace(op, blocks=8)
    assert not wrong(crowded, uses(crowded, monkeypatch, op.compiled().result(), seed, count=3, room=room))


def test_ranks_with_equal_bs_get_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards side by side are multiplied in the order of the ranks, whoever does."""
    op = replace(GATHERS["split-comm_sms"])
    library, bs = op.compiled().result(), op.bs()
    scales = iter([1.0, *LARGE_BUT_ONE])  # the first shard is an example
    monkeypatch.setattr(op, "bs", lambda: bs)
    monkeypatch.setattr(op, "shard", lambda: GATHERS["split-comm_sms"].shard() * next(scales))
    ranks = op.prepare(monkeypatch, library, (1, 2000))
    op.launch(0, PATIENT)
    ranks.run(seed=3)
    first, *others = [got for got, _ in op.wanted]
    assert not ranks.records.any() and first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "op",
    [GATHERS["beside"], GATHERS["comm_sms"], SCATTERS["3"], SCATTERS["two-blocks"], SCATTERS["to-all"]],
    ids=["beside", "comm_sms", "parts", "two-blocks", "to-all"],
)
@pytest.mark.parametrize("told", [False, True], ids=["expires", "had-expired"])
def test_a_rank_that_gives_up_sends_nothing(op: Op, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = op.prepare(monkeypatch, op.compiled().result(), (1, 2000))
    op.launch(0, polls=1 << 40 if told else 100)  # who has been told waits for nothing
    layout, words = ranks.layout, ranks.memory.view(torch.int32)
    # As if this were the second epoch, and the last rank were still in the first one.
    words[0, layout.EPOCH] = 1
    words[0, layout.done(0) : layout.done(0) + op.size - 1] = 1
    ranks.faults[0, Fault.BROKEN] = int(told)
    if told:
        words[0, layout.done(0) + op.size - 1] = 1
    before = ranks.memory.clone()
    ranks.run_alone(0)
    after = ranks.memory[1:].view(torch.int32)
    assert (after[:, layout.done(0)] == 2).all()  # it ends the epoch all the same
    after[:, layout.done(0)] = 0
    assert torch.equal(ranks.memory[1:], before[1:])
    # A wait for data may expire as soon as the one for the buffer does.
    assert ranks.records[0, :2].tolist() == ([0, 0] if told else [1, ranks.places[0].address])


@pytest.mark.parametrize("missing", range(4), ids=["part-of-1", "part-of-2", "sum-of-1", "sum-of-2"])
def test_who_has_not_sent_is_named(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what rank 0 waits for, parts and sums of its peers, all has come but what one of them sends."""
    op = SCATTERS["to-all-3"]
    ranks = op.prepare(monkeypatch, op.compiled().result(), (1, 2000))
    op.launch(0, polls=100)
    first, size = ranks.layout.buffer(0), ranks.layout.buffer_bytes
    slots = ranks.memory[0, first : first + size].view(4, -1)
    slots[:] = 1
    slots[missing] = 0
    ranks.run_alone(0)
    peer = 1 + missing % 2
    written, address, named, word, expected, seen, kind, _ = ranks.records[0].tolist()
    assert (written, address, named) == (1, ranks.places[0].address, peer)
    assert (expected, seen, kind) == (1, 0, 1)
    assert word * 4 - first in range(missing * size // 4, (missing + 1) * size // 4)
    assert ranks.faults[0, Fault.BROKEN] == 1 + peer
    assert not slots.any(), "what has come is taken all the same"


@pytest.mark.parametrize("op", [GATHERS["beside"], GATHERS["comm_sms"]], ids=["beside", "comm_sms"])
def test_flags_that_were_not_written_for_very_long(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2**31 uses in which calls had less to say: by >= with wrap-around they would be ahead."""
    ranks = op.prepare(monkeypatch, op.compiled().result(), (10, 20_000))
    layout, words = ranks.layout, ranks.memory.view(torch.int32)
    for buffer in (0, 1):
        words[:, layout.EPOCH + buffer] = 5 - 2**31
        words[:, layout.done(buffer) : layout.done(buffer) + op.size] = 5 - 2**31
    for buffer in (0, 1, 0):
        op.launch(buffer, PATIENT)
    ranks.run(seed=random.randrange(1 << 30))
    assert not wrong(op, ranks)


@pytest.mark.parametrize(
    "op",
    [
        *(GATHERS["beside"], GATHERS["comm_sms"], GATHERS["split-comm_sms"]),
        *(
            SCATTERS["3"],
            SCATTERS["two-blocks"],
            SCATTERS["columns"],
            SCATTERS["to-all"],
            SCATTERS["to-all-3"],
        ),
    ],
    ids=["beside", "comm_sms", "split", "parts", "two-blocks", "columns", "to-all", "to-all-3"],
)
def test_a_late_rank_is_right_or_told(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins in the midst of what the others do, one of which waits for longer than the other."""
    library, outcomes = op.compiled().result(), []
    for seed in range(4):
        choice = random.Random(seed)
        torch.manual_seed(seed)
        ranks = op.prepare(monkeypatch, library, (choice.choice([1, 10]), 20_000))
        for call in range(4):
            op.launch(call // 2, polls=choice.choice([20, 200]))
        told = ranks.run_late(seed, late=1, turns=choice.randrange(1_000_000))
        each = len(op.wanted) // (4 * op.size)
        for i, (got, want) in enumerate(op.wanted):
            call, rank = divmod(i // each, op.size)
            outcomes.append(torch.equal(got, want))
            assert outcomes[-1] or told[rank][call], f"seed {seed}: call {call} of rank {rank} is wrong"
    assert not all(outcomes), "nobody was late"
