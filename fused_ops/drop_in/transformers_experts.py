"""transformers' mixtures of experts on weft's grouped products, and their tokens to the experts' ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..expert_parallel import moe_combine, moe_dispatch
from ..experts import grouped_matmul, moe_route
from ..layers.conjugates import GatherShards, SplitShards


def register_transformers_experts() -> None:
    """Makes ``experts_implementation="weft"`` and ``ep_implementation="weft"`` known to transformers.

    >>> import weft
    >>> try:
    ...     weft.drop_in.register_transformers_experts()
    ... except ImportError:  # no transformers with experts' implementations
    ...     pass

    With ``from_pretrained(name, experts_implementation="weft")``, ``config._experts_implementation = "weft"`` or
    ``model.set_experts_implementation("weft")`` experts run by ``grouped_matmul``. Any model whose experts take an
    implementation runs so, if its sizes are multiples of 8: gated or not, with biases, transposed or interleaved
    weights, a norm after the experts; sliced by ``tp_plan="auto"`` or placed by rank. Routing weights are applied and
    choices added up in float32.

    With ``DistributedConfig(ep_size=..., ep_implementation="weft")`` tokens go to their experts' ranks and back by
    ``moe_dispatch`` and ``moe_combine``, and experts run by ``grouped_matmul``. The host reads no sizes, so such a
    layer compiles as one graph, with its gradients. All ranks must hold as many tokens.

    Raises:
        ImportError: transformers is not installed, or has no ``ALL_EXPERTS_FUNCTIONS``. One that has no
            ``EPImplementationInterface`` gets the experts alone.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("weft", run_experts)
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # 5.17 has none
        return
    EPImplementationInterface.register("weft", ExpertsOfRanks)


def run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of the forward of its experts, with [T, H], [T, k] and [T, k].

    An id that is no expert of this rank goes nowhere, as of experts that are placed by rank.
    """
    rows, offs, slots = moe_route(top_k_index, experts.num_experts)
    y = _multiply_experts(experts, hidden_states, offs, rows)
    chosen = torch.where((slots >= 0)[..., None], y[slots.clamp(min=0).long()], 0)
    return (chosen * top_k_weights[..., None].float()).sum(1).to(hidden_states.dtype)


class ExpertsOfRanks:
    """An ``EPImplementation`` of transformers: what it makes for each module of experts, and calls as their forward.

    Ranks of a tensor-parallel group hold the same tokens: each sends a part of them, and all get the results of all.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        self.experts, self.group = experts, ep_mesh.get_group().group_name
        self.num_experts = experts.num_experts * ep_mesh.size()
        self.share = tp_mesh.get_group().group_name, tp_mesh.get_local_rank(), tp_mesh.size()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.shape[0]
        x, ids, weights = self._own(hidden_states), self._own(top_k_index, -1), self._own(top_k_weights)
        rows, offs, handle = moe_dispatch(x, ids, self.num_experts, self.group)
        y = moe_combine(_multiply_experts(self.experts, rows, offs, None), handle, weights, self.group)
        return y if self.share[-1] == 1 else GatherShards.apply(y, 0, *self.share)[:tokens]

    def _own(self, x: Tensor, filled: int = 0) -> Tensor:
        """``filled``: what the last parts hold where there are no more tokens."""
        size = self.share[-1]
        if size == 1:
            return x
        return SplitShards.apply(pad(x, (0, 0, 0, -x.shape[0] % size), value=filled), 0, *self.share)


def _multiply_experts(experts: Any, x: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    """What experts make of rows of x that are sorted by expert, without routing weights."""
    if experts.has_gate:
        swiglu = _is_swiglu(experts)
        hidden = _multiply(experts, "gate_up_proj", x, offs, rows, swiglu=swiglu)
        hidden = hidden if swiglu else experts._apply_gate(hidden)
    else:
        hidden = experts.act_fn(_multiply(experts, "up_proj", x, offs, rows))
    y = _multiply(experts, "down_proj", hidden, offs, None)
    if getattr(experts, "has_post_expert_norm", False):  # transformers 5.17 has none
        here = torch.arange(y.shape[0], device=y.device) < offs[-1]
        y = experts.post_expert_norm(torch.where(here[:, None], y, 0))
    return y


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
