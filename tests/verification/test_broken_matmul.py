"""What an expired wait leaves of a product is not sent by the all-reduce after it, which has a workspace of its own.

Both kernels on the CPU, threads as fibers: first the product alone (matmuls.cpp), then the all-reduce (pushes.cpp).
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from fibers import Ranks
from matmul_ops import GATHERS, SCATTERS, Op
from matmuls import Matmuls
from test_all_reduce_protocol import FORMS, compiled, launch, reference
from weft.kernels.all_reduce.configs import AllReduceConfig
from weft.kernels.device.comm.ll_exchange import ExchangeLayout
from weft.symm_mem.failure.fault import Fault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIZE = 3
MISSING = 1


def theirs_has_come(products: Matmuls, words: torch.Tensor, peer: int) -> None:
    """What rank 0 waits for of ``peer``, in its first buffer: flags, or data that is not empty."""
    layout = products.layout
    if layout.ll_protocol:
        of_peer = layout.buffer_bytes // (SIZE - 1) // 4
        first = layout.buffer(0) // 4 + (peer - 1) * of_peer
        words[first : first + of_peer] = -1
    else:
        row = layout.flags(0) + peer * layout.flags_per_rank
        words[row : row + layout.flags_per_rank] = 1


@pytest.mark.parametrize("op", [GATHERS["comm_sms"], SCATTERS["3"]], ids=["gather", "scatter"])
@pytest.mark.parametrize("breaks", [True, False])
def test_no_peer_gets_a_wrong_number(
    op: Op, breaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's product waits in vain for rank 1, which comes to the all-reduce all the same, as rank 2 does."""
    assert op.size == SIZE
    products = op.prepare(monkeypatch, op.compiled().result(), (1, 2000))
    if breaks:
        op.launch(0, polls=100)
        words = products.memory.view(torch.int32)
        for peer in range(SIZE):
            if peer != MISSING:
                theirs_has_come(products, words[0], peer)
        products.run_alone(0)
        assert products.faults[0, Fault.BROKEN] == 1 + MISSING
    of_product = products.records[0].clone()
    assert of_product[:3].tolist() == ([1, products.places[0].address, MISSING] if breaks else [0, 0, 0])
    if breaks:
        said, expected, seen = products.layout.describe(int(of_product[3])), *of_product[4:6].tolist()
        assert (expected, seen) == (1, 0) and "(buffer 0)" in said, said
        assert ("epoch of the data" if products.layout.ll_protocol else f"of rank {MISSING}") in said

    library = compiled(tmp_path / "all_reduce", SIZE, "float32", "sum")
    for seed, form in enumerate(FORMS):
        ranks = Ranks(library, ExchangeLayout(SIZE, 64), beside=products)
        xs = [torch.randint(1, 9, (200,)).float() for _ in range(SIZE)]
        outs = [torch.full_like(x, float("nan")) for x in xs]
        for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
            launch(
                monkeypatch, ranks, rank, x, out, "sum", AllReduceConfig(form), 3000 if breaks else 100_000
            )
        ranks.run(random.Random(seed).randrange(1 << 30))
        right = [torch.equal(out, reference(xs, "sum")) for out in outs]
        assert right == [not breaks] * SIZE
        assert torch.equal(products.records[0], of_product), "the first wait is what is told"
        if not breaks:
            assert not ranks.records.any() and ranks.slots_are_empty()
            continue
        for rank in (1, 2):  # they miss what rank 0 has not sent, and say so
            written, where, peer, word, *_ = ranks.records[rank].tolist()
            assert (written, where, peer) == (1, ranks.places[rank].address, 0)
            assert "of rank 0" in ranks.layout.describe(word)
        ranks.faults[1:], ranks.records[1:] = 0, 0
