"""A GPU that is none, to run calls on without one: the CPU's tensors are said to lie there, streams note their work.

What is real: the group (of torch's fake backend), the choice of kernels, workspaces' look-up, stream order, and both
paths. What is not: CUDA's answers, and the heap with its workspaces and kernels, which note how they are launched.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import symm_mem
from weft.fused_ops.dispatch import plan
from weft.fused_ops.dispatch.launch_cache import ALIGNMENT, PreparedKernel, remember_call
from weft.fused_ops.dispatch.workspaces import ALL_REDUCE, AROUND_MATMULS
from weft.fused_ops.ops import OP_OF
from weft.kernels.device.gemm.one_shot import algorithm_of
from weft.kernels.device.kernel_choice import KernelChoice
from weft.symm_mem import call_cache, flight_recorder
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.call_cache import CachedDict
from weft.symm_mem.heap.registry import register_heap

NAME, WORLD_SIZE = "0", 2  # the default group's
STREAM, SIDE, DEADLINE = 7, 6, 300_000_000_000
SLOW = (symm_mem.WeftError, ValueError)
TAKEN = "this is the slow path|no process group is named '0'"


class Event:
    behind: tuple[Any, ...] = ()

    def record(self, stream: SimpleNamespace) -> None:
        self.behind = tuple(stream.work)

    def wait(self, stream: SimpleNamespace) -> None:
        stream.work.append(("wait", self.behind[-1] if self.behind else None))


class GraphEvent:
    """``node`` of a graph: what its replays record."""

    def __init__(self, gpu: Gpu) -> None:
        self._on = gpu.on
        self.behind: Any = None

    def record(self, stream: int) -> None:
        self.behind = self._on[stream][-1]

    def wait(self, stream: int) -> None:
        self._on.setdefault(stream, []).append(("wait", self.behind))

    def wait_in_graph(self, stream: int) -> None:
        self._on.setdefault(stream, []).append("replays wait")

    def record_in_graph(self, stream: int, node: list[Any] | None = None) -> list[Any]:
        node = [] if node is None else node
        node.append(self._on[stream][-1])
        return node


class Gpu(cuda_state.CudaState):
    """``on``: what was put on its streams. ``now``: the current one. ``graphs``: of the streams being captured."""

    def __init__(self, sms: int = 132) -> None:
        super().__init__()
        self.on: dict[int, list[Any]] = {}
        self.now, self.device, self.sms = STREAM, 0, sms
        self.graphs: dict[int, tuple[str, int]] = {}
        self.external: dict[int, int] = {}  # and their numbers
        self.destroyed: set[int] = set()
        self.held: dict[tuple[str, int], list[Callable[[], Any]]] = {}  # by graph: what its end calls

    def launch(self, what: Any) -> None:
        self.on.setdefault(self.now, []).append(what)

    def index_of(self, x: torch.Tensor) -> int:  # type: ignore[override]
        return 0 if x.device.type == "cpu" else -1

    def current_device(self) -> int:  # type: ignore[override]
        return self.device

    def current_stream(self, device: int) -> int:  # type: ignore[override]
        return self.now

    def is_capturing(self) -> bool:  # type: ignore[override]
        return self.now in self.graphs

    def stream(self, stream: int, device: int) -> Any:  # type: ignore[override]
        assert stream not in self.destroyed
        return SimpleNamespace(work=self.on.setdefault(stream, []))

    def stream_number(self, device: int) -> int:
        return self.now if self.now in self.external else 35

    def stream_id(self, stream: int) -> int:
        return self.external[stream]

    def capture_of(self, stream: int) -> tuple[str, int]:
        return self.graphs.get(stream, ("NONE", 0))

    def hold_in_graph(self, stream: int, held: int, destructor: int) -> None:
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destructor)
        self.held.setdefault(self.capture_of(stream), []).append(lambda: call(held))

    def name(self, device: torch.device) -> str:
        return "NVIDIA H100 80GB HBM3"

    def num_sms(self, device: torch.device) -> int:
        return self.sms

    def side_stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=SIDE, device_index=device, work=self.on.setdefault(SIDE, []))

    @contextmanager
    def make_stream_current(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.cuda_stream
        try:
            yield
        finally:
            self.now = before

    def event(self) -> Any:
        return Event()

    def graph_event(self) -> Any:
        return GraphEvent(self)

    def make_current(self, device: torch.device) -> Any:
        return nullcontext()


class Kernel:
    """Notes its launches: buffer, addresses of operands and of results, deadline, stream."""

    grids = ()

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def launch(self, buffer: int, operands: Sequence[int], results: Sequence[int], *how: int) -> None:
        self.launched.append((buffer, list(operands), list(results), *how))


class OneShot:
    """Likewise, of tensors: what calls torch's products."""

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def call(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], *how: int) -> None:
        self.launched.append((0, [x.data_ptr() for x in tensors], [x.data_ptr() for x in results], *how))


class Prepared(CachedDict[Any, Any]):
    """In which each kernel around a matmul that is chosen is made already, ``kernel`` if that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, ...]] = []
        self.kernel: Any = None
        self.made: dict[Any, Any] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        choice = key[0] if isinstance(key, tuple) else key
        if not isinstance(choice, KernelChoice):
            return super().get(key, default)
        if self.kernel is not None:
            return self.kernel
        kind = Kernel if algorithm_of(choice.config) == "push" else OneShot
        return self.made.setdefault(key, kind(self.launched))


class Workspace:
    """``noted``: the calls that have begun in it."""

    layout: Any = SimpleNamespace(bytes=0, holds=lambda wanted: True)
    world_size = WORLD_SIZE
    heap: Any = None
    meets = True

    def __init__(self) -> None:
        self.prepared = Prepared()
        self.started: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.error: Exception | None = None
        self.noted: list[str] = []

    def keep(self, key: Any, made: Any) -> None:
        self.prepared[key] = made

    def raise_if_broken(self, op: str | None = None, inside: int = 0, grids: tuple[int, ...] = ()) -> None:
        if self.error is not None:
            raise self.error
        if op is not None:
            self.noted.append(op)

    def record_launch(self, op: str, shape: Any) -> None:
        flight_recorder.launched(op, NAME, shape, None)

    def next_buffer(self) -> int:
        return 1

    def abandon(self, cause: BaseException) -> None:
        self.error = symm_mem.WeftError(f"a call was ended by {cause!r}")


class Stage:
    """A group with a heap on the GPU. Calls on the slow path come to one on the CPU, and end there: ``TAKEN``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.workspace, self.workspaces = gpu, Workspace(), CachedDict[Any, Any]()
        self.where: Any = SimpleNamespace(
            workspaces=self.workspaces, world_size=WORLD_SIZE, group_name=NAME, lock=threading.RLock(),
            device=torch.device("cuda", 0), prepare=lambda name, *_: self.together.append(name),
            backend=SimpleNamespace(over_pcie=False),
        )  # fmt: skip
        self.together: list[str] = []  # the names under which ranks would have made something together
        for kind in (*AROUND_MATMULS, ALL_REDUCE):
            self.workspaces[kind, STREAM, 0] = self.workspace
        self.begin_group()
        register_heap(self.group, "cuda", 0, self.where)

    def begin_group(self) -> None:
        dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
        self.group = dist.group.WORLD

        def refuse(op: str | None = None) -> None:
            raise symm_mem.WeftError("this is the slow path")

        slow: Any = SimpleNamespace(fault=SimpleNamespace(raise_if_broken=refuse))
        register_heap(self.group, "cpu", -1, slow)

    @property
    def launched(self) -> list[tuple[Any, ...]]:
        return self.workspace.prepared.launched

    def remember(self, kernel: Any, *call: Any, ran: str = "push", alignment: int = ALIGNMENT) -> None:
        """A call was made: op, arguments, tensors, results."""
        op, arguments, given, results = call
        ready = PreparedKernel(self.workspace, kernel, plan.Plan(ran))
        remember_call(op, (arguments, given), given, results, ready, alignment)


def run_on_cuda(op: ModuleType, where: Any, *call: Any, group: Any = None, given: Any = None) -> Any:
    """A call on the slow path, of what validation returns; or why no kernel takes it.

    Args:
        op: its module.
        given: the call as it was made, if it was another one.
    """
    rank = getattr(where, "rank", 0)
    group = group or SimpleNamespace(size=lambda: where.world_size, rank=lambda: rank, group_name="")
    made = given or call[0]
    choice = replace(op._choose_on_cuda(*call, group), known=OP_OF[op.OP].known_by(made))
    return choice.reason if choice.is_unfused else OP_OF[op.OP].run(choice, where, *call, group)


def assert_slow(call: Callable[[], Any]) -> None:
    """``call`` takes the slow path, on which it ends, or runs unfused."""
    plan.ran(plan.Plan("none"))
    ended = ""
    try:
        call()
    except SLOW as e:
        ended = str(e)
    assert re.search(TAKEN, ended) or (not ended and plan.last_plan().algorithm == "unfused"), ended


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    gpu = Gpu()
    monkeypatch.setattr(cuda_state, "state", gpu)
    plan.num_sms.cache_clear()
    call_cache.invalidate_calls()  # what another test has found is of another GPU
    made = Stage(gpu)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    plan.num_sms.cache_clear()
    call_cache.invalidate_calls()
