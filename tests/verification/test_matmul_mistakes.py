"""Mistakes in the kernels of the products that send by themselves: each of them is seen (matmul_ops.py)."""

from __future__ import annotations

import ctypes
import shutil

import pytest
from fibers import PATIENT, mistakes
from matmul_ops import GATHERS, SCATTERS, Gather, Op, Scatter, push, uses, wrong
from matmuls import SMALL, WIDE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DRAWN = "if (p.final && p.push) weft::wait_count(s.counts + SHARE, gridDim.x + 1);  // it draws no more"
LEFT = "if (p.final && threadIdx.x % 32 == 0) weft::leave(p.watch, p.buffer, epoch);"
# What must stand in the kernels' text, and what a mistake would look like there.
MISTAKES = {
    "gather-no-fence": ("__threadfence_system();\n        if (!more) continue;", "if (!more) continue;"),
    "gather-lanes-not-awaited": (
        "__syncwarp();\n        if (lane == 0) weft::set_count(sent, ++count);",
        "if (lane == 0) weft::set_count(sent, ++count);",
    ),
    "gather-posted-ahead": ("posted < there;", "posted <= there && index < order.chunks;"),
    "gather-flags-not-awaited": ("weft::fence_proxy_async();\n                __syncwarp();", ""),
    "gather-count-not-awaited": ("weft::wait_count(s.counts + ARRIVED, ++needed)", "++needed"),
    "gather-buffer-not-free": ("buffer.done + lane, epoch - 1", "buffer.done + lane, epoch - 2"),
    "gather-not-drained": ("    weft::drain(s, state);\n", ""),
    "gather-not-drained-quite": (
        "for (int i = 0; i < STAGES; ++i) {\n        wait(s.empty",
        "for (int i = 1; i < STAGES; ++i) {\n        wait(s.empty",
    ),
    "gather-left-before-loading": (
        f"load(p, s, order);\n            {DRAWN}\n            {LEFT}",
        f"{DRAWN}\n            {LEFT}\n            load(p, s, order);",
    ),
    "gather-shares-by-place": (
        "share = atomicAdd(p.watch.words + p.buffer.drawn, 1);",
        "share = blockIdx.x + pushed * gridDim.x;",
    ),
    "gather-shares-not-posted": ("weft::wait_count(s.counts + POSTED, pushed);", ""),
    "gather-left-before-drawing": (DRAWN, ""),
    "gather-split-other-part": ("i * weft::BK, src);", "i * weft::BK, src % 1);"),
    "returned-not-read": ("if (weft::elected()) weft::tma_stores_have_read();\n        __syncwarp();", ""),
    "returned-by-one-warpgroup": ("warp % 4 == 0 && warpgroup <", "warp == 0 && warpgroup <"),
    "returned-other-stage": ("next(t.column) {}", "next(t.column + 1) {}"),
    "two-instructions-same-columns": ("b + (B_BYTES_OF_FIRST >> 4)", "b"),
    "two-instructions-rows-as-columns": ("FIRST / 64 * 4096", "FIRST * 128"),
    "half-a-group-one-box": ("column + 64 * i,", "column,"),
    "scatter-not-awaited": ("if (!__any_sync(~0u, missing && there)) break;", "break;"),
    "scatter-not-emptied": ("if (i < count) store_vector(at(i), make_uint4(0, 0, 0, 0));", ""),
    "scatter-half-a-vector": ("v.x == 0 || v.y == 0 || v.z == 0 || v.w == 0", "v.x == 0 || v.z == 0"),
    "scatter-not-on-the-wire": ("ll_encode(make_uint4(", "(make_uint4("),
    "nans-on-the-wire": ("ll_encode(make_uint4(", "ll_decode(make_uint4("),
    "scatter-other-part-taken": ("(2 * t.index + warpgroup) * PART", "(2 * t.index + 1 - warpgroup) * PART"),
    "order-of-sums": ("if (i == RANK) {", "if (i == WORLD_SIZE - 1) {"),
    "scatter-not-drained": ("    weft::drain(s, state);\n", ""),
    "scatter-steps-by-place": (
        "if (draws()) drawn = atomicAdd(counter, 1);",
        "if (draws()) drawn = blockIdx.x / CLUSTER + queue.taken * (gridDim.x / CLUSTER);",
    ),
    "scatter-steps-not-set-back": ("watch.words[buffer.drawn] = 0;", ""),
    "scatter-left-before-taking": ("over = weft::read_count(s.counts + DRAINED) != 0 &&", "over = true ||"),
    "sum-other-factor": ("p.b[of], column", "p.b[0], column"),
    "sum-other-rows": ("p.a[of], rows", "p.a[0], rows"),
    "columns-of-another-rank": ("(SPLIT_N ? t.dst * p.n : 0)", "(SPLIT_N ? p.watch.rank * p.n : 0)"),
    "columns-rows-of-another-rank": ("SPLIT_N ? 0 : t.dst", "t.dst"),
    "staged-buffer-not-free": ("buffer.done + lane, epoch - 1", "buffer.done + lane, epoch - 2"),
    "staged-place-not-read": (
        "weft::wait_count(s.counts + SENT + warpgroup, sent);  // the staging memory has been read",
        "",
    ),
    "staged-other-step": ("tell(s, warpgroup, ++sent, t.step);", "tell(s, warpgroup, ++sent);"),
    "staged-sent-ahead": (
        "s.counts + STAGED + warpgroup, weft::read_count(sent) + 1)",
        "s.counts + STAGED + warpgroup, weft::read_count(sent))",
    ),
    "staged-lanes-not-awaited": (
        "weft::set_count(sent, weft::read_count(sent) + 1);\n        __syncwarp();",
        "weft::set_count(sent, weft::read_count(sent) + 1);",
    ),
    "staged-warps-not-awaited": (
        "weft::sync_warpgroup(warpgroup);\n    if (threadIdx.x % weft::GROUP != 0) return;",
        "if (threadIdx.x % weft::GROUP != 0) return;",
    ),
    "to-all-part-for-sum": ("+ (t.dst == src ? WORLD_SIZE - 1 : 0)", ""),
    "to-all-one-receiver": ("i < WORLD_SIZE; ++i) send(", "i < 2; ++i) send("),
}


MOST_TURNS = 120_000_000  # five times what any of these takes without a mistake
# What shows only where a block finds no room beside other kernels.
CROWDED: dict[str, Op] = {
    "gather-shares-by-place": Gather(2, 147, (72,), 264, push(WIDE, 0, 1)),
    "gather-shares-not-posted": Gather(2, 147, (72,), 264, push(WIDE, 0, 1)),
    "scatter-steps-by-place": Scatter(2, 67, 136, 72),
}


def may_show(mistake: str) -> Op:
    if mistake in CROWDED:
        return CROWDED[mistake]
    if mistake.startswith("two-instructions"):
        return GATHERS["two-instructions-rows" if "rows" in mistake else "two-instructions"]
    if mistake.startswith("half-a-group"):
        return GATHERS["half-a-group"]
    if mistake.startswith("returned"):
        return GATHERS["returned-odd-rows"]
    if mistake.startswith("to-all"):
        return SCATTERS["to-all-3"]
    if mistake.startswith("nans"):
        return SCATTERS["nans"]
    if mistake.startswith("order"):
        return SCATTERS["order-of-ranks"]
    if mistake.startswith("sum"):
        return SCATTERS["sum"]
    if mistake.startswith("columns"):
        return SCATTERS["columns"]
    if mistake.startswith("staged"):
        return SCATTERS["two-blocks"]
    if mistake.startswith("scatter"):
        return Scatter(2, 67, 200, 72)
    if mistake.startswith("gather-not-drained"):  # all stages are under way at once
        return Gather(2, 33, (8,), 128, push(SMALL, 0, 1))
    # Little to multiply until rows come.
    return Gather(2, 147, (8,), 264, push(WIDE, 0, 1, split_k="split" in mistake), blocks=2)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """What the tests to come need is compiled while those before them run."""
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            mistake = item.callspec.params["mistake"]
            may_show(mistake).compiled(MISTAKES[mistake])


@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 12))
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = may_show(mistake)
    library = op.compiled(MISTAKES[mistake]).result()
    library.library.allow(ctypes.c_long(MOST_TURNS))
    room = int(mistake in CROWDED)

    def shows(seed: int) -> bool:
        # What is lost is waited for in vain.
        try:
            return bool(wrong(op, uses(op, monkeypatch, library, seed, polls=PATIENT // 20, room=room)))
        except AssertionError as e:  # warps of a block that wait for each other
            return "a launch does not end" in str(e)

    assert any(map(shows, range(40)))
