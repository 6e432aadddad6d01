"""What the fuzzer gives to functions: arguments that fit, some of them exchanged for ones that do not.

A case is plain data, drawn in the test's process and sent to the ranks, where `build` makes the arguments of it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only
from weft import fused_ops

#: Cases of each test; `make fuzz` takes many.
EXAMPLES = int(os.environ.get("WEFT_FUZZ", "60"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Tensor:
    """A tensor to be made: sizes, dtype, and how it lies in memory. Ranks get different numbers of the same seed."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    seed: int = 0

    def make(self, rank: int) -> torch.Tensor:
        dtype, shape = getattr(torch, self.dtype), self.shape
        if self.layout == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)

        def numbers(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(dtype)

        if self.layout == "sparse":
            return numbers(*shape).to_sparse()
        if self.layout == "transposed" and len(shape) > 1:
            return numbers(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        if self.layout == "strided" and shape:
            return numbers(*shape[:-1], 2 * shape[-1])[..., ::2]
        if self.layout == "expanded" and shape:
            return numbers(1, *shape[1:]).expand(shape)
        if self.layout == "offset":
            count = int(torch.Size(shape).numel())
            return numbers(count + 1)[1:].view(shape)
        made = numbers(*shape)
        return made.requires_grad_() if self.layout == "grad" and made.dtype.is_floating_point else made


@dataclass(frozen=True)
class Group:
    """The group of all ranks, in one of the ways of saying so, or something that is no group."""

    kind: str

    def make(self) -> Any:
        if self.kind == "name":
            return dist.group.WORLD.group_name
        if self.kind == "group":
            return dist.group.WORLD
        mesh = _mesh()
        return {
            "mesh": mesh,
            "dim": (mesh, 0),
            "dim name": (mesh, "tp"),
            "no such dim": (mesh, 5),
            "no such dim name": (mesh, "nobody"),
            "dim of the wrong type": (mesh, 1.5),
            "no mesh": (3, 0),
            "long tuple": (mesh, 0, 0),
            "plane": _plane(),
        }[self.kind]


_meshes: dict[str, DeviceMesh] = {}


def _mesh() -> DeviceMesh:
    if "line" not in _meshes:
        _meshes["line"] = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))
    return _meshes["line"]


def _plane() -> DeviceMesh:
    if "plane" not in _meshes:
        _meshes["plane"] = DeviceMesh("cpu", [list(range(dist.get_world_size()))])
    return _meshes["plane"]


def build(value: Any, rank: int) -> Any:
    """``value`` with tensors and groups made."""
    if isinstance(value, Tensor):
        return value.make(rank)
    if isinstance(value, Group):
        return value.make()
    if isinstance(value, (list, tuple)):
        return type(value)(build(v, rank) for v in value)
    if isinstance(value, dict):
        return {k: build(v, rank) for k, v in value.items()}
    return value


def said_by(call: Callable[[], object]) -> tuple[str, str]:
    """How a call with any arguments ends: the error's type and text, or "fine". A wrong result is not taken."""
    try:
        call()
    except AssertionError:
        raise
    except Exception as e:
        return type(e).__name__, str(e).split(", only ")[0]  # then come the groups that this rank has
    return "fine", ""


def check_said(said: list[tuple[str, str]], names: str, others: tuple[str, ...] = ()) -> None:
    """All ranks say the same: "fine", one of ``others``, or what is wrong with an argument of these names."""
    assert said[0] == said[1], f"the ranks say different things: {said}"
    kind, text = said[0]
    if kind not in ("fine", *others):
        assert kind in ("ValueError", "TypeError"), said[0]
        assert re.match(rf"({names}): ", text), f"names no argument: {said[0]}"


def invoke(op: str, args: dict[str, Any]) -> Any:
    return getattr(fused_ops, op)(**args)


def outcome(call: Callable[[], Any]) -> tuple[str, Any, Any]:
    """An error's type and text, or "fine" and what a fake result must tell rightly; and the result."""
    try:
        got = call()
    except Exception as e:
        return type(e).__name__, str(e).replace("FakeTensor", "Tensor"), None
    return "fine", _described(got), got


def _described(value: Any) -> Any:
    """Strides where they mean something."""
    if isinstance(value, torch.Tensor):
        strides = (
            [s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1] if value.numel() else []
        )
        return tuple(value.shape), strides, value.dtype, value.requires_grad
    return [_described(x) for x in value] if isinstance(value, (list, tuple)) else value


def fake_outcome(call: Callable[[Any], Any], given: Any) -> tuple[str, Any]:
    """Of a call with fake tensors in place of those that are given. Whatever it says, the next call is right."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it tells of every refusal
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, given)
        said = outcome(lambda: call(fakes))[:2]
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((7,), float(rank))
    assert fused_ops.one_shot_all_reduce(x, "sum", None).tolist() == [float(sum(range(size)))] * 7
    return said


def check_alike(said: list[tuple[Any, Any]], names: Iterable[str]) -> None:
    """What each rank says to real and to fake tensors: a result, or what is wrong with one of these arguments."""
    for real, fake in said:
        assert fake == real, f"fake tensors say {fake}, real ones {real}"
        if real[0] != "fine":
            check_said([real, real], rf"({'|'.join(names)})(\[\d+\])?")


sizes = st.integers(0, 6)
seeds = st.integers(0, 10**6)
dtypes = st.sampled_from(FLOATS)
layouts = st.sampled_from(("contiguous", "transposed", "strided", "expanded", "offset", "grad"))
groups = st.sampled_from([Group(k) for k in ("name", "group", "mesh", "dim", "dim name")])
bad_groups = st.sampled_from(
    ["nobody", "", 3, 1.5, (), [], b"0", object]
    + [
        Group(k)
        for k in (
            "no such dim",
            "no such dim name",
            "dim of the wrong type",
            "no mesh",
            "long tuple",
            "plane",
        )
    ]
)
#: No tensor, no number that a dimension could be, and no name of an operation.
junk = st.sampled_from([None, "x", "", 1.5, float("nan"), (), [[1.0]], {}, b"sum", object, 1 + 2j])
numbers = st.sampled_from([-(2**63), -(2**31), -7, -1, 0, 1, 2, 5, 2**31, 2**63, 2**70, True, False])
bad_tensors = st.builds(
    Tensor,
    st.lists(sizes, max_size=4).map(tuple),
    st.sampled_from((*FLOATS, "float64", "int32", "bool", "complex64", "uint8")),
    st.sampled_from(("contiguous", "transposed", "meta", "sparse")),
    seeds,
)
