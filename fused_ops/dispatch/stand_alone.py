"""What the stand-alone collectives have in common: from a tensor and its part to kernels of collective/, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...kernels.all_gather.configs import estimate_all_gather_us
from ...kernels.reduce_scatter.configs import estimate_reduce_scatter_us
from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from ..dispatch import fast_path
from ..dispatch.fast_path import Launcher
from ..dispatch.plan import Plan, ran
from ..dispatch.planning import is_planning
from ..dispatch.stream_order import in_stream_order
from ..dispatch.workspaces import ALL_REDUCE, push_workspace

if TYPE_CHECKING:
    from ...kernels.device.collective.launch import CollectiveLauncher
    from ...kernels.device.collective.rounds import RoundsConfig
    from ...kernels.device.jit.program import Function

KINDS = (ALL_REDUCE,)  #: of workspaces: that of all exchanges without products


@dataclass(frozen=True, slots=True)
class StandAlone:
    """A call of one of these ops on CUDA.

    Attributes:
        name: of the op; ``op`` also says that it is given where the result is written to.
        arguments: as ``run_fast`` is asked for them.
        given: the tensors as the caller gave them: x, or where the result is written to, and x.
        shape: of the result.
        dim: that is gathered or scattered, not negative.
        gathers: parts become the tensor; else they are made of it.
    """

    name: str
    op: str
    arguments: Any
    given: list[Tensor]
    shape: list[int]
    dim: int
    gathers: bool

    @property
    def x(self) -> Tensor:
        return self.given[-1]

    @property
    def out(self) -> Tensor | None:
        return self.given[0] if len(self.given) == 2 else None

    @property
    def rows(self) -> int:
        """Of a part, each of all dimensions from ``dim`` on."""
        return prod(self.shape[: self.dim])

    @property
    def row_bytes(self) -> int:
        part = self.x.shape if self.gathers else self.shape
        return prod(part[self.dim :]) * self.x.element_size()

    def is_own_part(self, x: Tensor, rank: int) -> bool:
        """Whether the smaller one of x and ``out`` is the part of the other that becomes it: no kernel overwrites then
        what is still read."""
        assert self.out is not None
        whole, part = (self.out, x) if self.gathers else (x, self.out)
        return self.rows == 1 and part.data_ptr() == whole.data_ptr() + rank * part.nbytes


@dataclass(frozen=True)
class _IntoLauncher:
    """The same kernel where the result is an operand."""

    kernel: CollectiveLauncher

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        self.kernel.launch(buffer, operands[1:], operands[:1], timeout_ns, stream)


def fast_into(op: str, arguments: Any, out: Tensor, x: Tensor, group_name: str) -> bool:
    """Whether such a call was made before on CUDA; then it is made. The tensors may be anything."""
    if not isinstance(out, Tensor) or not isinstance(x, Tensor):
        return False
    if is_planning():  # of tensors without addresses
        return False
    try:
        if overlap(out, x) or (out.is_inference() and not torch.is_inference_mode_enabled()):
            return False
    except RuntimeError:  # sparse, nested, of torch.func: without memory
        return False
    if fast_path.run_fast(op, arguments, (out, x), group_name, KINDS) is None:
        return False
    increment_version(out)  # of what a kernel writes at an address autograd sees nothing
    return True


def overlap(out: Tensor, x: Tensor) -> bool:
    """Whether contiguous tensors share memory, also where the one is the part of the other that becomes it."""
    first, other = out.data_ptr(), x.data_ptr()
    return first < other + x.nbytes and other < first + out.nbytes


@dataclass(frozen=True, slots=True)
class PreparedAlone:
    """What a workspace keeps for one size of one of these ops."""

    workspace: Workspace[Any]
    kernel: CollectiveLauncher
    plan: Plan


def _predicted_us(call: StandAlone, world_size: int) -> float:
    """Microseconds of such calls, by the model of the kernels."""
    estimate = estimate_all_gather_us if call.gathers else estimate_reduce_scatter_us
    return estimate(call.rows * call.row_bytes, world_size)


def prepare_alone(
    where: Heap,
    call: StandAlone,
    config: RoundsConfig,
    functions: tuple[Any, Callable[[str], Function]],
    kind: str = ALL_REDUCE,
) -> PreparedAlone | str:
    """The kernel of such calls in the workspace of this kind, made by all ranks together; or why there is none.

    Args:
        functions: what its program is made for besides the sizes, and the kernel of a name.
    """
    from ...kernels.device.collective import launch
    from ...kernels.device.collective.rounds import rounds_layout
    from ...kernels.device.tuning.choice import make_together

    rows, row = call.rows, call.row_bytes
    if rows * row > launch.MOST_BYTES:
        return f"a part has {rows * row} bytes, more than the {launch.MOST_BYTES} that the kernels take"
    problem = launch.SlicesProblem(rows, row, call.gathers)
    of_program, function = functions
    place = push_workspace(where, kind, rounds_layout(problem.vectors, where.world_size, config))
    place.raise_if_broken()
    # Under one name: one rank may give an `out` and another one not.
    key: Any = (call.name, rows, row, *of_program)
    kernel = place.prepared.get(key)
    plan = Plan(
        "push", workspace_bytes=place.layout.bytes, predicted_us=_predicted_us(call, where.world_size)
    )
    ran(plan)
    if kernel is None:

        def make() -> CollectiveLauncher:
            return launch.CollectiveLauncher(place, problem, function, config)

        kernel = make_together(place, call.name, key, key, make)
    return PreparedAlone(place, kernel, plan)


def run_alone(
    where: Heap, call: StandAlone, config: RoundsConfig, functions: tuple[Any, Callable[[str], Function]]
) -> Tensor | str:
    """The result, contiguous, or why no kernel takes it. ``functions``: as ``prepare_alone``."""
    x, into = call.x, call.out
    with in_stream_order(x.device):
        ready = prepare_alone(where, call, config, functions)
        if isinstance(ready, str):
            return ready
        place, kernel = ready.workspace, ready.kernel
        source = x.contiguous()
        if into is not None and into.is_contiguous():
            out = into
            if overlap(out, source) and not call.is_own_part(source, where.rank):
                source = source.clone()
        else:
            out = x.new_empty(call.shape)
        timeout_ns = timeout_in_ns(where.group_name)
        place.raise_if_broken(call.op, grids=kernel.grids)
        kernel.launch(0, (source.data_ptr(),), (out.data_ptr(),), timeout_ns, current_stream_of(source))
    given, arguments = call.given, call.arguments
    launcher: Launcher = kernel if into is None else _IntoLauncher(kernel)
    used, results = ([source], [out]) if into is None else ([out, source], [])
    made = fast_path.LaunchedCall(call.op, arguments, given, used, results)
    fast_path.remember_call(made, place, launcher, ready.plan, profitable=True, grids=kernel.grids)
    return out
