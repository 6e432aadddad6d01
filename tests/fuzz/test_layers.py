"""Any options of the layers: the function of nn.Linear, or an error that names the argument."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from opcommon import BOUND, check, world
from ranks import run_ranks
from torch import nn
from weft.fused_ops import ColumnParallelLinear, RowParallelLinear, one_shot_all_reduce

sys.path.insert(0, str(Path(__file__).parent))
import values as v

RANKS = 2
ENV = {"WEFT_TIMEOUT": "20"}
NAMES = (
    "in_features|out_features|group|bias|sequence_parallel|sequence_dim|device|dtype|gather_output|input_is_parallel|"
    "x|linear"
)
# What an input can be wrong in is told by the op that takes it.
NAMES_OF_OPS = r"A_shard|A|B|Bs\[0\]|gather_dim|scatter_dim"


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], Any]:
    """A layer, its options, and the whole input."""
    kind = draw(st.sampled_from(("column", "row")))
    options: dict[str, Any] = {
        "in_features": RANKS * draw(st.integers(1, 4)),
        "out_features": RANKS * draw(st.integers(1, 4)),
        "group": draw(v.groups),
        "bias": draw(st.booleans()),
        "sequence_parallel": draw(st.booleans()),
        "sequence_dim": draw(st.sampled_from((0, 1, -2, -3))),
        "dtype": draw(st.sampled_from((torch.float32, torch.bfloat16))),
        "device": draw(st.sampled_from(("cpu", None))),
        "gather_output" if kind == "column" else "input_is_parallel": draw(st.booleans()),
    }
    x: Any = v.Tensor((2 * RANKS, RANKS, options["in_features"]), str(options["dtype"])[6:])
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.sampled_from((*options, "x")))
        if which == "x":
            x = draw(st.one_of(v.bad_tensors, v.junk))
        elif which == "group":
            options["group"] = draw(v.bad_groups)
        elif which in ("dtype", "device"):
            options[which] = draw(st.sampled_from([torch.float64, torch.int32, "x", "bogus", 3.5, ()]))
        else:  # 2**31 could be had, with gigabytes
            options[which] = draw(st.one_of(v.junk, v.numbers.filter(lambda n: n != 2**31)))
    return kind, options, x


def own(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return x.chunk(size, dim)[rank]


def parts_of(x: Any, dim: int | None, rank: int, size: int) -> tuple[Any, Any]:
    """This rank's part of x along ``dim``, and x; where it has no such parts x is one itself, the same on all ranks."""
    if dim is None or not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return x, x
    if not -x.dim() <= dim < x.dim():
        return x, x
    if x.shape[dim] % size == 0:
        return own(x, dim, rank, size), x
    return x, torch.cat([x] * size, dim)


def invoke(kind: str, options: dict[str, Any], x: Any, rank: int, size: int) -> None:
    """The layer on this rank's part of x, against nn.Linear on the whole of it."""
    torch.manual_seed(5)
    layer = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind](**options)
    dim, parallel = options["sequence_dim"], options["sequence_parallel"]
    split = dim if kind == "column" and parallel else None
    if kind == "row" and options["input_is_parallel"]:
        split = -1
    mine, x = parts_of(x, split, rank, size)
    y = layer(mine)
    if x.device.type == "meta":
        return
    torch.manual_seed(5)
    whole = nn.Linear(
        options["in_features"], options["out_features"], options["bias"], options["device"], options["dtype"]
    )
    if kind == "row" and options["bias"]:
        nn.init.zeros_(whole.bias)
    want = whole.double()(x.double())
    if kind == "column" and not options["gather_output"]:
        want = own(want, -1, rank, size)
    if kind == "row" and parallel:
        want = own(want, dim, rank, size)
    check("layer", y.detach(), want.detach(), 4 * BOUND[y.dtype], [want.detach(), torch.ones_like(want)])


def attempt(rank: int, size: int, kind: str, options: dict[str, Any], x: Any) -> tuple[str, str]:
    said = v.said_by(lambda: invoke(kind, v.build(options, rank), v.build(x, 0), rank, size))
    assert one_shot_all_reduce(torch.ones(3), "sum", world()).tolist() == [size] * 3
    return said


@v.SETTINGS
@given(cases())
def test_any_options(case: tuple[str, dict[str, Any], Any]) -> None:
    v.check_said(run_ranks(attempt, RANKS, *case, env=ENV), rf"{NAMES}|{NAMES_OF_OPS}")
