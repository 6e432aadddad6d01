// signal, wait, put and get between registered tensors (symm_mem/registration/semaphores.py has the words).
//
// Each kernel counts in a word of this rank's that no other rank writes: n = count + 1 is the number of this signal, wait
// or access, so a captured graph goes on counting when it is replayed, as eager calls do.
//
// post. Writes n, or with step = 0 the count as it is, into one word of the peer's; release, system scope: what came
// before it on the stream, copies by copy engines too, is visible to whoever acquires it.
//
// await. Who waits: one thread, until a word of this rank's that the peer writes has reached n; acquire, system scope.
// After it on the stream may come copies by copy engines, and a `post` of its count.
//
// move. Both, and between them the data: each block waits for the word, copies its vectors, and the last block of all
// posts n, after every block's fence. Blocks wait for nothing but the peer. What a put sends is this rank's own, and is
// loaded before the wait ends.
//
// post_all, await_all, move_all. Several of these at once. The former have a thread for each; of move_all each has blocks,
// words and a ticket of its own. All blocks run at once, so none waits for the place of another.
//
// A wait that expires, here or earlier, breaks the group: then nothing is moved and nothing posted. Copies that are
// enqueued after `await` cannot be called off. Graph-safe. docs/protocol.md#registered-tensors has the proof.

#include "ptx/dependent.cuh"
#include "ptx/sync.cuh"

struct Transfer {
    weft::u32* count;  // this rank's own
    weft::u32* told;  // of the peer's, which gets n; null: nobody is told
    weft::u32* ticket;  // zero between launches
    const uint4* source;
    uint4* target;
    weft::u64 vectors;
    weft::u32 awaited;  // index of the awaited word from watch.words
    weft::u32 peer;
    weft::u32 tail;  // bytes after the vectors
    weft::u32 step;  // of `post`: 1, or 0 if the access is counted already
    weft::u32 first;  // of `move_all`: its first block
    weft::u32 blocks;  // of `move` and `move_all`
    weft::u32 ours;  // whether the source is this rank's own, which nobody has to let it read
    weft::u32 reserved;
};

struct Params {
    weft::WaitParams watch;
    Transfer of;
};

constexpr int MOST_AT_ONCE = 32;

struct Batch {
    weft::WaitParams watch;
    weft::u32 transfers;
    weft::u32 reserved;
    Transfer of[MOST_AT_ONCE];
};

__device__ __forceinline__ void post_one(const weft::WaitParams& watch, const Transfer& p) {
    const bool broken = weft::is_broken(watch);
    const weft::u32 n = *p.count + p.step;
    if (!broken) weft::post_flag(p.told, n);
    *p.count = n;  // after the release, which would wait for it
}

__device__ __forceinline__ void await_one(const weft::WaitParams& watch, const Transfer& p) {
    const weft::u32 n = *p.count + 1;
    *p.count = n;
    weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE);
}

extern "C" __global__ void __launch_bounds__(32) post(const __grid_constant__ Params p) {
    weft::begin_after_previous();
    if (threadIdx.x == 0) post_one(p.watch, p.of);
}

extern "C" __global__ void __launch_bounds__(32) await(const __grid_constant__ Params p) {
    weft::begin_after_previous();
    if (threadIdx.x == 0) await_one(p.watch, p.of);
}

extern "C" __global__ void __launch_bounds__(32) post_all(const __grid_constant__ Batch p) {
    weft::begin_after_previous();
    if (threadIdx.x < p.transfers) post_one(p.watch, p.of[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(32) await_all(const __grid_constant__ Batch p) {
    weft::begin_after_previous();
    if (threadIdx.x < p.transfers) await_one(p.watch, p.of[threadIdx.x]);
}

constexpr int MOST_THREADS = 1024;
constexpr int AT_ONCE = 4;  // vectors of a thread that are under way together

// Block `block` of the transfer's.
__device__ __forceinline__ void move_part(const weft::WaitParams& watch, const Transfer& p, weft::u32 block) {
    __shared__ bool allowed;
    weft::begin_after_previous();
    const weft::u64 step = static_cast<weft::u64>(p.blocks) * blockDim.x;
    weft::u64 at = static_cast<weft::u64>(block) * blockDim.x + threadIdx.x;
    uint4 held[AT_ONCE];
    const auto load = [&] {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (at + i * step < p.vectors) held[i] = weft::load_vector(p.source + at + i * step);
    };
    const weft::u32 n = *p.count + 1;  // the last block counts, when all have read it
    if (p.ours) load();  // they come while the word is awaited
    if (threadIdx.x == 0) {
        const bool broken = weft::is_broken(watch);  // so does this
        allowed = weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE) && !broken;
    }
    __syncthreads();
    if (allowed) {
        if (!p.ours) load();
        while (at < p.vectors) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (at + i * step < p.vectors) weft::store_vector(p.target + at + i * step, held[i]);
            at += step * AT_ONCE;
            load();
        }
        if (block == 0 && threadIdx.x < p.tail) {
            const char* from = reinterpret_cast<const char*>(p.source + p.vectors);
            reinterpret_cast<char*>(p.target + p.vectors)[threadIdx.x] = from[threadIdx.x];
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const bool broken = weft::is_broken(watch);  // read while the stores are on their way
    if (p.blocks > 1) {
        weft::fence_system();
        if (atomicAdd(p.ticket, 1) != p.blocks - 1) return;
        weft::fence_system();  // after the tickets: what the other blocks have fenced comes before the post
        if (!broken) weft::post_after_fence(p.told, n);
        *p.ticket = 0;
    } else if (!broken) {
        weft::post_flag(p.told, n);
    }
    *p.count = n;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) move(const __grid_constant__ Params p) {
    move_part(p.watch, p.of, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) move_all(const __grid_constant__ Batch p) {
    weft::u32 i = 0;
    while (i + 1 < p.transfers && blockIdx.x >= p.of[i + 1].first) ++i;
    move_part(p.watch, p.of[i], blockIdx.x - p.of[i].first);
}
