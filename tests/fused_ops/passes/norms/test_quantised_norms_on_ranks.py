"""Norms that become fp8 after an all-reduce, through torch.compile with Inductor's code on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from opcommon import same_on_all, whole, world
from quantised import E4M3, by_steps, same_bits
from ranks import on_ranks
from scaled_graphs import BF16, by_scale, scale_of, times
from test_norm_forms import vllm
from test_quantised_norms import QUANT, not_bounded, torchao_rows, vllm_rows, vllm_static
from torch import Tensor
from torch._inductor import config as inductor_config
from torch_versions import SATURATING_CASTS, needs_row_wise_products
from weft.fused_ops import FusionPass, fused_all_reduce_rms_norm

ROWS, HIDDEN = 7, 48


def multiplied(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(x.abs().amax(-1, keepdim=True))
    return by_scale(x, scale), scale


# What quantises, how the op is then told to, and what bounds the scales of rows; None where one is given.
SPELLINGS: dict[str, tuple[Callable[..., Any], str, float | None]] = {
    "vLLM": (vllm_rows, "reciprocal", 1 / (448 * 512)),
    "vLLM, static": (vllm_static, "reciprocal", None),
    "torchao": (torchao_rows, "divide", 0.0),
    **({"a cast that saturates": (not_bounded, "reciprocal", None)} if SATURATING_CASTS else {}),
    "Float8Linear": (multiplied, "multiply", 1e-12),
}


@on_ranks(2, timeout=200)
def test_compiled_layers(rank: int, world_size: int) -> None:
    scale = torch.tensor([0.005 * (rank + 1)])  # each rank's own
    for name, (quantise, scale_op, smallest) in SPELLINGS.items():
        given = () if smallest is not None else (scale,)

        def layer(
            x: Tensor,
            w: Tensor,
            residual: Tensor,
            weight: Tensor,
            quantise: Any = quantise,
            given: Any = given,
        ) -> Any:
            normed, sums = vllm(funcol.all_reduce(x @ w, "sum", dist.group.WORLD), residual, weight)
            numbers = quantise(normed, *given)
            numbers, scales = numbers if isinstance(numbers, tuple) else (numbers, given[0])
            return numbers, scales, sums

        fusion = FusionPass()
        torch._dynamo.reset()
        with inductor_config.patch(fx_graph_cache=False):
            run = torch.compile(layer, options=fusion.options)
            for _ in range(2):
                # Whose products are exact, so that no rounding of Inductor's makes another norm.
                x, w = whole(ROWS, 16, dtype=BF16), whole(16, HIDDEN, dtype=BF16)
                residual, weight = torch.randn(ROWS, HIDDEN).to(BF16), same_on_all(HIDDEN, dtype=BF16)
                x[2] = residual[2] = 0
                numbers, scales, sums = run(x, w, residual, weight)
                normed, want = fused_all_reduce_rms_norm(
                    x @ w, residual, weight, 1e-6, world(), round_sum=False
                )
                wanted = by_steps(normed, scale if given else None, E4M3, scale_op, smallest or 0.0)
                assert torch.equal(sums, want) and same_bits(numbers, wanted[0]), name
                assert same_bits(scales, wanted[1]), name
        (entry,) = fusion.report().entries
        assert entry.fused_into == QUANT, entry
        assert fusion.report().disagreements == ()


@needs_row_wise_products
@on_ranks(2, timeout=200)
def test_a_scaled_product_after_it(rank: int, world_size: int) -> None:
    """What the scaled product after it gives is that of the program as it is written."""

    def layer(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, up: Tensor, up_scale: Tensor) -> Tensor:
        normed, _ = vllm(funcol.all_reduce(x @ w, "sum", dist.group.WORLD), residual, weight)
        numbers, scales = vllm_rows(normed)
        return times(numbers, up, scales, up_scale)

    x, w = torch.randn(16, 16).to(BF16), torch.randn(16, HIDDEN).to(BF16)
    residual, weight = torch.randn(16, HIDDEN).to(BF16), same_on_all(HIDDEN, dtype=BF16)
    up, up_scale = torch.randn(32, HIDDEN).to(E4M3), torch.rand(1, 32)
    fusion = FusionPass()
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        got = torch.compile(layer, options=fusion.options)(x, w, residual, weight, up, up_scale)
    (entry,) = fusion.report().entries
    assert entry.fused_into == QUANT, entry
    want = layer(x, w, residual, weight, up, up_scale)
    # The product in bf16 and the norm before it may be rounded otherwise, and so may some numbers of fp8.
    assert (got.double() - want.double()).norm() / want.double().norm() < 2e-2
