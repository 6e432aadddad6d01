"""Any arguments to register, put, get, signal and wait: it works, or an error names the argument."""

from __future__ import annotations

import re
from typing import Any

import torch
import values as v
from hypothesis import given
from hypothesis import strategies as st
from opcommon import world
from ranks import run_ranks
from weft import symm_mem

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
NAMES = r"tensors(\[\d\])?|group|registered|source|out|peer|(puts|signals)(\[\d\])?(: source|: peer)?"
SHAPE = (3, 4)

anything = st.one_of(v.junk, v.numbers)
some_tensor = st.builds(
    v.Tensor,
    st.lists(v.sizes, max_size=3).map(tuple),
    st.sampled_from((*v.FLOATS, "float64", "int32", "bool", "complex64", "uint8")),
    st.sampled_from(("contiguous", "transposed", "strided", "expanded", "offset", "grad")),
    v.seeds,
)
fitting = st.builds(
    v.Tensor,
    st.just(SHAPE),
    st.just("float32"),
    st.sampled_from(("contiguous", "transposed", "strided", "offset")),
    v.seeds,
)
some_group = st.one_of(v.groups, v.bad_groups, st.none())
some_peer = st.one_of(st.integers(0, RANKS), anything)
cases = st.one_of(
    st.tuples(
        st.just("register"),
        st.one_of(
            st.lists(some_tensor, max_size=4),
            st.lists(st.one_of(some_tensor, v.bad_tensors, anything), max_size=3),
            anything,
        ),
        some_group,
    ),
    st.tuples(st.just("unregister"), st.one_of(anything, st.lists(anything, max_size=2))),
    st.tuples(
        st.sampled_from(["put", "get"]), st.one_of(fitting, some_tensor, v.bad_tensors, anything), some_peer
    ),
    st.tuples(
        st.just("batch_put"),
        st.one_of(
            st.lists(
                st.tuples(st.booleans(), st.one_of(fitting, some_tensor, v.bad_tensors, anything), some_peer),
                max_size=3,
            ),
            anything,
            st.lists(anything, max_size=2),
        ),
    ),
    st.tuples(
        st.just("pairs"), st.one_of(st.lists(st.tuples(st.booleans(), some_peer), max_size=3), anything)
    ),
    st.tuples(st.sampled_from(["signal", "wait"]), some_peer),
)
_kept: list[symm_mem.RegisteredTensor] = []


def right_of(peer: Any, rank: int, size: int) -> tuple[Any, int]:
    """Whom this rank names, and who names this one, where ``peer`` is a distance."""
    if isinstance(peer, int) and not isinstance(peer, bool) and 0 <= peer < size:
        return (rank + peer) % size, (rank - peer) % size
    return peer, rank


def invoke(case: tuple[Any, ...], rank: int, size: int) -> None:
    what, *args = case
    (x,) = _kept
    if what == "register":
        registered = symm_mem.register(*args)
        for each in registered:
            there, here = right_of(1, rank, size)
            each.signal(here)
            out = each.get(torch.zeros(each.shapes[there], dtype=each.tensor.dtype), there)
            assert out.shape == each.shapes[there]
            each.wait(here)
        if registered:
            symm_mem.unregister(registered)
    elif what == "unregister":
        symm_mem.unregister(*args)
    elif what in ("put", "get"):
        local, peer = args
        there, here = right_of(peer, rank, size)
        x.signal(here)
        getattr(x, what)(local, there)
        x.wait(here)
    elif what == "pairs":
        pairs = args[0]
        if isinstance(pairs, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            among = [right_of(peer, rank, size)[0] for _, peer in pairs]
            pairs = [(x if known else None, peer) for (known, _), peer in zip(pairs, among, strict=True)]
        symm_mem.batch_signal(pairs)
        for _, peer in pairs:  # of two ranks, so that whom one lets lets it
            x.put(torch.full(SHAPE, 2.0), peer)
        symm_mem.batch_wait(pairs)
    elif what == "batch_put":
        puts = args[0]
        if isinstance(puts, list) and all(isinstance(put, tuple) and len(put) == 3 for put in puts):
            among = [right_of(peer, rank, size) for *_, peer in puts]
            puts = [
                (x if known else None, source, there)
                for (known, source, _), (there, _) in zip(puts, among, strict=True)
            ]
            for _, here in among:
                x.signal(here)
        symm_mem.batch_put(puts)
    else:
        there, here = right_of(args[0], rank, size)
        x.signal(there)
        x.put(torch.full(SHAPE, 1.0), here)
        getattr(x, what)(there)


def attempt(rank: int, size: int, case: tuple[Any, ...]) -> tuple[str, str]:
    """What symm_mem says. Whatever it says, a registered tensor goes on working."""
    if not _kept:
        _kept.extend(symm_mem.register([torch.zeros(SHAPE)], world()))
    kind, text = v.said_by(lambda: invoke(v.build(case, rank), rank, size))
    said = kind, re.sub(r"rank \d", "rank", text)  # each has another peer
    symm_mem.reset(world())  # a signal that was not used
    (x,) = _kept
    there, here = right_of(1, rank, size)
    x.signal(here)
    x.put(torch.full(SHAPE, float(rank)), there)
    x.wait(here)
    assert (x.tensor == here).all()
    return said


@v.SETTINGS
@given(cases)
def test_any_arguments_of_registered_tensors(case: tuple[Any, ...]) -> None:
    v.check_said(run_ranks(attempt, RANKS, case, env=ENV), NAMES, ("HeapUnavailable",))
