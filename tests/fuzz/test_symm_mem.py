"""Any arguments to symm_mem: it works, or an error names the argument; the heap goes on working."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from opcommon import world
from ranks import run_ranks
from weft import symm_mem
from weft.symm_mem.heap.heap import heap_of
from weft.symm_mem.heap.registry import get_heap

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
NAMES = "shape|dtype|group|device|tensor|peer|channel|seconds|on"

some_channel = st.one_of(st.integers(0, 17), st.one_of(v.junk, v.numbers))
anything = st.one_of(v.junk, v.numbers)
some_group = st.one_of(v.groups, v.bad_groups, st.none())
some_size = st.one_of(
    st.integers(0, 50), st.integers(0, 50), st.sampled_from([-1, 1.5, "3", None, [2], 2**70])
)
some_dtype = st.sampled_from(
    [None, torch.float32, torch.bfloat16, torch.int64, torch.bool, "float32", 3, float]
)
some_device = st.sampled_from([None, "cpu", torch.device("cpu"), "meta", "bogus", 3, 1.5, ()])
# A view of a [6, 8] tensor on the heap.
some_view = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 3)),
    st.sampled_from(["empty view", "transposed", "whole", "elsewhere", "no tensor", "other dtype"]),
)
cases = st.one_of(
    st.tuples(st.just("empty"), st.lists(some_size, max_size=3), some_dtype, some_group, some_device),
    st.tuples(st.just("rendezvous"), some_view, st.one_of(st.none(), some_group)),
    st.tuples(
        st.just("signal"),
        st.one_of(st.integers(0, 2 * RANKS), anything),
        st.one_of(st.integers(0, 17), anything),
    ),
    st.tuples(st.just("barrier"), st.one_of(st.integers(0, 17), anything)),
    st.tuples(
        st.just("set_timeout"),
        st.one_of(anything, st.floats(), st.sampled_from([torch.ones(()), torch.ones(2)])),
        some_group,
    ),
    st.tuples(st.sampled_from(["get_timeout", "group_name", "resolve_group", "reset"]), some_group),
    st.tuples(st.sampled_from(["heap", "unavailable"]), some_group, some_device),
    st.tuples(st.just("heap_of"), st.one_of(anything, v.bad_tensors)),
    st.tuples(st.just("set_checked"), st.sampled_from([False, None, "x", 3])),
)


ON_HEAP: dict[str, Any] = {"heap": get_heap, "heap_of": heap_of}


def view(kind: Any, whole: torch.Tensor) -> Any:
    if isinstance(kind, tuple):
        row, column, step = kind
        return whole[row:, column::step]
    return {
        "empty view": whole[3:3],
        "transposed": whole.t(),
        "whole": whole,
        "elsewhere": torch.ones(3),
        "no tensor": 7,
        "other dtype": whole.view(torch.int16),
    }[kind]


def invoke(case: tuple[Any, ...], rank: int, size: int, kept: torch.Tensor) -> None:
    what, *args = case
    if what == "empty":
        sizes, dtype, group, device = args
        made = symm_mem.empty(sizes, dtype=dtype, group=group, device=device)
        assert made.shape == tuple(sizes) and made.is_contiguous()
        made.fill_(1)
        symm_mem.rendezvous(made)
    elif what == "rendezvous":
        mine = view(args[0], kept)
        peers = symm_mem.rendezvous(mine, args[1])
        assert len(peers.tensors) == size
        for peer, theirs in enumerate(peers.tensors):
            want = view(args[0], torch.full_like(kept, float(peer)))
            assert theirs.stride() == mine.stride() and torch.equal(theirs, want)
    elif what == "signal":
        peer, channel = args
        peers = symm_mem.rendezvous(kept)
        ring = isinstance(peer, int) and 0 <= peer < size
        peers.put((rank + peer) % size if ring else peer, channel)
        peers.wait((rank - peer) % size if ring else peer, channel)
    elif what == "barrier":
        symm_mem.rendezvous(kept).barrier(*args)
    else:
        ON_HEAP.get(what, getattr(symm_mem, what, None))(*args)


_kept: list[torch.Tensor] = []


def attempt(rank: int, size: int, case: tuple[Any, ...]) -> tuple[str, str]:
    """What symm_mem says. Whatever it says, a tensor on the heap is as before and its signals go on."""
    if not _kept:
        _kept.append(symm_mem.empty(6, 8, group=world()).fill_(float(rank)))
        symm_mem.rendezvous(_kept[0]).barrier()
    said = v.said_by(lambda: invoke(v.build(case, rank), rank, size, _kept[0]))
    symm_mem.set_timeout(20, world())
    peers = symm_mem.rendezvous(_kept[0])
    peers.barrier()
    for peer, theirs in enumerate(peers.tensors):
        assert (theirs == peer).all(), f"{case}: the tensor of rank {peer} was changed"
    peers.barrier()
    return said


@v.SETTINGS
@given(cases)
def test_any_arguments(case: tuple[Any, ...]) -> None:
    said = run_ranks(attempt, RANKS, case, env=ENV)
    assert said[0] == said[1], f"the ranks say different things: {said}"
    kind, text = said[0]
    if kind == "WeftError":
        assert text.startswith("grow the heap by"), text  # more than there is
    elif kind not in ("fine", "HeapUnavailable"):
        assert kind in ("ValueError", "TypeError"), said[0]
        assert re.match(rf"({NAMES}): ", text), f"names no argument: {said[0]}"
