"""What the stand-alone collectives have in common: from a tensor and its part to kernels of collective/, and back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.device.collective.rounds import choose_rounds, rounds_layout
from ...kernels.device.comm.exchange_time import estimate_all_gather_us, estimate_reduce_scatter_us
from ...kernels.device.comm.ll_exchange import in_turn
from ...symm_mem.backends import cuda_state
from ...symm_mem.heap.heap import Heap
from .choice import Choice, launch_exchange, prepare_kernel, unfused
from .launch_cache import PreparedKernel, launch_again, overlap, remember_call
from .plan import num_sms, sends_in_turn
from .stream_order import in_stream_order
from .workspaces import ALL_REDUCE

if TYPE_CHECKING:
    from ...kernels.device.collective.launch import CollectiveLauncher
    from ...kernels.device.jit.program import Function, Program

KINDS = (ALL_REDUCE,)  #: of workspaces: that of all exchanges without products


@dataclass(frozen=True, slots=True)
class StandAlone:
    """A call of one of these ops on CUDA.

    Attributes:
        name: of the op; ``op`` also says that it is given where the result is written to.
        given: the tensors as the caller gave them: x, or where the result is written to, and x.
        shape: of the result.
        part: the shape of what each rank gets from another one.
        scatter_dim: along which x is cut into parts, not negative; None: it is a part itself.
        gather_dim: along which parts are joined to the result; likewise. None: they are reduced.
        root: who alone receives what is gathered.
    """

    name: str
    op: str
    given: list[Tensor]
    shape: list[int]
    part: Sequence[int]
    scatter_dim: int | None = None
    gather_dim: int | None = None
    reduce_op: str = ""
    root: int | None = None

    @property
    def x(self) -> Tensor:
        return self.given[-1]

    @property
    def out(self) -> Tensor | None:
        return self.given[0] if len(self.given) == 2 else None

    @property
    def part_bytes(self) -> int:
        return prod(self.part) * self.x.element_size()

    @property
    def of_program(self) -> tuple[Any, ...]:
        """What its program is made for besides the sizes."""
        return (self.x.dtype, self.reduce_op) if self.gather_dim is None else (self.root,)

    def program(self, size: int, rank: int) -> Program:
        """That which has the kernels, for one rank of so many."""
        if self.gather_dim is None:
            from ...kernels.reduce_scatter.cuda_kernel import reduce_scatter_program

            return reduce_scatter_program(size, rank, self.x.dtype, self.reduce_op)
        if self.scatter_dim is None:
            from ...kernels.all_gather.cuda_kernel import all_gather_program

            return all_gather_program(size, rank, self.root)
        from ...kernels.all_to_all.cuda_kernel import all_to_all_program

        return all_to_all_program(size, rank)

    def row_bytes(self, dim: int | None) -> int | None:
        """Of a part where it is one of several along a dimension."""
        return None if dim is None else prod(self.part[dim:]) * self.x.element_size()

    def is_own_part(self, x: Tensor, rank: int) -> bool:
        """Whether the smaller one of x and ``out`` is the part of the other that becomes it: no kernel overwrites then
        what is still read."""
        assert self.out is not None
        if self.scatter_dim is not None and self.gather_dim is not None:
            return False
        whole, part = (self.out, x) if self.scatter_dim is None else (x, self.out)
        dim = self.gather_dim if self.scatter_dim is None else self.scatter_dim
        in_one_piece = self.row_bytes(dim) == self.part_bytes
        return in_one_piece and part.data_ptr() == whole.data_ptr() + rank * part.nbytes


def choose_alone(call: StandAlone, group: ProcessGroup, kind: str = ALL_REDUCE) -> Choice:
    """The choice for such calls on CUDA, in workspaces of a kind."""
    from ...kernels.device.collective import launch

    nbytes, world_size = call.part_bytes, group.size()
    if nbytes > launch.MOST_BYTES:
        return unfused(f"a part has {nbytes} bytes, more than the {launch.MOST_BYTES} that the kernels take")
    rows = call.row_bytes(call.scatter_dim), call.row_bytes(call.gather_dim)
    problem = launch.SlicesProblem(nbytes, *rows)
    sums = call.gather_dim is None
    estimate = estimate_reduce_scatter_us if sums else estimate_all_gather_us
    config = choose_rounds(world_size, num_sms(call.x.device), exact=not sums)
    return Choice(
        "push",
        kind=kind,
        layout=rounds_layout(problem.vectors, world_size, config),
        predicted_us=estimate(nbytes, world_size),
        programs=lambda: [call.program(world_size, group.rank())],
        how=(problem, config),
    )


def prepare_alone(choice: Choice, where: Heap, call: StandAlone) -> PreparedKernel:
    """The kernel of such calls in the choice's workspace, made by all ranks together."""
    from ...kernels.device.collective import launch

    problem, config = choice.how

    def function(name: str) -> Function:
        program = call.program(where.world_size, where.rank)
        program = in_turn(program) if sends_in_turn(where) else program
        with cuda_state.state.make_current(call.x.device):
            return program.function(name)

    def make(place: Any) -> CollectiveLauncher:
        return launch.CollectiveLauncher(place, problem, function, config)

    # Under one name: one rank may give an `out` and another one not.
    return prepare_kernel(choice, where, call.name, (call.name, *astuple(problem), *call.of_program), make)


def run_alone(choice: Choice, where: Heap, call: StandAlone) -> Tensor:
    """The result, contiguous."""
    x, into = call.x, call.out
    with in_stream_order(x.device):
        ready = prepare_alone(choice, where, call)
        source = x.contiguous()
        if into is not None and into.is_contiguous():
            out = into
            if overlap(out, source) and not call.is_own_part(source, where.rank):
                source = source.clone()
        else:
            out = x.new_empty(call.shape)
        launch_exchange(ready, call.op, where, (source,), (out,))
    used, results = ([source], [out]) if into is None else ([out, source], None)
    remember_call(call.op, choice.known, used, results, ready, alignment=1)
    return out


def run_beside(choice: Choice, where: Heap, call: StandAlone, arguments: Hashable) -> Tensor:
    """As a part of a call of another op, next to a product of cuBLAS: it is known by itself."""
    done = launch_again(call.op, arguments, (call.x,), where.group_name, KINDS)
    if done is not None:
        return done[0]
    return run_alone(replace(choice, known=(arguments, (call.x,))), where, call)
