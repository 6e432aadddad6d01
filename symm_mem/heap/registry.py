"""The heap of each group; the state of all of a group's memory, and its reset."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from ... import hooks
from .. import forks
from ..bootstrap.rendezvous import Rendezvous
from ..call_cache import CachedDict
from ..errors import HeapUnavailable, WeftError
from ..groups import WITHOUT_PROCESSES, Group, native_backends, resolve_group, without_processes
from ..switches import is_on
from ..timeouts import ThreadLock, get_timeout, preparing_timeout
from .heap import Heap
from .overflow import raise_noted

# A ProcessGroup keeps its store, and that listens: nothing here may keep one beyond destroy_process_group.
GroupRef: TypeAlias = weakref.ref[ProcessGroup]
_heaps: CachedDict[tuple[str, str, int], tuple[GroupRef, Heap | HeapUnavailable]] = CachedDict()
# By heap and process: threads may make those of different groups in any order, and in a forked child they are gone.
_making: dict[Any, ThreadLock] = {}


def get_heap(group: Group = None, device: torch.device | str | None = None) -> Heap:
    """The heap of ``group`` on ``device`` (default: as for ``empty``). The first call is collective.

    Raises:
        HeapUnavailable: the ranks cannot address each other's memory: several hosts, no peer access, a
            process group without processes; or two of them share a GPU and WEFT_SHARE_GPUS is not 1; or the check
            failed that is made over PCIe, and with WEFT_UNTESTED=1 of kernels that were never run on such GPUs. Every
            rank gets the same answer, at once from then on; after a reset ranks try again.
        ForkedProcess: this process was forked from the one that joined the group.
        ValueError, TypeError: there is no such group, or no longer, ``device`` is neither a CUDA device that is there
            nor the CPU, or WEFT_SHARE_GPUS is neither 0 nor 1.
    """
    pg = resolve_group(group)
    forks.refuse_child(pg, "heap")
    where = _device(device) if device is not None else default_device(pg)
    key = _key(pg, where)
    known = _heaps.get(key)
    if known is None or known[0]() is not pg:  # a name may be used again after destroy_process_group
        _refuse_missing(where)
        _forget_destroyed()
        with _making.setdefault((*key, forks.pid), _lock_of(pg)):
            known = _heaps.get(key)
            if known is None or known[0]() is not pg:
                _refuse_destroyed(pg)
                known = register_heap(pg, where.type, key[2], _make(pg, where))
    found = known[1]
    if isinstance(found, HeapUnavailable):
        raise HeapUnavailable(str(found))
    return found


def _lock_of(pg: ProcessGroup) -> ThreadLock:
    name = pg.group_name
    return ThreadLock(f"the making of what group {name!r} shares", lambda: preparing_timeout(name))


def register_heap(
    pg: ProcessGroup, device_type: str, index: int, made: Heap | HeapUnavailable
) -> tuple[GroupRef, Heap | HeapUnavailable]:
    """What ``get_heap`` returns from now on, until the group is destroyed. ``index``: -1 on the CPU."""
    key, known = (pg.group_name, device_type, index), (weakref.ref(pg), made)
    _heaps[key] = known
    forks.finalize(pg, _forget, key, known)
    return known


def _key(pg: ProcessGroup, where: torch.device) -> tuple[str, str, int]:
    index = where.index
    if index is None:
        index = torch.cuda.current_device() if where.type == "cuda" and torch.cuda.is_available() else -1
    return pg.group_name, where.type, index


def known_heap_of(group: Group, device: torch.device | str | None) -> Heap | None:
    """The heap that ``get_heap`` would return at once.

    Raises:
        ValueError, TypeError: there is no such group or device.
    """
    pg = resolve_group(group)
    known = _heaps.get(_key(pg, _device(device) if device is not None else default_device(pg)))
    return known[1] if known is not None and known[0]() is pg and isinstance(known[1], Heap) else None


def why_no_heap(group: ProcessGroup, device: torch.device) -> str | None:
    """Why ``get_heap`` would find none, if an earlier call has found that; else None."""
    known = _heaps.get(_key(group, device))
    there = known is not None and known[0]() is group and isinstance(known[1], HeapUnavailable)
    return str(known[1]) if known is not None and there else None


def known_heap(group_name: str, device: int) -> tuple[GroupRef, Heap] | None:
    """The heap on a CUDA device, or the CPU's (-1), that ``get_heap`` would return at once, for the group that has this
    name now."""
    known = _heaps.get((group_name, "cpu" if device < 0 else "cuda", device))
    if known is None or isinstance(known[1], HeapUnavailable):
        return None
    return (known[0], known[1]) if has_name(known[0](), group_name) else None


def heaps_of(group: ProcessGroup) -> list[Heap]:
    """Those that this rank has made for the group, on whatever device."""
    return [found for of, found in list(_heaps.values()) if of() is group and isinstance(found, Heap)]


def has_name(group: ProcessGroup | None, name: str) -> bool:
    """Whether this is the group that torch knows by this name now. After destroy_process_group it may be another.

    ``group``: None if nobody has kept it since.
    """
    try:
        return _resolve_process_group(name) is group  # type: ignore[arg-type]
    except Exception:  # destroyed
        return False


def _refuse_destroyed(pg: ProcessGroup) -> None:
    if pg.name() not in WITHOUT_PROCESSES and not has_name(pg, pg.group_name):
        raise ValueError(f"group: {pg.group_name!r} has been destroyed, must be a group that torch knows")


def _device(device: torch.device | str) -> torch.device:
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device: is {device!r}, must be a torch.device or its name")
    try:
        found = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device: torch knows none that is called {device!r}") from e
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: is {str(found)!r}, must be a CUDA device or the CPU")
    # "cpu:0" is no other device, and no tensor's.
    return found if found.type == "cuda" else torch.device("cpu")


def _refuse_missing(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        count = torch.cuda.device_count()  # 0: other ranks may have some, and hear why there is no heap
        if 0 < count <= device.index:
            raise ValueError(
                f"device: is {str(device)!r}, must be one of the {count} GPUs that this process sees"
            )


def _forget_destroyed() -> None:
    """Let go of the heaps of groups that a program keeps and has destroyed; others went with their group."""
    for key, known in list(_heaps.items()):
        if not has_name(known[0](), key[0]):
            _forget(key, known)


def _forget(key: tuple[str, str, int], known: tuple[GroupRef, Heap | HeapUnavailable]) -> None:
    """Let go of a destroyed group's heap. Its memory lives on while tensors lie in it. Runs in finalizers: no lock."""
    if _heaps.get(key) is known:
        _heaps.pop(key, None)
        for made in (key, (key[0], "reset")):
            _making.pop((*made, forks.pid), None)


def _make(pg: ProcessGroup, device: torch.device) -> Heap | HeapUnavailable:
    if (name := without_processes(pg)) is not None:
        return HeapUnavailable(f"no heap for group {pg.group_name!r}: its backend {name!r} has no processes")
    checked = device.type == "cuda" and is_on("WEFT_UNTESTED")
    try:
        made = Heap(pg, device)
        if checked or made.backend.over_pcie:
            hooks.check_new_heap(made)
        return made
    except HeapUnavailable as e:
        return e


def unavailable(group: Group = None, device: torch.device | str | None = None) -> str | None:
    """Why ``group`` has no heap on ``device``; None if it has one. The first call is collective.

    >>> from weft import symm_mem
    >>> print(symm_mem.unavailable())
    None

    Args:
        group: name, ProcessGroup, 1-D DeviceMesh or (mesh, dim); default the default group.
        device: as for ``empty``.

    Returns:
        the reason, the same on every rank; ops then run unfused.

    Raises:
        ForkedProcess, ValueError, TypeError: as ``empty``.
    """
    _forget_destroyed()
    try:
        get_heap(group, device)
    except HeapUnavailable as e:
        return str(e)
    return None


def check(group: Group = None) -> None:
    """Raise what a wait of this rank has run into: for programs that only replay CUDA graphs.

    >>> from weft import symm_mem
    >>> symm_mem.check()  # nothing has happened

    Otherwise the next call says so. It reads host memory only: for the state up to now, synchronize first. Of a group
    the first wait that has expired is raised, of several groups the first one of all. Groups that have been destroyed
    are over: nothing is raised for them, and what they still hold is released.

    Args:
        group: look at this one only; default every group.

    Raises:
        PeerTimeout: a wait on a peer has expired in a workspace of an op, or in the signals of a tensor.
        ForkedProcess: this process was forked from the one that joined a group.
        ValueError: rows of ``moe_dispatch`` did not fit on a GPU, in whatever group.
    """
    _forget_destroyed()
    raise_noted()
    wanted = None if group is None else resolve_group(group)
    if wanted is not None:
        forks.refuse_child(wanted, "check")
    first: tuple[int, WeftError] | None = None
    for of, found in list(_heaps.values()):
        fault = found.fault if isinstance(found, Heap) and wanted in (None, of()) else None
        if fault is not None:
            try:
                fault.raise_if_broken("check")
            except WeftError as e:
                if first is None or fault.broken_at < first[0]:
                    first = fault.broken_at, e
    if first is not None:
        raise first[1].again()


def reset(group: Group = None) -> None:
    """Make a group's memory usable again after an error. Collective: every rank of the group must call it.

    >>> import torch
    >>> from weft import symm_mem
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> before = one_shot_all_reduce(torch.ones(4), "sum", None)
    >>> symm_mem.reset()  # after a PeerTimeout, say
    >>> torch.equal(one_shot_all_reduce(torch.ones(4), "sum", None), before)
    True

    Waits until this rank's work is done, then counts every flag, signal and call of the group from 0 again, on all
    ranks before any of them returns. Tensors keep their memory and what is in it, captured graphs stay valid (but for
    one that an error interrupted while it was captured), other groups do not notice. What ranks did before the reset
    and others did not is over: they go on with the same call.

    Args:
        group: name, ProcessGroup, 1-D DeviceMesh or (mesh, dim); default the default group.

    Raises:
        PeerTimeout: a rank does not come, or has posted an abort notice. The group may be reset again; if the ranks had
            joined already, it is broken until then.
        ForkedProcess: this process was forked from the one that joined the group.
        ValueError: there is no such group, or no longer.
        WeftError: a rank is capturing a CUDA graph, or has lost its device.
    """
    pg = resolve_group(group)
    if without_processes(pg) is not None:
        return
    forks.refuse_child(pg, "reset")
    _forget_destroyed()
    _refuse_destroyed(pg)
    lock = _making.setdefault((pg.group_name, "reset", forks.pid), _lock_of(pg))
    with lock:  # one thread at a time resets it
        _reset(pg)


def _reset(pg: ProcessGroup) -> None:
    heaps = _named_heaps(pg)
    here = Rendezvous(pg, "reset", lambda: get_timeout(pg.group_name))
    for known in heaps.values():
        here.processes = known.rendezvous.processes
    with here.poison_on_error("reset"):
        session = here.join("reset")
        everywhere = set.intersection(*map(set, here.gather("reset", sorted(heaps))))
        for name in sorted(heaps):
            if name in everywhere:
                heaps[name].reset(here, f"{session}/{name}")
    for key, (owner, found) in list(_heaps.items()):
        # A heap that another rank failed to make. Or why there is none: that may have been mended, too.
        if owner() is pg and not any(found is heaps[n] for n in everywhere):
            del _heaps[key]


def _named_heaps(pg: ProcessGroup) -> dict[str, Heap]:
    """A group's heaps under names that do not tell the ranks' devices apart."""
    named: dict[str, Heap] = {}
    for key, (owner, found) in sorted(_heaps.items(), key=lambda item: item[0]):
        if owner() is pg and isinstance(found, Heap):
            nth = sum(name.startswith(key[1]) for name in named)
            named[f"{key[1]} {nth}"] = found
    return named


def default_device(pg: ProcessGroup) -> torch.device:
    """torch's default device if that is a GPU; else the current one for a group with NCCL, the CPU for others."""
    if (default := torch.get_default_device()).type == "cuda":
        return default
    _refuse_destroyed(pg)
    return torch.device("cuda" if "nccl" in native_backends(pg) else "cpu")
