"""Which pattern a collective and its neighbourhood have: what the pass asks for each collective of a graph."""

from __future__ import annotations

from torch._inductor import config as inductor_config

from .graph.collectives import Collective
from .graph.nodes import LeftAlone, between, c10d
from .order.costs import counted_flops
from .patterns.all_gather_matmul import match_all_gather_matmul
from .patterns.all_reduce import match_all_reduce
from .patterns.alone import match_alone, match_matmul_all_gather
from .patterns.copy_engines import match_by_copy_engines
from .patterns.experts import match_experts_reduce_scatter
from .patterns.matmul_reduce_scatter import match_matmul_reduce_scatter
from .patterns.pattern import Pattern
from .scaled.all_gather import match_all_gather_scaled_matmul
from .scaled.reduce_scatter import match_scaled_matmul_reduce_scatter
from .settings import AUTO, PassSettings


def find(c: Collective, settings: PassSettings) -> Pattern:
    """What takes the place of a collective: a product with it, or, as far as the settings say so, the collective alone
    or by copy engines, where no product can take it or gains by it. The graph is not changed. LeftAlone: nothing can
    exactly."""
    always, by_itself = settings.fuse == "always", settings.collectives == AUTO
    # By itself it leaves them to what runs them beside products.
    if not settings.collectives or (by_itself and inductor_config.reorder_for_compute_comm_overlap):
        return with_product(c, settings)
    if c.node.target is c10d.all_to_all_single.default:
        return _profitable(match_alone(c, decided=always or not by_itself))
    copies = by_itself and settings.reorder is not None
    found = None
    try:
        found = with_product(c, settings)
        why = None if always else found.why_not_profitable()
        if why is None and copies and not always:
            why = _why_by_copy_engines(found)
        if why is None:
            return found
    except LeftAlone as e:
        if c.node.target is c10d.all_reduce.default:
            raise
        why = str(e)
    try:
        if copies:
            return match_by_copy_engines(c, why)
        return _profitable(match_alone(c, why, decided=always or not by_itself))
    except LeftAlone as e:
        if found is not None:
            return found
        raise LeftAlone(f"{why}; alone: {e}") from e


def _profitable(found: Pattern) -> Pattern:
    if (why := found.why_not_profitable()) is not None:
        raise LeftAlone(why)
    return found


def with_product(c: Collective, settings: PassSettings) -> Pattern:
    """What the collective can be fused into, also where that is not profitable. LeftAlone: it is none that can be fused
    exactly."""
    if c.node.target is c10d.all_reduce.default:
        # Where several ops could take it, the one that takes most, whether that is profitable or not.
        return match_all_reduce(c, always=settings.fuse == "always")
    if c.node.target is c10d.all_to_all_single.default:
        raise LeftAlone("no product takes it")
    scatters = c.node.target is c10d.reduce_scatter_tensor.default
    why: LeftAlone | None = None
    try:
        found = match_experts_reduce_scatter(c) if scatters else match_all_gather_scaled_matmul(c)
        if found is not None:
            return found
    except LeftAlone as e:
        why = e
    try:
        if scatters:
            return match_scaled_matmul_reduce_scatter(c) or match_matmul_reduce_scatter(c)
        return match_all_gather_matmul(c)
    except LeftAlone as e:
        why = why or e
        if scatters:
            raise why from e
    try:
        found = match_matmul_all_gather(c)
    except LeftAlone as e:
        raise LeftAlone(f"{why}; {e}") from e
    if found is None:
        raise why
    return found


def _why_by_copy_engines(found: Pattern) -> str | None:
    """Why copy engines are better than a product that takes the collective; None if they are not."""
    if found.transposes:
        return "a product would take it as its right operand, and transpose what it reads and writes"
    c = found.collective
    returned = all(user.op == "output" for user in c.wait.users)
    if c.node.target is not c10d.reduce_scatter_tensor.default or not returned:
        return None
    if any(map(counted_flops, between(c.wait, c.wait.graph.output_node()))):
        return "nothing in the graph reads the result, and other products hide it"
    return None
