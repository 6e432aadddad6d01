"""transformers' mixtures of experts on weft's grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..experts import grouped_matmul, moe_route


def register_transformers_experts() -> None:
    """Makes ``experts_implementation="weft"`` known to transformers: its experts run by ``grouped_matmul``.

    >>> import weft
    >>> try:
    ...     weft.drop_in.register_transformers_experts()
    ... except ImportError:  # no transformers with experts' implementations
    ...     pass

    Then ``from_pretrained(name, experts_implementation="weft")``, ``config._experts_implementation = "weft"`` or
    ``model.set_experts_implementation("weft")``. Any model whose experts take an implementation runs so, if its sizes
    are multiples of 8: gated or not, with biases, transposed or interleaved weights, a norm after the experts; sliced
    by ``tp_plan="auto"`` or placed by rank. Routing weights are applied and choices added up in float32.

    Raises:
        ImportError: transformers is not installed, or has no ``ALL_EXPERTS_FUNCTIONS``.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("weft", experts_forward)


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls in place of the forward of its experts, with [T, H], [T, k] and [T, k].

    An id that is no expert of this rank goes nowhere, as of experts that are placed by rank.
    """
    rows, offs, slots = moe_route(top_k_index, experts.num_experts)
    if experts.has_gate:
        swiglu = _is_swiglu(experts)
        hidden = _multiply(experts, "gate_up_proj", hidden_states, offs, rows, swiglu=swiglu)
        hidden = hidden if swiglu else experts._apply_gate(hidden)
    else:
        hidden = experts.act_fn(_multiply(experts, "up_proj", hidden_states, offs, rows))
    y = _multiply(experts, "down_proj", hidden, offs, None)
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.17 has none
        here = torch.arange(y.shape[0], device=y.device) < offs[-1]
        y = experts.post_expert_norm(torch.where(here[:, None], y, 0))
    chosen = torch.where((slots >= 0)[..., None], y[slots.clamp(min=0).long()], 0)
    return (chosen * top_k_weights[..., None].float()).sum(1).to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Whether its gate is ``_default_apply_gate`` of SiLU, of sizes that ``grouped_matmul`` takes so."""
    if type(experts)._apply_gate.__name__ != "_default_apply_gate":
        return False
    is_silu = type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and experts.gate_up_proj.shape[2 if experts.is_transposed else 1] % 16 == 0


def _multiply(
    experts: Any, name: str, x: Tensor, offs: Tensor, rows: Tensor | None, *, swiglu: bool = False
) -> Tensor:
    weight = getattr(experts, name)
    B = weight if experts.is_transposed else weight.mT
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return grouped_matmul(x.to(weight.dtype), B, offs, rows=rows, bias=bias, swiglu=swiglu)
