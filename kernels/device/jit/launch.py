"""From tensors to a running Triton kernel: which tensors it can take, and launches that are cheap.

Triton encodes every tensor descriptor anew at each launch, and looks its kernel up by the types of all
arguments. A ``Launch`` is made once for a problem; it keeps the compiled kernel, and one encoded descriptor for
each address it has met.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ....symm_mem.backends import cuda_state
from ....symm_mem.errors import PATIENT, tell_progress
from ....symm_mem.layout import Layout
from ....symm_mem.workspace import Workspace
from ..triton.tile_table import TritonTile
from .ahead import count_program

# Later versions hand the launcher its arguments in another form: there every launch takes the slow path.
LAUNCHER_IS_KNOWN = triton.__version__.startswith("3.6.")

# Multiply-adds are fused: Triton 3.6's default, given explicitly so that it does not depend on the version.
FIXED_OPTIONS = {"enable_fp_fusion": True}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: what a descriptor asks of addresses and of all strides but the last
_MOST_ADDRESSES = 256  # descriptors kept for each operand before all are dropped
_log = logging.getLogger("weft.ops")
_MOST_STRIDE = 1 << 40  # bytes; the stride between two ranks' copies of the heap counts, too


def is_transposed(b: torch.Tensor) -> bool:
    """Whether a [K, N] matrix lies in memory as [N, K]: the weight of a Linear layer, transposed."""
    return b.stride(0) == 1 and b.stride(1) != 1


def precision(dtype: torch.dtype) -> str:
    """float32 operands are multiplied as they are, never rounded to fewer bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def why_not(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why ``a @ b`` cannot be fed to a kernel through descriptors; None if it can.

    Args:
        a: [..., K], at most 4-D, the last dimension contiguous.
        b: [K, N], rows or columns contiguous.
    """
    if a.dtype not in DTYPES:
        return f"dtype: is {a.dtype}, must be one of {', '.join(map(str, DTYPES))}"
    if b.dtype != a.dtype:
        return f"dtype: A has {a.dtype} and B has {b.dtype}, must be the same"
    if a.numel() == 0 or b.numel() == 0:
        return f"shape: A {tuple(a.shape)} and B {tuple(b.shape)}, must not be empty"
    k, n = b.shape
    for name, size in (("K", k), ("N", n)):
        if size * a.dtype.itemsize % ALIGNMENT:
            return f"{name}: rows of {size} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    rows = b.t() if is_transposed(b) else b
    for name, matrix in (("A", a), ("B", rows)):
        if problem := _why_not_rows(matrix):
            return f"{name}: {problem}"
    return None


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """As ``why_not``.

    Raises:
        ValueError: it says something.
    """
    if (problem := why_not(a, b)) is not None:
        raise ValueError(f"{op}: {problem}")


def _why_not_rows(x: torch.Tensor) -> str | None:
    if x.stride(-1) != 1:
        return f"strides {x.stride()}, one dimension must be contiguous"
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        step = stride * x.dtype.itemsize
        if size > 1 and (step <= 0 or step % ALIGNMENT or step >= _MOST_STRIDE):
            return f"strides {x.stride()}, must be positive multiples of {ALIGNMENT} bytes but for the last"
    fake = isinstance(x, torch._subclasses.FakeTensor) or x.device.type == "meta"
    start = x.storage_offset() * x.dtype.itemsize if fake else x.data_ptr()
    if start % ALIGNMENT:
        return f"starts {start % ALIGNMENT} bytes after a multiple of {ALIGNMENT}"
    return None


@dataclass(frozen=True)
class Operand:
    """What a descriptor says of a tensor whatever its address: sizes, strides in elements, sizes of a tile."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Operand:
        # The stride of a dimension of size 1 may be anything, yet a descriptor checks it.
        legal = tuple(
            ALIGNMENT if size == 1 and i + 1 < len(shape) else stride
            for i, (size, stride) in enumerate(zip(shape, strides, strict=True))
        )
        return Operand(tuple(shape), legal, tuple(block))

    @staticmethod
    def of_b(b: torch.Tensor, tile: TritonTile) -> Operand:
        """Of B [K, N], or as it lies in memory [N, K]."""
        if is_transposed(b):
            return Operand.of(b.t().shape, b.t().stride(), (tile.block_n, tile.block_k))
        return Operand.of(b.shape, b.stride(), (tile.block_k, tile.block_n))

    @staticmethod
    def contiguous(shape: Sequence[int], block: Sequence[int]) -> Operand:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return Operand.of(shape, strides[::-1], block)

    def describe(self, tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(self.shape), list(self.strides), list(self.block))


class _Mode(threading.local):
    compiles_only = False


_mode = _Mode()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside the body every ``Launch`` of this thread compiles and loads its kernel and launches nothing.

    Allowed while a CUDA graph is captured: none of it goes into the graph.
    """
    from ....symm_mem.backends.vmm import relaxed_capture

    with relaxed_capture():
        _mode.compiles_only = True
        try:
            yield
        finally:
            _mode.compiles_only = False


_compile_lock = threading.RLock()


@contextmanager
def _counted(kernel: Any) -> Iterator[None]:
    """Counts what the body compiles of a kernel, or takes from Triton's cache on disk: the variants that it keeps."""
    caches = getattr(kernel, "device_caches", {})  # the interpreter has none
    before, begin = sum(len(each[0]) for each in caches.values()), time.monotonic()
    yield
    made = sum(len(each[0]) for each in caches.values()) - before
    for _ in range(made):
        count_program()
    # Before, it is not known whether Triton has kept it.
    if made and (took := time.monotonic() - begin) > PATIENT:
        tell_progress(_log, f"compiled {kernel.__name__} in {took:.0f} s")


class Launch:
    """Launches of one kernel on one problem: the same numbers every time, tensors at any address.

    The kernel's parameters are, in this order: a descriptor for each operand, tensors, numbers, constants.
    Numbers that change from launch to launch must be ones that the kernel does not specialise on.
    """

    def __init__(
        self, kernel: Any, operands: Sequence[Operand], constants: dict[str, Any], warps: int, stages: int
    ) -> None:
        self.kernel, self.operands, self.constants = kernel, tuple(operands), constants
        self._options = {"num_warps": warps, "num_stages": stages, **FIXED_OPTIONS}
        self._constants = tuple(constants.values())
        self._encoded: list[dict[int, list[Any]]] = [{} for _ in operands]
        self._fast: Callable[..., None] | None = None
        self._device = -1

    def __call__(
        self,
        programs: int,
        described: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
    ) -> None:
        """Launch ``programs`` blocks on the current stream of the current device; inside ``compiling``, none."""
        if _mode.compiles_only:
            compiled = self._compiled(described, tensors, numbers)
            if compiled is not None:
                _ = compiled.run  # loads it
            return
        if self._fast is not None and not _hooked():
            flat: list[Any] = []
            for i, tensor in enumerate(described):
                flat += self._encoded[i].get(tensor.data_ptr()) or self._encode(i, tensor)
            stream = driver.active.get_current_stream(self._device)
            addresses = [tensor.data_ptr() for tensor in tensors]
            self._fast(programs, stream, *flat, *addresses, *numbers, *self._constants)
            return
        descriptors = [o.describe(t) for o, t in zip(self.operands, described, strict=True)]
        with _counted(self.kernel):
            compiled = self.kernel[(programs,)](
                *descriptors, *tensors, *numbers, **self.constants, **self._options
            )
        if compiled is not None and hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            self._keep(compiled)

    def _compiled(self, described: Sequence[Any], tensors: Sequence[Any], numbers: Sequence[int]) -> Any:
        """The kernel, compiled for such arguments, which have a dtype and an address."""
        descriptors = [o.describe(t) for o, t in zip(self.operands, described, strict=True)]
        with _compile_lock, _counted(self.kernel):  # also what a thread compiles ahead
            return self.kernel.warmup(
                *descriptors, *tensors, *numbers, grid=(1,), **self.constants, **self._options
            )

    def _keep(self, compiled: Any) -> None:
        run = compiled.run
        launcher = raw_launcher(getattr(run, "launch", None)) if LAUNCHER_IS_KNOWN else None
        descriptions = getattr(compiled.metadata, "tensordesc_meta", None)
        if launcher is None or not descriptions or run.global_scratch_size or run.profile_scratch_size:
            return
        self._descriptions = descriptions
        self._device = driver.active.get_current_device()
        function, packed = compiled.function, compiled.packed_metadata
        fixed = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None)

        def fast(programs: int, stream: int, *arguments: Any) -> None:
            launcher(programs, 1, 1, stream, *fixed, *arguments)

        self._fast = fast

    def _encode(self, i: int, tensor: torch.Tensor) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        known = self._encoded[i]
        if len(known) >= _MOST_ADDRESSES:
            known.clear()
        encoded = make_tensordesc_arg(self.operands[i].describe(tensor), self._descriptions[i])
        return known.setdefault(tensor.data_ptr(), encoded)


ANY_SPAN = 1 << 40  #: bytes between two ranks' copies of a heap, where it is not known
#: The numbers that a kernel takes of a workspace, as far as it is compiled for them: the buffer, where its flags are,
#: flags of each rank, where the end of its epoch is, words between two ranks' copies, the record, and nanoseconds.
LIKE_A_WORKSPACE = (0, 64, 64, 64, ANY_SPAN // 4, ANY_SPAN, ANY_SPAN)


def workspace_numbers(workspace: Workspace[Layout], buffer: int, timeout_ns: int) -> tuple[int, ...]:
    """The same of a workspace."""
    w, layout = workspace, workspace.layout
    places = layout.flags(buffer), layout.flags_per_rank, layout.done(buffer)
    return (buffer, *places, w.span // 4, w.fault.record, timeout_ns)


@dataclass(frozen=True)
class TritonProgram:
    """What a launch would compile, known from the types of its tensors: for ``Compilation``."""

    launch: Launch
    types: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]  # of described tensors, and of others
    numbers: tuple[int, ...]
    device: torch.device

    def compile(self) -> None:
        """Compiles it for the GPU that it is for, which must be there."""
        from triton.runtime.jit import MockTensor

        described, tensors = ([MockTensor(dtype) for dtype in kind] for kind in self.types)
        with cuda_state.state.make_current(self.device):
            self.launch._compiled(described, tensors, self.numbers)

    def __str__(self) -> str:
        return f"{self.launch.kernel.__name__} with {self.launch.constants}"


def _hooked() -> bool:
    """Whether a profiler wants to hear of launches: those go through Triton, which tells it."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


def raw_launcher(launch: Any) -> Callable[..., None] | None:
    """The C launcher inside the closure by which Triton 3.6 encodes descriptors; None if there is none."""
    if not inspect.isfunction(launch):
        return None
    return inspect.getclosurevars(launch).nonlocals.get("launcher")
