"""Which workspace a call uses: one for each (heap, kind, stream), and for each (heap, kind, stream) of a captured graph.

Calls of one stream follow each other and share; calls that may run at once do not. A workspace grows when a call needs
more: collectively, so all ranks must make their calls in the same order, as with every collective.
"""

from __future__ import annotations

import threading

import torch

from ..symm_mem import Block, Heap, Layout, Workspace

_GRAIN = 1 << 20  # bytes; sizes that differ by less share a workspace

_lock = threading.RLock()
_gemm: dict[tuple[int, int, int], Workspace] = {}
_kept: list[Workspace | Block] = []  # outgrown ones that a captured graph still writes to


def stream_key(heap: Heap) -> tuple[int, int]:
    """The stream of this call, and the graph it is being captured into (0: none)."""
    if heap.device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(heap.device).cuda_stream
    if not torch.cuda.is_current_stream_capturing():
        return stream, 0
    from cuda.bindings import driver

    from ..symm_mem.backends.vmm import check

    return stream, int(check(driver.cuStreamGetCaptureInfo(stream))[1])


def gemm_workspace(heap: Heap, half_bytes: int, flags: int) -> Workspace:
    """The workspace of this stream for the ops around a matrix product, with room for one call.

    Args:
        half_bytes: what the call writes into one half.
        flags: words for each rank and half.

    Raises:
        RankMismatch, PeerTimeout: the ranks do not grow it together.
    """
    key = (id(heap), *stream_key(heap))
    found = _gemm.get(key)
    if found is not None and found.layout.half_bytes >= half_bytes and found.layout.flags_per_rank >= flags:
        return found
    with _lock:
        old = found.layout if found is not None else Layout(heap.world_size, 64, 0)
        half = max(old.half_bytes, -(-half_bytes // _GRAIN) * _GRAIN)
        layout = Layout(heap.world_size, max(old.flags_per_rank, -(-flags // 64) * 64), half)
        if found is not None and key[2]:
            _kept.append(found)
        _gemm[key] = Workspace(heap, layout, f"workspace {layout}")
        return _gemm[key]
