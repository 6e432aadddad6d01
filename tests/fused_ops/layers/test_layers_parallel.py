"""Each rank's output and gradients of a parallel layer are its parts of those of one nn.Linear in float64."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opcommon import world
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.nn import functional as F
from weft.fused_ops.layers.linear import ColumnParallelLinear, RowParallelLinear

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative, in norm

WORLD_SIZES = [1, 2, 3, 4]
IN, OUT, SEQUENCE = 13, 7, 5  # odd, and the sequence and the features that are cut: so much a rank


def seeded(seed: int) -> None:
    """The same numbers on every rank, and NaN in memory that nobody has written."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def shapes(sequence: int, columns: int) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """A shape, which dimension is the sequence, and whether the layer is sequence-parallel."""
    for sequence_parallel in (True, False):
        yield (sequence, columns), 0, sequence_parallel
        yield (sequence, 3, columns), 0, sequence_parallel
        yield (3, sequence, columns), 1, sequence_parallel
        yield (1, sequence, columns), -2, sequence_parallel
    yield (columns,), 0, False


def own(whole: Tensor, rank: int, world_size: int, dim: int | None) -> Tensor:
    return whole if dim is None else whole.chunk(world_size, dim)[rank]


def compare(what: str, got: Tensor | None, wanted: Tensor, plain: Tensor | None = None) -> None:
    """``plain``: what nn.Linear makes of it in the same dtype, where that may be off by more than the limit, too."""
    assert got is not None, f"{what}: is missing"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    error = off(got, wanted)
    allowed = max(LIMIT[got.dtype], 0.0 if plain is None else 1.5 * off(plain, wanted))
    assert error <= allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.2e}"


class Whole:
    """One nn.Linear, its input and the gradient of its output, and in float64 what they give."""

    def __init__(self, n_in: int, n_out: int, bias: bool, shape: tuple[int, ...]) -> None:
        self.has_bias = bias
        self.linear = nn.Linear(n_in, n_out, bias=bias)
        self.x = torch.randn(shape)
        self.grad = torch.randn(*shape[:-1], n_out)
        self.reference = copy.deepcopy(self.linear).double()
        self.x64 = self.x.double().requires_grad_()
        self.y64 = self.reference(self.x64)
        self.y64.backward(self.grad.double())

    def check(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        cut_in: int | None,
        cut_out: int | None,
        cut_bias: int | None,
    ) -> None:
        """``cut_...``: the dimension along which each rank has its part of the input, output, bias."""
        rank, size = dist.get_rank(), dist.get_world_size()
        part = layer.shard_dim
        x = own(self.x, rank, size, cut_in).clone().requires_grad_()
        y = layer(x)
        y.backward(own(self.grad, rank, size, cut_out))
        where = f"{layer}, x {tuple(x.shape)}: "
        assert self.x64.grad is not None
        assert self.reference.weight.grad is not None
        compare(where + "y", y, own(self.y64, rank, size, cut_out))
        compare(where + "x.grad", x.grad, own(self.x64.grad, rank, size, cut_in))
        compare(where + "weight.grad", layer.weight.grad, own(self.reference.weight.grad, rank, size, part))
        assert (layer.bias is None) == (not self.has_bias)
        if self.has_bias:
            assert self.reference.bias.grad is not None
            compare(where + "bias.grad", layer.bias.grad, own(self.reference.bias.grad, rank, size, cut_bias))


def column(rank: int, world_size: int, seed: int) -> None:
    seeded(seed)
    for shape, dim, sequence_parallel in shapes(SEQUENCE * world_size, IN):
        for bias in (True, False):
            for gather in (False, True):
                whole = Whole(IN, OUT * world_size, bias, shape)
                layer = ColumnParallelLinear.from_linear(
                    whole.linear,
                    None,
                    sequence_parallel=sequence_parallel,
                    sequence_dim=dim,
                    gather_output=gather,
                )
                whole.check(layer, dim if sequence_parallel else None, None if gather else -1, 0)


def row(rank: int, world_size: int, seed: int) -> None:
    seeded(seed)
    n_in = IN * world_size
    for shape, dim, sequence_parallel in shapes(SEQUENCE * world_size, n_in):
        for bias in (True, False):
            for parallel in (True, False):
                whole = Whole(n_in, OUT, bias, shape)
                layer = RowParallelLinear.from_linear(
                    whole.linear,
                    dist.group.WORLD,
                    sequence_parallel=sequence_parallel,
                    sequence_dim=dim,
                    input_is_parallel=parallel,
                )
                whole.check(layer, -1 if parallel else None, dim if sequence_parallel else None, None)


class Pair(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def pair(rank: int, world_size: int, seed: int, compiled: bool) -> None:
    """Two layers drawn, not converted: ranks that are seeded alike get the parts of the same nn.Linear."""
    hidden, shape = OUT * world_size, (3, SEQUENCE * world_size, IN)
    for dtype, sequence_parallel in product(LIMIT, (True, False)):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": 1, "dtype": dtype}
        seeded(seed)
        model: nn.Module = Pair(
            ColumnParallelLinear(IN, hidden, group=None, **options),
            RowParallelLinear(hidden, IN, group=None, **options),
        )
        seeded(seed)
        plain = Pair(nn.Linear(IN, hidden, dtype=dtype), nn.Linear(hidden, IN, dtype=dtype))
        nn.init.zeros_(plain.get_parameter("down.bias"))
        whole = deepcopy(plain).double()
        x, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        x64 = x.double().requires_grad_()
        y64 = whole(x64)
        y64.backward(grad.double())
        plain(x).backward(grad)

        cut = 1 if sequence_parallel else None
        mine = own(x, rank, world_size, cut).clone().requires_grad_()
        y = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(mine)
        y.backward(own(grad, rank, world_size, cut))
        where = f"{dtype}, sequence_parallel={sequence_parallel}: "
        compare(where + "y", y, own(y64, rank, world_size, cut))
        assert x64.grad is not None
        compare(where + "x.grad", mine.grad, own(x64.grad, rank, world_size, cut))
        cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}
        for name, parameter in model.named_parameters():
            wanted, theirs = (p.get_parameter(name).grad for p in (whole, plain))
            assert wanted is not None and theirs is not None
            parts = [own(grad, rank, world_size, cuts[name]) for grad in (wanted, theirs)]
            # A sum of a few rounded numbers that nearly cancel: alone of all these it is above the limit at times.
            compare(where + name + ".grad", parameter.grad, *parts[: 2 if name == "up.bias" else 1])


def whole_at_both_ends(rank: int, world_size: int, seed: int) -> None:
    """Layers whose result, or input, is whole on every rank can be compiled in one graph, too."""
    for sequence_parallel in (True, False):
        seeded(seed)
        torch._dynamo.reset()
        cut = 0 if sequence_parallel else None
        up, down = Whole(IN, OUT * world_size, True, (SEQUENCE * world_size, IN)), None
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        layer: Any = ColumnParallelLinear.from_linear(up.linear, None, gather_output=True, **options)
        layer.compile(backend="aot_eager", fullgraph=True)
        up.check(layer, cut, None, 0)
        down = Whole(IN * world_size, OUT, True, (SEQUENCE * world_size, IN * world_size))
        layer = RowParallelLinear.from_linear(down.linear, None, input_is_parallel=False, **options)
        layer.compile(backend="aot_eager", fullgraph=True)
        down.check(layer, None, cut, None)


def autocast(rank: int, world_size: int, seed: int, compiled: bool) -> None:
    """Dtypes are those of nn.Linear, and so is the result; what comes in may have been cast before."""
    hidden = OUT * world_size
    for sequence_parallel, dtype in product((True, False), (torch.float32, torch.bfloat16)):
        seeded(seed)
        whole = Pair(nn.Linear(IN, hidden), nn.Linear(hidden, IN))
        x, grad = torch.randn(SEQUENCE * world_size, IN, dtype=dtype), torch.randn(SEQUENCE * world_size, IN)
        cut, options = 0 if sequence_parallel else None, {"sequence_parallel": sequence_parallel}
        model: nn.Module = Pair(
            ColumnParallelLinear.from_linear(whole.up, None, **options),
            RowParallelLinear.from_linear(whole.down, None, **options),
        )
        mine = own(x, rank, world_size, cut).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(mine)
            assert whole(x).dtype == y.dtype == torch.bfloat16
        y.backward(own(grad, rank, world_size, cut).to(y.dtype))
        plain, x_plain = deepcopy(whole), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y_plain = plain(x_plain)
        y_plain.backward(grad.to(y_plain.dtype))
        x64 = x.double().requires_grad_()
        y64 = whole.double()(x64)
        y64.backward(grad.double())
        assert mine.grad is not None and mine.grad.dtype == dtype
        cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}
        compared: list[tuple[str, int | None, Any, Any, Any]] = [
            ("y", cut, y, y_plain, y64),
            ("x.grad", cut, mine.grad, x_plain.grad, x64.grad),
        ]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            theirs, wanted = plain.get_parameter(name).grad, whole.get_parameter(name).grad
            compared.append((name, cuts[name], parameter.grad, theirs, wanted))
        for name, dim, got, theirs, wanted in compared:
            # nn.Linear's own error under autocast says how far off such small sums of rounded numbers may be.
            allowed = 3 * off(theirs, wanted) + LIMIT[torch.bfloat16]
            error = off(got, own(wanted, rank, world_size, dim))
            assert error <= allowed, f"{dtype}, {options}: {name}: {error:.2e}, allowed {allowed:.2e}"


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.norm())


def frozen(rank: int, world_size: int, seed: int) -> None:
    """What needs no gradient gets none, and what does gets it right all the same."""
    seeded(seed)
    linear = nn.Linear(IN * world_size, OUT)
    linear.weight.requires_grad_(False)
    layer = RowParallelLinear.from_linear(linear.eval(), None, sequence_parallel=True)
    assert not layer.training
    layer(torch.randn(SEQUENCE * world_size, IN)).sum().backward()
    assert layer.weight.grad is None
    rows = torch.full((OUT,), float(SEQUENCE * world_size), dtype=torch.float64)
    compare("bias.grad", layer.bias.grad, rows)
    with torch.no_grad():
        options: dict[str, Any] = {"gather_output": True, "sequence_parallel": True}
        whole = ColumnParallelLinear(IN, OUT * world_size, group=None, **options)
        assert whole(torch.randn(SEQUENCE, IN)).shape == (SEQUENCE * world_size, OUT * world_size)


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"out_features: is 7, must be a multiple of 2 ranks"):
        ColumnParallelLinear(4, 7, group=None)
    with pytest.raises(ValueError, match=r"in_features: is 7, must be a multiple of 2 ranks"):
        RowParallelLinear.from_linear(nn.Linear(7, 4), None)
    with pytest.raises(TypeError, match=r"linear: is Bilinear, must be an nn.Linear"):
        RowParallelLinear.from_linear(nn.Bilinear(2, 2, 2), None)  # type: ignore[arg-type]
    sharded = distribute_module(nn.Linear(4, 4), DeviceMesh.from_group(world(), "cpu"))
    with pytest.raises(TypeError, match=r"^linear.weight: is a DTensor, must be whole on every rank"):
        ColumnParallelLinear.from_linear(sharded, None)
    for option in ({"bias": False}, {"dtype": torch.float16}, {"device": "cpu"}):  # as linear has it
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{next(iter(option))}'"):
            ColumnParallelLinear.from_linear(nn.Linear(4, 4), None, **option)
    cut: dict[str, Any] = {"sequence_parallel": True}
    with pytest.raises(ValueError, match=r"sequence_dim: is 1, must be .* before the last of the 2-D"):
        ColumnParallelLinear(4, 4, group=None, sequence_dim=1, **cut)(torch.ones(3, 4))
    with pytest.raises(ValueError, match="sequence_dim: is -1"):
        RowParallelLinear(4, 4, group=None, sequence_dim=-1, **cut)(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match=r"^x: has size 3 in dimension 0, the sequence, .* multiple of 2"):
        RowParallelLinear(4, 4, group=None, **cut)(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^x: has size 5 in dimension 1, the sequence"):
        RowParallelLinear(4, 4, group=None, sequence_dim=-2, bias=False, **cut)(torch.ones(2, 5, 2))
    with pytest.raises(ValueError, match="x: has 2 columns, must have 4"):
        RowParallelLinear(4, 4, group=None, input_is_parallel=False)(torch.ones(4, 2))
    layer = ColumnParallelLinear(4, 6, group=None, bias=False, device="meta")
    assert layer.weight.is_meta
    assert layer.weight.shape == (3, 4)
    with pytest.raises(ValueError, match="x: lies on cpu, must lie on meta like the weight"):
        layer(torch.ones(2, 4))
    assert copy.deepcopy(layer).group == layer.group
    assert f"rank {rank} of 2" in repr(layer)


@on_ranks(2)
def test_refused_dtypes(rank: int, world_size: int) -> None:
    supported = "must be float32, bfloat16 or float16$"
    layers: list[tuple[type[ColumnParallelLinear | RowParallelLinear], dict[str, Any]]]
    layers = [
        (ColumnParallelLinear, {"gather_output": True}),
        (RowParallelLinear, {"input_is_parallel": False}),
    ]
    for (cls, whole), sequence_parallel, joined in product(layers, (True, False), (True, False)):
        layer = cls(4, 4, group=None, sequence_parallel=sequence_parallel, **(whole if joined else {}))
        columns = 2 if cls is RowParallelLinear and not joined else 4
        for dtype in (torch.int64, torch.float64, torch.complex64, torch.bool):
            x = torch.ones(4, columns, dtype=dtype)
            with pytest.raises(TypeError, match=f"^x: is {dtype}, must be torch.float32 like the weight"):
                layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                with pytest.raises(TypeError, match=f"^x: is {dtype}, {supported}"):
                    layer(x)
                with pytest.raises(RuntimeError):  # as of nn.Linear
                    nn.Linear(columns, 4)(x)
        layer.double()
        for autocast in (True, False):
            late = pytest.raises(TypeError, match=f"^weight: is torch.float64, {supported}")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), late:
                layer(torch.ones(4, columns, dtype=torch.float64))
        with pytest.raises(TypeError, match=f"^dtype: is torch.float64, {supported}"):
            cls(4, 4, group=None, dtype=torch.float64)
        with pytest.raises(TypeError, match=f"^linear.weight: is torch.float64, {supported}"):
            cls.from_linear(nn.Linear(4, 4, dtype=torch.float64), None)
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(
                TypeError, match=f"^dtype: is None, torch's default, torch.float64, {supported}"
            ):
                cls(4, 4, group=None)
            assert cls(4, 4, group=None, dtype=torch.float32).weight.dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_column_parallel(world_size: int) -> None:
    run_ranks(column, world_size, secrets.randbits(32))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_row_parallel(world_size: int) -> None:
    run_ranks(row, world_size, secrets.randbits(32))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pair(world_size: int) -> None:
    run_ranks(pair, world_size, secrets.randbits(32), False)


def test_pair_in_one_compiled_graph() -> None:
    run_ranks(pair, 2, secrets.randbits(32), True)


def test_whole_at_both_ends_in_one_compiled_graph() -> None:
    run_ranks(whole_at_both_ends, 2, secrets.randbits(32))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(compiled: bool) -> None:
    run_ranks(autocast, 2, secrets.randbits(32), compiled)


def test_frozen() -> None:
    run_ranks(frozen, 3, secrets.randbits(32))
