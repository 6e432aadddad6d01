"""The question where a graph is interpreted: the op ``weft::agree`` itself."""

from __future__ import annotations

from functools import lru_cache

from ....symm_mem import WeftError
from .guard import GraphGuard


def ask_eagerly(packed: str, fused: bool) -> None:
    """The op ``weft::agree`` where it is run and not generated: this rank's graph runs as it is, whatever others do.

    Raises:
        WeftError: it must not, because something in it was fused.
    """
    if fused:
        raise WeftError(
            "weft::agree: a graph in which collectives were fused is run without Inductor's generated code, so the "
            "ranks are not asked whether they run the same graph; have Inductor generate the code, or compile with "
            "FusionPass(agree=False) where all ranks run the same graphs in the same order"
        )
    _guard_of(packed).runs_unfused()


@lru_cache(maxsize=256)
def _guard_of(packed: str) -> GraphGuard:
    return GraphGuard(packed)
