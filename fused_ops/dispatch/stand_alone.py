"""What the stand-alone collectives have in common: from a tensor and its part to kernels of collective/, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...kernels.all_gather.configs import estimate_all_gather_us
from ...kernels.device.collective.rounds import RoundsConfig, rounds_layout
from ...kernels.reduce_scatter.configs import estimate_reduce_scatter_us
from ...symm_mem.backends import cuda_state
from ...symm_mem.backends.cuda_state import current_stream_of
from ...symm_mem.heap.heap import Heap
from ...symm_mem.timeouts import timeout_in_ns
from .choice import Choice, unfused
from .launch_cache import LaunchedCall, PreparedKernel, overlap, remember_call
from .plan import ran
from .stream_order import in_stream_order
from .workspaces import ALL_REDUCE

if TYPE_CHECKING:
    from ...kernels.device.collective.launch import CollectiveLauncher, SlicesProblem
    from ...kernels.device.jit.program import Function, Program

KINDS = (ALL_REDUCE,)  #: of workspaces: that of all exchanges without products


@dataclass(frozen=True, slots=True)
class StandAlone:
    """A call of one of these ops on CUDA.

    Attributes:
        name: of the op; ``op`` also says that it is given where the result is written to.
        arguments: as ``launch_again`` is asked for them.
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
class _How:
    """``of_program``: what that is made for besides the sizes."""

    problem: SlicesProblem
    config: RoundsConfig
    program: Callable[[], Program]
    of_program: tuple[Any, ...]


def choose_alone(
    call: StandAlone,
    world_size: int,
    config: RoundsConfig,
    program: Callable[[], Program],
    of_program: tuple[Any, ...] = (),
    kind: str = ALL_REDUCE,
) -> Choice:
    """The choice for such calls on CUDA, in workspaces of a kind.

    Args:
        program: returns that which has the kernels.
        of_program: what it is made for besides the sizes.
    """
    from ...kernels.device.collective import launch

    rows, row = call.rows, call.row_bytes
    if rows * row > launch.MOST_BYTES:
        return unfused(
            f"a part has {rows * row} bytes, more than the {launch.MOST_BYTES} that the kernels take"
        )
    problem = launch.SlicesProblem(rows, row, call.gathers)
    estimate = estimate_all_gather_us if call.gathers else estimate_reduce_scatter_us
    return Choice(
        "push",
        kind=kind,
        layout=rounds_layout(problem.vectors, world_size, config),
        predicted_us=estimate(rows * row, world_size),
        programs=lambda: [program()],
        how=_How(problem, config, program, of_program),
    )


def prepare_alone(choice: Choice, where: Heap, call: StandAlone) -> PreparedKernel:
    """The kernel of such calls in the choice's workspace, made by all ranks together."""
    from ...kernels.device.collective import launch
    from ...kernels.device.tuning.choice import make_together

    how: _How = choice.how
    place = choice.workspace_on(where)
    place.raise_if_broken()
    # Under one name: one rank may give an `out` and another one not.
    key: Any = (call.name, how.problem.rows, how.problem.row, *how.of_program)
    kernel = place.prepared.get(key)
    plan = choice.plan_in(place)
    ran(plan)
    if kernel is None:

        def function(name: str) -> Function:
            with cuda_state.state.make_current(call.x.device):
                return how.program().function(name)

        def make() -> CollectiveLauncher:
            return launch.CollectiveLauncher(place, how.problem, function, how.config)

        kernel = make_together(place, call.name, key, key, make)
    return PreparedKernel(place, kernel, plan)


def run_alone(choice: Choice, where: Heap, call: StandAlone) -> Tensor:
    """The result, contiguous."""
    x, into = call.x, call.out
    with in_stream_order(x.device):
        ready = prepare_alone(choice, where, call)
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
    used, results = ([source], [out]) if into is None else ([out, source], None)
    made = LaunchedCall(call.op, call.arguments, call.given, used, results, alignment=1)
    remember_call(made, *ready)
    return out
