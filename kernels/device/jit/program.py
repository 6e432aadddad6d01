"""CUDA C++ from source to launch: NVRTC compiles, a cubin cache on disk keeps, the driver loads and launches.

    program = Program(Path("kernel.cu"), defines={"WORLD_SIZE": 4})
    program.function("one_shot").launch(blocks, threads, params, stream)

Compiling needs neither a GPU nor a driver. A kernel takes one argument, a struct by value, whose twin here is
a ``ctypes.Structure``: packing it is all that a launch costs on top of the driver's call.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from cuda.bindings import driver, nvrtc

from ....symm_mem.backends import cuda_state
from ....symm_mem.backends.vmm import bind_context, check_driver, relaxed_capture
from ..capability import ARCHS, HOPPER, arch_of, capability_of
from .ahead import count_program, tell_of_compilation

Defines: TypeAlias = dict[str, str | int]

_HERE = torch.device("cuda")  # the current device
DEVICE_FOLDER = Path(__file__).parents[1]

# WEFT_NVRTC_OPTIONS adds some, such as --generate-line-info for a profiler.
_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    # Sources are given as text: NVRTC would look for headers in the process's folder.
    "--no-source-include",
    *os.environ.get("WEFT_NVRTC_OPTIONS", "").split(),
)
_ANY_SHARED = 48 << 10  # bytes of shared memory that any kernel may take
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_DIGEST = hashlib.sha256().digest_size


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Those of a ``ctypes.Structure`` that are of one kind, in their order."""
    return [(name, kind) for name in names.split()]


class WaitParams(ctypes.Structure):
    """What a kernel needs for its waits; the twin of ``weft::WaitParams`` in sync.cuh."""

    _fields_ = (
        *fields(ctypes.c_uint64, "words fault record timeout_ns"),
        *fields(ctypes.c_int32, "rank reserved"),
    )

    @staticmethod
    def of(place: WorkspaceLike, timeout_ns: int = 0) -> WaitParams:
        """Of a workspace; a wait for a peer expires after ``timeout_ns`` nanoseconds."""
        return WaitParams(place.address, place.fault.address, place.fault.record, timeout_ns, place.rank)


class WorkspaceLike(Protocol):
    """A ``Workspace``."""

    fault: Any
    address: int
    rank: int


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


class Function:
    """A kernel, loaded into the CUDA context that was current when it was asked for."""

    def __init__(self, name: str, handle: driver.CUfunction) -> None:
        self.name = name
        self._handle = handle

    def most_clusters(self, cluster: int, block: int, shared: int) -> int:
        """How many clusters of ``cluster`` blocks of ``block`` threads the current device runs at once."""
        config = _launch_config(cluster, block, shared)
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        config.attrs, config.numAttrs = [size], 1
        return int(check_driver(driver.cuOccupancyMaxActiveClusters(self._handle, config)))

    def launch(self, grid: int, block: int, args: ctypes.Structure, stream: int, shared: int = 0) -> None:
        """Launch ``grid`` blocks of ``block`` threads on ``stream`` (a CUstream as an integer).

        ``args`` is the kernel's one argument; it may be changed or dropped as soon as this returns.

        Raises:
            RuntimeError: the driver refuses, in its words.
        """
        self.bound(grid, block, args, shared)(stream)

    def bound(
        self, grid: int, block: int, args: ctypes.Structure, shared: int = 0, *, dependent: bool = False
    ) -> Callable[[int], None]:
        """The same launch with only the stream left open. It keeps ``args``, and takes what then stands in it.

        ``dependent``: by programmatic dependent launch, from Hopper on; the kernel waits for the one before it by
        itself.
        """
        places = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        address, handle, launch = ctypes.addressof(places), self._handle, driver.cuLaunchKernel
        success = driver.CUresult.CUDA_SUCCESS
        if dependent and capability_of(_HERE) >= HOPPER:
            config, launch_as = _launch_config(grid, block, shared), driver.cuLaunchKernelEx
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1

            def run_early(stream: int, _keep: object = (args, places)) -> None:
                config.hStream = stream
                (error,) = launch_as(config, handle, address, 0)
                if error != success:
                    self._launch_in_context(error, lambda: launch_as(config, handle, address, 0))

            return run_early

        def run(stream: int, _keep: object = (args, places)) -> None:
            (error,) = launch(handle, grid, 1, 1, block, 1, 1, shared, stream, address, 0)
            if error != success:
                again = partial(launch, handle, grid, 1, 1, block, 1, 1, shared, stream, address, 0)
                self._launch_in_context(error, again)

        return run

    def _launch_in_context(self, error: driver.CUresult, launch: Callable[[], tuple[Any, ...]]) -> None:
        """After a first try: a thread without a context gets one, and the launch is made again."""
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            bind_context()
            (error,) = launch()
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launch of {self.name}: {_driver_error(error)}")


def _launch_config(grid: int, block: int, shared: int) -> driver.CUlaunchConfig:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared
    return config


class Program:
    """A .cu file with its defines, for one architecture, by default the current device's. Nothing is compiled before it
    is needed."""

    def __init__(
        self, path: Path, arch: str | None = None, defines: Mapping[str, str | int] | None = None
    ) -> None:
        self.path = Path(path)
        self._arch = arch
        self.defines = dict(defines or {})
        self._lock = threading.Lock()
        self._cubins: dict[str, bytes] = {}
        self._modules: dict[int, Any] = {}  # context -> module
        self._functions: dict[tuple[int, str], Function] = {}

    @property
    def arch(self) -> str:
        return self._arch or arch_of(_HERE)

    def cubin(self) -> bytes:
        """The compiled program, from the cache on disk if it is there; of a virtual architecture its PTX. Needs no
        driver.

        Raises:
            CompileError: NVRTC refuses the source.
        """
        arch = self.arch
        with self._lock:
            if arch not in self._cubins:
                self._cubins[arch] = _cached(self, arch)
            return self._cubins[arch]

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name} with {self.defines}"

    def function(self, name: str, shared: int = 0) -> Function:
        """The kernel ``name`` (``extern "C"``) in the current CUDA context. Allowed while a graph is captured.

        ``shared``: the most dynamic shared memory that a launch of it takes, in bytes.

        Raises:
            CompileError: NVRTC refuses the source.
            RuntimeError: the driver refuses the program, or it has no such kernel.
        """
        found: Function = cuda_state.state.function(self, name, shared)
        return found

    def load(self, name: str, shared: int) -> Function:
        """As ``function``, by the driver; loaded once for each context."""
        context = bind_context()
        found = self._functions.get((context, name))
        if found is not None:
            return found
        cubin = self.cubin()
        with self._lock, relaxed_capture():
            if context not in self._modules:
                self._modules[context] = check_driver(driver.cuModuleLoadData(cubin))
            handle = check_driver(driver.cuModuleGetFunction(self._modules[context], name.encode()))
            # Loading is lazy, and a load inside a capture would end the capture: do it here.
            check_driver(driver.cuFuncLoad(handle))
            if shared > _ANY_SHARED:
                most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check_driver(driver.cuFuncSetAttribute(handle, most, shared))
            return self._functions.setdefault((context, name), Function(name, handle))


@cache
def program_of(path: Path, **defines: str | int) -> Program:
    """That of a source and its defines, always the same object."""
    return Program(path, defines=defines)


def cache_folder() -> Path:
    """Where cubins are kept: WEFT_CACHE_DIR, else ~/.cache/weft.

    Raises:
        OSError: there is no home directory.
    """
    if named := os.environ.get("WEFT_CACHE_DIR"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "weft"
    except RuntimeError as e:
        raise FileNotFoundError(f"no folder for a cache, WEFT_CACHE_DIR may name one: {e}") from e


def write_whole(place: Path, content: bytes) -> None:
    """All or nothing: readers never see a part of the file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def compile_cubin(
    path: Path, arch: str = ARCHS[HOPPER], defines: Mapping[str, str | int] | None = None
) -> bytes:
    """Compile a .cu file with NVRTC, without any cache; for a virtual architecture, such as "compute_80", to PTX.

    Includes are looked for next to the file and in kernels/device.

    Raises:
        CompileError: with NVRTC's log.
    """
    options = [
        *_OPTIONS,
        f"--gpu-architecture={arch}",
        f"--include-path={path.parent}",
        f"--include-path={DEVICE_FOLDER}",
        *(f"--define-macro={name}={value}" for name, value in (defines or {}).items()),
    ]
    program = _nvrtc(nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_nvrtc(nvrtc.nvrtcGetProgramLogSize(program)))
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.rstrip(b"\0").decode(errors="replace").strip()
            raise CompileError(f"{path} for {arch} with {dict(defines or {})}: {error.name}\n{text}")
        if arch.startswith("compute_"):
            size, get = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        else:
            size, get = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
        cubin = bytearray(_nvrtc(size(program)))
        _nvrtc(get(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cached(program: Program, arch: str) -> bytes:
    name = f"{program.path.parent.name}-{program.path.stem}-{_key(program, arch)}.cubin"
    try:
        stored = (cache_folder() / name).read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            count_program(kept=True)
            return stored[_DIGEST:]
    except OSError:
        pass
    tell_of_compilation(program)
    cubin = compile_cubin(program.path, arch, program.defines)
    count_program()
    with contextlib.suppress(OSError):  # without a cache the program runs all the same
        write_whole(cache_folder() / name, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _key(program: Program, arch: str) -> str:
    digest = hashlib.sha256()
    version = _nvrtc(nvrtc.nvrtcVersion())
    for part in (version, arch, sorted(program.defines.items()), _OPTIONS):
        digest.update(repr(part).encode() + b"\0")
    for source in _sources(program.path):
        digest.update(source + b"\0")
    return digest.hexdigest()[:32]


def _sources(path: Path) -> list[bytes]:
    """The text of a file and of all it includes by a name in quotes, each once."""
    found: dict[Path, bytes] = {}

    def visit(file: Path) -> None:
        if file in found:
            return
        found[file] = file.read_bytes()
        for name in _INCLUDE.findall(found[file].decode()):
            for folder in (file.parent, path.parent, DEVICE_FOLDER):
                if (folder / name).is_file():
                    visit((folder / name).resolve())
                    break

    visit(path.resolve())
    return list(found.values())


def _nvrtc(result: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, or a RuntimeError with NVRTC's own words."""
    error, *values = result
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, text = nvrtc.nvrtcGetErrorString(error)
        raise RuntimeError(f"{error.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if len(values) == 1 else values


def _driver_error(error: Any) -> str:
    _, text = driver.cuGetErrorString(error)
    return f"{error.name}: {text.decode() if text else 'unknown error'}"
