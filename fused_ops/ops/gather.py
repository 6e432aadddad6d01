"""one_shot_gather: from the op's tensor to a kernel's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_gather import TO_ROOT
from ...kernels.all_gather.reference import as_bytes, reference_gather
from ...kernels.device.collective.host_exchange import exchange_layout, gather_to
from ...symm_mem.heap.heap import Heap
from .. import validation
from ..dispatch.choice import Choice, on_host, unfused
from ..dispatch.plan import ran
from ..dispatch.stand_alone import KINDS, StandAlone, choose_alone, run_alone
from . import gradients
from .all_gather import (
    UNEVEN,
    AllGatherCall,
    bytes_of_ranks,
    known_with_counts,
    sends_no_counts,
    validate_gathered,
    with_dim_in_front,
)
from .op import Op

#: Why a call has no gradient.
WITHOUT_ROOT = ": the other ranks have no result of which they could ask for it; pass x.detach()"


class GatherCall(NamedTuple):
    x: Tensor
    gather_dim: int
    root: int
    group_name: str
    group_size: int | None = None
    counts: Sequence[int] | None = None
    group_rank: int | None = None

    def counts_of(self, group: ProcessGroup) -> Sequence[int]:
        """All ranks' sizes in ``gather_dim``, which is not negative."""
        return self.counts or [self.x.shape[self.gather_dim]] * group.size()

    def result_shape(self, group: ProcessGroup) -> list[int]:
        shape = list(self.x.shape)
        shape[self.gather_dim] = sum(self.counts_of(group)) if group.rank() == self.root else 0
        return shape


def _validate(call: GatherCall) -> tuple[GatherCall, ProcessGroup]:
    """The call with a dimension and a rank that are not negative, and the group."""
    of_all = AllGatherCall(call.x, call.gather_dim, call.group_name, None, call.counts, call.group_rank)
    found, group = validate_gathered(of_all)
    if not 0 <= call.root < group.size():
        raise ValueError(f"root: is {call.root}, must be from 0 to {group.size() - 1}, a rank of the group")
    validation.rank_of_graph(call.group_rank, group)
    return call._replace(gather_dim=found.gather_dim), group


def _choose(call: GatherCall, group: ProcessGroup) -> Choice:
    """The call is what validation returns."""
    if call.x.device.type == "cpu":
        return on_host(exchange_layout(max(bytes_of_ranks(call, call.counts_of(group))), group.size()))
    if len(set(call.counts_of(group))) > 1:
        return unfused(UNEVEN)
    return choose_alone(_alone(call, group), group)


def _alone(call: GatherCall, group: ProcessGroup) -> StandAlone:
    x, shape = call.x, call.result_shape(group)
    return StandAlone(TO_ROOT, TO_ROOT, [x], shape, x.shape, gather_dim=call.gather_dim, root=call.root)


def run_gather(choice: Choice, where: Heap, call: GatherCall, group: ProcessGroup) -> Tensor:
    """As the op; the call is what validation returns."""
    if choice.algorithm == "push":
        return run_alone(choice, where, _alone(call, group))
    x, dim, shape = call.x, call.gather_dim, call.result_shape(group)
    sent, sizes = as_bytes(x.movedim(dim, 0).contiguous()), bytes_of_ranks(call, call.counts_of(group))
    if choice.is_unfused:
        ran(choice.plan_in(None))
        stacked = reference_gather(sent, sizes, call.root, group) if sum(sizes) else sent
    else:
        stacked = gather_to(choice.begin_on(where), sent, sizes, call.root, TO_ROOT)
    return with_dim_in_front(stacked.view(x.dtype), dim, shape)


GATHER = Op(
    "one_shot_gather(Tensor x, int gather_dim, int root, str group_name, *, int? group_size=None,"
    " SymInt[]? counts=None, int? group_rank=None) -> Tensor",
    record=GatherCall,
    validate=_validate,
    fake=lambda call, group: call.x.new_empty(call.result_shape(group)),
    kernel="all_gather",
    sends_nothing=lambda call, group: sends_no_counts(call.x, call.gather_dim, call.counts),
    choose=_choose,
    run=run_gather,
    known_by=lambda call: known_with_counts(call, (call.gather_dim, call.root)),
    kinds=KINDS,
    with_gradient=lambda call: gradients.refuse_gradient(_validate, call, WITHOUT_ROOT),
    own_values=("group_rank",),
    own_by_counts={"x": "gather_dim"},
)
