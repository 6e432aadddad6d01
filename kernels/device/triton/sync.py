"""Waiting and posting inside Triton kernels: every flag, fence and deadline, and all inline assembly.

Words are those of a ``Workspace`` (symm_mem/workspace.py), compared ``>=`` modulo 2^32. Epochs are read from device
memory and the host resets nothing: graph-safe. Every thread of a block computes a scalar expression of Triton, so each
thread acquires for itself: no barrier is needed between a wait and the loads after it.

A wait that expires writes one record of eight 64-bit words to pinned host memory, ``[1, workspace, peer, word,
expected, seen, kind, when]``, the leading 1 last, and sets ``fault[BROKEN]``, which all workspaces of the group share
(symm_mem/failure/fault.py). From then on every wait on this rank gives up at once, and kernels run to their end.
docs/protocol.md#deadlines, #poison-on-error
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....symm_mem.failure.fault import Fault
from ....symm_mem.layout import Layout

WAIT_DATA = tl.constexpr(1)  #: kind of a record: a peer's data did not arrive
WAIT_FREE = tl.constexpr(2)  #: kind of a record: a peer did not end the last epoch of its buffer
ABORTED = tl.constexpr(3)  #: kind of a record: a peer posted an abort notice, see abort_notice.cuh

BROKEN = tl.constexpr(Fault.BROKEN)
EPOCH = tl.constexpr(Layout.EPOCH)
LEFT = tl.constexpr(Layout.LEFT)
ABORT_NOTICE = tl.constexpr(Fault.ABORT_NOTICE)

LOAD_ACQUIRE = tl.constexpr("ld.acquire.sys.global.u32 $0, [$1];")
LOAD_RELAXED = tl.constexpr("ld.relaxed.sys.global.u32 $0, [$1];")
STORE_RELEASE = tl.constexpr(
    "{ .reg .u32 thread; .reg .pred first; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
    " @first st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }"
)
STORE_HOST = tl.constexpr("st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0;")
SET_ONCE = tl.constexpr("atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;")
CLOCK = tl.constexpr("mov.u64 $0, %globaltimer;")
FENCE_SYSTEM = tl.constexpr("fence.acq_rel.sys; mov.u32 $0, 0;")
FENCE_PROXY_ASYNC = tl.constexpr("fence.proxy.async; mov.u32 $0, 0;")
TMA_STORE_WAIT_ALL = tl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@triton.jit
def fence_proxy_async():
    """Order what this thread saw or wrote by plain accesses against its TMA accesses, either way round.

    Between an acquire and a TMA load of what another GPU wrote, and between TMA stores and their release.
    """
    tl.inline_asm_elementwise(FENCE_PROXY_ASYNC, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def tma_store_wait_all():
    """Wait until the TMA stores that this thread issued are visible where they went, not merely read."""
    tl.inline_asm_elementwise(TMA_STORE_WAIT_ALL, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def block_barrier():
    """A barrier of the block: what its threads did before is ordered before what any does after."""
    tl.debug_barrier()


@triton.jit
def load_acquire(flag):
    """A word that any GPU may write: acquire, system scope, by every thread."""
    return tl.inline_asm_elementwise(LOAD_ACQUIRE, "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def post_flag(flag, value):
    """Write a word that any GPU may read: release, system scope, by the block's first thread alone.

    Covers the writes of that thread, and those of the block's others if a ``block_barrier`` lies between.
    """
    tl.inline_asm_elementwise(STORE_RELEASE, "=r,l,r", [flag, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_flag(words, fault, index, expected, peer, kind, record, timeout_ns):
    """Wait until ``words[index] >= expected``; acquire, system scope, by every thread.

    Who writes: ``peer``, by a release (or a copy engine, after its data). Returns nothing: after an expiry
    the block goes on without what it waited for, see above. TMA loads of the data need a
    ``fence_proxy_async`` in between.
    """
    seen = load_acquire(words + index)
    if seen - expected < 0:
        start = _clock()
        waiting = True
        while waiting:
            seen = load_acquire(words + index)
            if (seen - expected >= 0) | (_load_relaxed(fault + BROKEN) != 0):
                waiting = False
            elif _clock() - start > timeout_ns:
                _report(words, fault, index, expected, seen, peer, kind, record)
                waiting = False


@triton.jit
def wait_peers(
    words,
    fault,
    index,
    stride,
    expected,
    kind,
    record,
    timeout_ns,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Wait until ``words[index + p * stride] >= expected`` for every other rank p: as ``wait_flag`` on each.

    The usual case, nothing to wait for, takes one latency for all ranks: relaxed loads, then one fence.
    """
    late = False
    for peer in tl.static_range(WORLD_SIZE):
        if peer != RANK:
            late = late | (_load_relaxed(words + index + peer * stride) - expected < 0)
    if late:
        for other in range(WORLD_SIZE):
            if other != RANK:
                wait_flag(words, fault, index + other * stride, expected, other, kind, record, timeout_ns)
    tl.inline_asm_elementwise(FENCE_SYSTEM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def is_broken(fault):
    """Whether a wait of the group has expired on this rank, the same answer for every thread of this block.

    Sees every expiry of this block's own threads that lies before the call.
    """
    block_barrier()
    return tl.atomic_add(fault + BROKEN, 0, sem="acquire", scope="gpu") != 0


@triton.jit
def post_stored(flag, value):
    """``post_flag`` for what this block's TMA stores wrote: waits until they have arrived."""
    tma_store_wait_all()
    fence_proxy_async()
    block_barrier()
    post_flag(flag, value)


@triton.jit
def leave_block(
    words,
    fault,
    buffer,
    done_at,
    epoch,
    rank,
    record,
    span_words,
    WORLD_SIZE: tl.constexpr,
    COPIED: tl.constexpr,
):
    """The end of a block in the launch that ends ``epoch`` of the buffer: call it last, in every block.

    The last block to come writes ``EPOCH[buffer]``, and ``done(buffer)[rank] = epoch`` at every rank; release, system
    scope. Whoever reads that may overwrite this rank's buffer. Where copy engines write the buffer (COPIED) it checks
    for abort notices before (abort_notice.cuh): their senders may have overwritten what was read.
    """
    block_barrier()  # other threads' reads of the buffer are before this thread's count
    before = tl.atomic_add(words + LEFT + buffer, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        if COPIED:
            for peer in range(WORLD_SIZE):
                said = load_acquire(fault + ABORT_NOTICE + peer)
                if (said != 0) & (peer != rank):
                    _report(words, fault, done_at + peer, epoch, said, peer, ABORTED, record)
        tl.store(words + LEFT + buffer, 0)
        tl.store(words + EPOCH + buffer, epoch)
        for peer in range(WORLD_SIZE):
            post_flag(words + done_at + rank + tl.cast(peer - rank, tl.int64) * span_words, epoch)


@triton.jit
def _clock():
    return tl.inline_asm_elementwise(CLOCK, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _load_relaxed(word):
    return tl.inline_asm_elementwise(LOAD_RELAXED, "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store_host(record, index, value):
    place = (tl.cast(record, tl.int64) + index * 8).to(tl.pointer_type(tl.int64))
    value = tl.cast(value, tl.int64)
    tl.inline_asm_elementwise(STORE_HOST, "=r,l,l", [place, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _report(words, fault, index, expected, seen, peer, kind, record):
    """By any thread: the one that sets BROKEN writes the record."""
    blamed = tl.where(kind == ABORTED, seen, 1 + peer)
    taken = tl.inline_asm_elementwise(
        SET_ONCE, "=r,l,r", [fault + BROKEN, blamed], tl.int32, is_pure=False, pack=1
    )
    if taken == 0 and record != 0:
        _store_host(record, 1, words.to(tl.int64, bitcast=True))
        _store_host(record, 2, peer)
        _store_host(record, 3, index)
        _store_host(record, 4, expected)
        _store_host(record, 5, seen)
        _store_host(record, 6, kind)
        _store_host(record, 7, _clock())
        tl.inline_asm_elementwise(FENCE_SYSTEM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        _store_host(record, 0, 1)
