"""How long nodes of a graph take by the table of costs: ops of weft on CUDA as their plans predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import c10d
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weft.fused_ops import plan
from weft.fused_ops.passes.order.costs import TABLES, kernel_time, transfer_time
from weft.fused_ops.passes.order.transports import NVLINK, WEFT
from weft.kernels.all_reduce.configs import estimate_all_reduce_us
from weft.kernels.device.comm.exchange_time import estimate_all_gather_us, estimate_reduce_scatter_us

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CUDA = TABLES["cuda"]
M, K, N, NAME = 2048, 4096, 3072, "0"
OPS = torch.ops.weft
Shapes = tuple[tuple[int, ...], ...]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the plans of a GPU that is there are its own"),
    pytest.mark.usefixtures("two"),
]


def node_of(
    fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16, device: str = "cuda"
) -> fx.Node:
    """The first node of a graph that calls an op of weft, or a collective."""
    with FakeTensorMode(), torch.no_grad():
        graph = make_fx(fn)(*(torch.empty(s, dtype=dtype, device=device) for s in shapes)).graph
    return next(n for n in graph.nodes if n.op == "call_function" and "wait" not in n.name)


CALLS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "all_reduce": (lambda x: OPS.one_shot_all_reduce(x, "sum", NAME), ((M, K),)),
    "all_reduce in place": (lambda x: OPS.one_shot_all_reduce_(x, "sum", NAME), ((3,),)),
    "all_gather": (lambda x: OPS.one_shot_all_gather(x, 1, NAME), ((M, K),)),
    "all_gather into": (lambda y, x: OPS.one_shot_all_gather_out(y, x, 0, NAME), ((2 * M, K), (M, K))),
    "reduce_scatter": (lambda x: OPS.one_shot_reduce_scatter(x, "sum", 0, NAME), ((M, K),)),
    "rms_norm": (
        lambda x, r, w: OPS.fused_all_reduce_rms_norm(x, r, w, 1e-5, NAME),
        ((8, M, K), (8, M, K), (K,)),
    ),
    "layer_norm": (lambda x: OPS.fused_all_reduce_layer_norm(x, None, None, None, 1e-5, NAME), ((64, K),)),
    "few rows": (lambda a, b: OPS.fused_matmul_all_reduce(a, b, "sum", NAME), ((4, K), (K, N))),
    "two kernels": (lambda a, b: OPS.fused_matmul_all_reduce(a, b, "sum", NAME), ((64, K), (K, N))),
    "matmul_all_reduce": (lambda a, b: OPS.fused_matmul_all_reduce(a, b, "sum", NAME), ((2, M, K), (K, N))),
    "gather": (lambda a, b: OPS.fused_all_gather_matmul(a, [b], 0, NAME, return_A=False), ((M, K), (K, N))),
    "gathered A": (lambda a, b: OPS.fused_all_gather_matmul(a, [b], 0, NAME), ((2, 64, K), (K, N))),
    "gather of columns": (lambda a, b: OPS.fused_all_gather_matmul(a, [b], -1, NAME), ((M, K), (2 * K, N))),
    "scatter": (lambda a, b: OPS.fused_matmul_reduce_scatter(a, b, "sum", 0, NAME), ((2 * M, K), (K, N))),
    "scatter of columns": (
        lambda a, b: OPS.fused_matmul_reduce_scatter(a, b, "sum", 1, NAME),
        ((M, K), (K, 2 * N)),
    ),
    "scatter of two products": (
        lambda a, b, c, d: OPS.fused_matmul_reduce_scatter(a, b, "sum", 0, NAME, more=[c, d]),
        ((2 * M, K), (K, N), (2 * M, 1024), (1024, N)),
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_ops_of_weft_take_what_their_plans_predict(case: str) -> None:
    fn, shapes = CALLS[case]
    node = node_of(fn, *shapes)
    args, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    us = plan(node.target, *args, **named).predicted_us  # type: ignore[arg-type]
    assert us is not None
    assert kernel_time(node, CUDA) == us
    # Not between CPU ranks, where nothing predicts it.
    on_cpu = node_of(fn, *shapes, device="cpu")
    assert kernel_time(on_cpu, TABLES["cpu"]) > TABLES["cpu"].latency


def test_products_of_8_bits_take_half_of_those_of_16() -> None:
    def gather(a: Tensor, b: Tensor, s: Tensor) -> Any:
        return OPS.fused_all_gather_scaled_matmul(
            *(a, [b], s, [s], 0, NAME, [None], [None], [BF16], [False]), return_A=False
        )

    with FakeTensorMode(), torch.no_grad():
        a, b = (torch.empty(s, dtype=FP8, device="cuda") for s in ((8192, 8192), (8192, 8192)))
        graph = make_fx(gather)(a, b.t(), torch.empty(1, device="cuda")).graph
    node = next(n for n in graph.nodes if "scaled" in n.name)
    wide = node_of(CALLS["gather"][0], (8192, 8192), (8192, 8192))
    assert kernel_time(node, CUDA) == pytest.approx(kernel_time(wide, CUDA) / 2, rel=0.1)


def test_products_of_float32_take_their_own_time_or_the_collectives() -> None:
    def time(m: int, k: int) -> float:
        a_matmul = CALLS["matmul_all_reduce"][0]
        return kernel_time(node_of(a_matmul, (m, k), (k, N), dtype=torch.float32), CUDA)

    assert time(M, 8) == estimate_all_reduce_us(M * N * 4, 2)
    assert time(M, 16384) == CUDA.launch + M * N * 16384 / (CUDA.multiply_adds / 4)


@pytest.mark.parametrize("hidden", [5, 1 << 17])
def test_norms_that_no_kernel_takes_are_all_reduces(hidden: int) -> None:
    """Of rows that are no whole vectors, and of too long ones."""
    fn, _ = CALLS["rms_norm"]
    found = kernel_time(node_of(fn, (512, hidden), (512, hidden), (hidden,)), CUDA)
    assert found == max(
        CUDA.launch + (4 * 512 + 1) * hidden * 2 / CUDA.memory, estimate_all_reduce_us(512 * hidden * 2, 2)
    )


@pytest.mark.parametrize("size", [3, 1 << 22])
def test_collectives_of_a_group_of_weft_s_take_what_its_kernels_do(size: int) -> None:
    of_kinds: list[tuple[Callable[..., Any], float]] = [
        (lambda x: c10d.all_reduce(x, "sum", NAME), estimate_all_reduce_us(4 * size, 2)),
        (lambda x: c10d.all_gather_into_tensor(x, 2, NAME), estimate_all_gather_us(4 * size, 2)),
        (lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, NAME), estimate_reduce_scatter_us(2 * size, 2)),
    ]
    for fn, us in of_kinds:
        node = node_of(fn, (2 * size,))
        assert transfer_time(node, WEFT, CUDA) == us
        assert transfer_time(node, NVLINK, CUDA) > us
    other = node_of(lambda x: c10d.broadcast(x, 0, NAME), (2 * size,))
    assert transfer_time(other, WEFT, CUDA) >= CUDA.latency
