// Waiting and posting inside CUDA C++ kernels: every flag, fence and deadline.
//
// Control words are 32-bit, have one writer and only grow, modulo 2^32. The host resets none, and no epoch is a kernel
// argument: graph-safe.
//
// A wait that expires writes one record of eight 64-bit words to pinned host memory,
// [1, workspace, peer, word, expected, seen, kind, when], the leading 1 last, and sets fault[BROKEN], which all
// workspaces of the group share (symm_mem/failure/fault.py). From then on every wait on this rank gives up after a few
// polls, and kernels that begin send nothing. docs/protocol.md#deadlines, #poison-on-error

#pragma once

namespace weft {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int BROKEN = 0;  // index in fault: 1 + the rank that was waited for in vain
constexpr int WAIT_DATA = 1;  // kind of a record: a peer's data did not arrive
constexpr int WAIT_FREE = 2;  // kind of a record: a peer did not end the last epoch of its buffer
constexpr int ABORTED = 3;  // kind of a record: a peer posted an abort notice, see abort_notice.cuh

// What a kernel needs for its waits, passed by value. The host's twin is `WaitParams` in program.py.
struct WaitParams {
    u32* words;  // the workspace's control words on this rank
    u32* fault;  // the words that it shares with the group's other workspaces
    u64* record;  // pinned host memory, or null
    u64 timeout_ns;
    int rank;
    int reserved;
};

// A word that any GPU or copy engine may write. Acquire, system scope: what its writer released before it
// is visible to this thread afterwards.
__device__ __forceinline__ u32 load_acquire(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// Acquire and release, system scope. (__threadfence_system orders fences among each other, too.)
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// A word that any GPU may read. Release, system scope: covers this thread's earlier writes, and those of the
// block's others if a __syncthreads lies between.
__device__ __forceinline__ void post_flag(u32* word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// The same of a thread after its own fence, which serves any number of flags.
__device__ __forceinline__ void post_after_fence(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// A word of data at a peer, which a fence or a release orders after it.
__device__ __forceinline__ void store_word(u32* place, u32 value) { *place = value; }

// The block's barrier `id`, from 1 on, of `threads` threads, whole warps: arrive and wait, or only arrive.
__device__ __forceinline__ void barrier_sync(int id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, u32 threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// LL data: each 32-bit word is written once and whole, the four of a vector in no order, so the reader must look at
// each. Relaxed, system scope: it orders nothing around it.
__device__ __forceinline__ uint4 load_payload(const uint4* slot) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(slot)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_payload(uint4* slot, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Loads again where `wanted`, else v stays: a load without a branch around it.
__device__ __forceinline__ void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
        "@p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(slot), "r"(static_cast<u32>(wanted))
        : "memory");
}

// The same of single words, whose 0 says that nothing has come: exact.cuh. The reset is by the thread that has read it.
__device__ __forceinline__ u32 load_payload_word(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_payload_word(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void reset_payload_word(u32* word) {
    asm volatile("st.global.u32 [%0], 0;" ::"l"(word) : "memory");
}

// Memory that no other GPU writes to at the same time. They stay in the order in which they are written here:
// a load is under way before what follows it.
__device__ __forceinline__ uint4 load_vector(const uint4* place) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_vector(uint4* place, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// The same of what is not used again soon: L2 gives it up before all else.
__device__ __forceinline__ void store_vector_once(uint4* place, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_vector(uint2* place, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// 1 + the rank for which a wait of the group has expired on this rank; 0 if none has.
__device__ __forceinline__ u32 broken_by(const WaitParams& watch) { return load_relaxed(watch.fault + BROKEN); }

// Whether a wait of the group has expired on this rank. For a kernel that is about to send.
__device__ __forceinline__ bool is_broken(const WaitParams& watch) { return broken_by(watch) != 0; }

__device__ __forceinline__ u32 set_once(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ void store_host(u64* place, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// By any thread: the one that sets BROKEN writes the record.
__device__ __noinline__ void report(
    const WaitParams& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
    if (set_once(watch.fault + BROKEN, kind == ABORTED ? seen : 1 + peer) != 0 || watch.record == nullptr) return;
    store_host(watch.record + 1, reinterpret_cast<u64>(watch.words));
    store_host(watch.record + 2, static_cast<u64>(peer));
    store_host(watch.record + 3, word);
    store_host(watch.record + 4, expected);
    store_host(watch.record + 5, seen);
    store_host(watch.record + 6, static_cast<u64>(kind));
    store_host(watch.record + 7, nanoseconds());
    __threadfence_system();
    store_host(watch.record, 1);
}

// Bounds a loop that polls. The clock and BROKEN are looked at every 32nd time only: both cost as much as a
// poll, and nearly every wait ends before.
struct Deadline {
    u64 start = 0;
    u32 polls = 0;

    // After each failed poll. True: leave the loop; the kernel goes on without what it waited for. `word` is the index
    // of what was waited for, in 32-bit words from watch.words.
    __device__ __forceinline__ bool expired(
        const WaitParams& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
        return should_poll() && overdue(watch, peer, word, expected, seen, kind);
    }

    // The two steps of `expired`, for callers that look only then for what is missing.
    __device__ __forceinline__ bool should_poll() { return ++polls % 32 == 0; }

    __device__ __forceinline__ bool overdue(
        const WaitParams& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
        if (is_broken(watch)) return true;
        if (!has_passed(watch)) return false;
        report(watch, peer, word, expected, seen, kind);
        return true;
    }

    // Whether the deadline has passed, without a record: callers may have no registers for a call of `report`.
    __device__ __forceinline__ bool has_passed(const WaitParams& watch) {
        const u64 now = nanoseconds();
        if (start == 0) start = now;
        return now - start > watch.timeout_ns;
    }
};

// Whether a word has reached `expected`. Data flags cannot be past it, and may be 2^31 epochs old: equality.
__device__ __forceinline__ bool reached(u32 seen, u32 expected, int kind) {
    return kind == WAIT_DATA ? seen == expected : static_cast<int>(seen - expected) >= 0;
}

// Waits until words[word] has reached `expected`. Acquire, system scope, for the calling thread.
// Who writes: `peer`, by a release (or a copy engine, after its data). False: the wait has expired.
__device__ __forceinline__ bool wait_flag(const WaitParams& watch, int peer, u32 word, u32 expected, int kind) {
    Deadline deadline;
    for (;;) {
        const u32 seen = load_acquire(watch.words + word);
        if (reached(seen, expected, kind)) return true;
        if (deadline.expired(watch, peer, word, expected, seen, kind)) return false;
    }
}

}  // namespace weft
