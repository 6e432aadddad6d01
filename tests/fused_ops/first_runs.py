"""First runs of calls on a GPU that is none: they make their launchers, load what these launch, and end there."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpu import Gpu
from torch.utils._pytree import tree_map_only
from weft.fused_ops.ops import OP_OF
from weft.symm_mem.backends import cuda_state

CUDA = torch.device("cuda", 0)


class Function:
    """A kernel that is prepared and not launched."""

    def most_clusters(self, *_: Any) -> int:
        return 1

    def bound(self, *_: Any, **__: Any) -> Any:
        return None


class Driver(Gpu):
    """``loaded``: the programs that launchers have asked for."""

    def __init__(self, *, compiles: bool = False) -> None:
        super().__init__()
        self.loaded: list[Any] = []
        self._compiles = compiles

    def index_of(self, x: torch.Tensor) -> int:
        return 0 if x.is_cuda else -1

    def function(self, program: Any, name: str, shared: int) -> Any:
        self.loaded.append(program)
        if self._compiles:
            program.cubin()
        return Function()

    def tensor_map(self, *tiled: Any) -> bytes:
        return bytes(128)

    def own_stream(self, owner: object, device: torch.device) -> int:
        return 0


class MadeError(Exception):
    """The launcher is made."""


class Workspace:
    """It has the layout that the call wants, and lies nowhere."""

    address, span, meets = 0, 1 << 40, True

    def __init__(self, heap: Any) -> None:
        self.heap, self.rank, self.world_size = heap, heap.rank, heap.world_size
        self.layout: Any = SimpleNamespace(holds=self._takes)
        self.prepared: dict[Any, Any] = {}
        self.copy_streams: dict[Any, Any] = {}
        self.words = torch.empty(1, dtype=torch.int32)
        self.fault = SimpleNamespace(address=0, record=0, words=self.words)
        self.lock = threading.RLock()

    def _takes(self, wanted: Any) -> bool:
        self.layout = wanted
        return True

    def raise_if_broken(self, *_: Any, **__: Any) -> None:
        """Nothing has happened."""

    def buffer(self, rank: int, buffer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.empty(shape, dtype=dtype)

    def keep(self, key: Any, made: Any) -> None:
        raise MadeError


class Workspaces(dict[Any, Any]):
    """One for each call."""

    heap: Any = None

    def get(self, key: Any, default: Any = None) -> Any:
        return Workspace(self.heap)


def heap_of(group: dist.ProcessGroup, *, over_pcie: bool) -> Any:
    workspaces = Workspaces()
    workspaces.heap = SimpleNamespace(
        device=CUDA, workspaces=workspaces, world_size=group.size(), rank=group.rank(),
        group_name=group.group_name, prepare=lambda op, same, make: make(),
        backend=SimpleNamespace(over_pcie=over_pcie),
    )  # fmt: skip
    return workspaces.heap


def loaded_at_first_run(
    op: Any, args: Any, kwargs: Any, *, compiles: bool = False, over_pcie: bool = False
) -> list[Any]:
    """The programs that a call of ``torch.ops.weft`` loads; its tensors are fake, on CUDA.

    Args:
        compiles: they are compiled, too.
        over_pcie: it is how the ranks reach each other.
    """
    of, driver = OP_OF[op._schema.name.removeprefix("weft::")], Driver(compiles=compiles)
    args, kwargs = tree_map_only(torch.SymInt, int, (args, kwargs))
    found = of.validate(of.record(*args, **kwargs))
    mode = found[0][0].fake_mode
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), mode:
        patch.setattr(cuda_state, "state", driver)
        choice = of.choose(*found)
        if choice.is_unfused:
            return []
        with pytest.raises(MadeError):
            of.run(choice, heap_of(found[-1], over_pcie=over_pcie), *found)
    return driver.loaded
