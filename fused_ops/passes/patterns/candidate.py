"""A form as ``profitability`` is asked about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...dispatch import profitability
from ..graph.collectives import Collective, Size, hint, known, val
from .matmuls import Product

# Bytes per microsecond of a copy that transposes, measured on 2 H100: [7168, 4096] of 16 bits in 219 us.
_COPIED = 268e3

_WORDS = {
    "weft::fused_all_gather_matmul": "all_gather_matmul",
    "weft::fused_matmul_reduce_scatter": "matmul_reduce_scatter",
    "weft::fused_all_gather_scaled_matmul": "all_gather_scaled_matmul",
    "weft::fused_scaled_matmul_reduce_scatter": "scaled_matmul_reduce_scatter",
    "weft::fused_matmul_all_reduce": "matmul_all_reduce",
    # What reduces without a product.
    "weft::one_shot_all_reduce": "all_reduce",
    "weft::fused_all_reduce_rms_norm": "all_reduce",
    "weft::fused_all_reduce_layer_norm": "all_reduce",
    "weft::fused_all_reduce_rms_norm_quant": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "weft::one_shot_all_gather": "all_gather",
    "weft::one_shot_reduce_scatter": "reduce_scatter",
    "weft::all_gather_start": "all_gather",
    "weft::reduce_scatter_start": "reduce_scatter",
}


class AnyForm(Protocol):
    """What the forms have in common here."""

    @property
    def collective(self) -> Collective: ...
    @property
    def op(self) -> Any: ...
    @property
    def last_dim(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def m(self) -> Size: ...
    @property
    def n(self) -> Size: ...
    @property
    def k(self) -> Size: ...


def word_of(op: Any) -> str:
    """The word by which ``profitability`` knows an op.

    Raises:
        KeyError: ``_WORDS`` has none.
    """
    name = str(op._schema.name)
    if name not in _WORDS:
        raise KeyError(f"{name} is not in _WORDS, so nobody knows whether it is profitable")
    return _WORDS[name]


def problem_of(match: AnyForm) -> tuple[int, int, int] | None:
    """The sizes of the product, symbolic ones as they are now; None if one is not known before the run."""
    sizes = []
    for size in (match.m, match.n, match.k):
        if isinstance(size, torch.SymInt) and not size.node.has_hint():
            return None
        hint = size.node.hint if isinstance(size, torch.SymInt) else size
        sizes.append(0 if hint is None else int(hint))
    m, n, k = sizes
    return m, n, k


def gain_of(match: AnyForm, problem: tuple[int, int, int]) -> float:
    """Microseconds that it should save, less those of left operands that it copies."""
    products = getattr(match, "sum", None)
    return gain_without_copies(match, problem) - (0.0 if products is None else copies_us(products.products))


def gain_without_copies(match: AnyForm, problem: tuple[int, int, int]) -> float:
    return profitability.expected_gain(_candidate(match, problem))


def why_not_profitable_of(match: AnyForm) -> str | None:
    """Why it should not be fused, if that is to be weighed; None if it should."""
    if getattr(match, "decided", False):
        return None
    if (apart := getattr(match, "apart", None)) is not None:
        return str(apart)
    if (problem := problem_of(match)) is None:
        return None
    return profitability.why_not_profitable(_candidate(match, problem))


def _candidate(match: AnyForm, problem: tuple[int, int, int]) -> profitability.FusionCandidate:
    return profitability.FusionCandidate(
        word_of(match.op),
        *problem,
        *where_of(match),
        last_dim=match.last_dim,
        return_A=bool(getattr(match, "kept", ())),
        scaled=getattr(match, "scaled", None),
    )


def copies_us(products: Iterable[Product]) -> float:
    """Microseconds that an op takes to copy those left operands that do not lie in rows."""
    lefts = {p.left: val(p.left) for p in products}
    copied = sum(
        hint(x.numel()) * x.dtype.itemsize
        for x in lefts.values()
        if x.device.type == "cuda" and not known(x.stride(-1) == 1)
    )
    return copied / _COPIED


def why_copied(products: Iterable[Product], gain: Callable[[], float]) -> str | None:
    """Why an op should not take products, of whose left operands it copies those that do not lie in rows.

    Args:
        gain: microseconds that fusing saves without the copies.
    """
    us = copies_us(products)
    if not us or us <= (saved := gain()):
        return None
    return f"an operand on the left does not lie in rows: to copy it takes {us:.0f} us, and fusing saves {saved:.0f} us"


def where_of(match: AnyForm) -> tuple[int, torch.dtype, str]:
    """Ranks, dtype and type of device."""
    return match.collective.world, match.dtype, val(match.collective.x).device.type


def why_not_compared(match: AnyForm) -> str | None:
    """Why ranks cannot tell, before the run, whether they have the same shapes; None if they can.

    One size that depends on data is no reason: without the pass, too, all ranks send as many elements.
    """
    sent = free_unbacked_symbols(val(match.collective.x).numel())
    others = free_unbacked_symbols([match.m, match.n, match.k]) - sent
    if len(sent) > 1 or others:
        names = ", ".join(sorted(map(str, sent | others)))
        return (
            f"the sizes {names} depend on data, so ranks cannot know beforehand whether theirs are the same"
        )
    return None


def why_not_called_from_cpp(op: Any) -> str | None:
    """Why the code that Inductor generates in C++ cannot call an op; None if it can, or is in Python."""
    if not inductor_config.cpp_wrapper or V.aot_compilation:
        return None
    if not any(isinstance(r.type, torch.ListType) for r in op._schema.returns):
        return None
    return f"the C++ wrapper cannot call an op that returns a list of tensors, as {op._schema.name} does"
