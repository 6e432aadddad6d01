// all_gather(A) @ B in one kernel, which sends the local rows while it computes.
//
// Computes C[src] = A[src] @ B for every rank src: A[src] [m, K] are the rows of rank src, B [K, N] is this rank's, C
// [W, m, N]. Up to MOST_BS matrices B share one A. Accumulators are float32. With SPLIT_K shards lie side by side along
// K: B is [W, K, N], and C [m, N] the sum of A[src] @ B[src] in rank order, so ranks with equal B get equal bits; with
// ALL_TO_ALL, too, each rank gets rows of its own of every rank's A [W, m, K].
//
// With RETURN_A also writes the gathered A, [W, m, K], with SPLIT_K [m, W * K]: whoever computes a tile stores its share
// of the rows of A that it has loaded for that.
//
// Of fp8 operands (gemm/sm90/scales.cuh) the local rows' scales, if each rank has its own, travel with the first chunk of
// their rows, under its flag, to [W, S, m] after the buffer's rows; S: a scale for each row, or one a block of K.
// Products are scaled and get a bias.
//
// Who writes: pushing warps, chunks of CHUNK_ROWS x CHUNK_COLUMNS of the local rows into slot `rank` of every peer's
// buffer [W, m, K]; after a system fence the block's posting warp sets flags(buffer)[rank][chunk] = e there. Every
// block has one pushing warp, or (`comm_sms`) the first blocks send everything with all their warps before they
// compute.
// Who waits: pushing warps, for done(buffer)[p] >= e - 1 of every peer; warp 2 of every block, for the flags of each
// k-chunk (K_CHUNK_COLUMNS) of a peer's rows, acquire and fence.proxy.async; it counts them for the loader, warp 0. The
// last block whose loads are consumed ends the epoch (weft::leave), if `final`. Graph-safe. Blocks wait for what others
// push, never for others' tiles: where every block has a pushing warp, these draw their shares, so a block that has
// found no room on the GPU is not waited for; the first `comm_sms` must find some.
// docs/protocol.md#all-gather--matmul has the proof, and why tiles and chunks come in this order.

// Per thread; data that is pushed passes through them.
#define SERVE_REGISTERS 72
#include "gemm/gemm.cuh"
#include "comm/rate_limiter.cuh"
#include "returning.cuh"
#include "tile_order.cuh"
#ifdef FP8_TYPES
#include "gemm/sm90/scales.cuh"
#endif

using weft::CHUNKS;
using weft::CHUNKS_K;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int MOST_BS = 4;
constexpr int PUSHERS = weft::THREADS / 32 - 1;  // warps of a communication SM that push; the last one posts
// Bytes per nanosecond of all pushing warps: what the links carry where several ranks send to one, and between two.
constexpr u64 RATE = 328, RATE_OF_TWO = 345;
// Which of s.counts: k-chunks of peers' rows that have arrived, in the loader's order; and, of each pushing warp from
// SENT on, chunks that have been sent.
constexpr int ARRIVED = 0, SENT = 1;
constexpr int ORDER = SENT + PUSHERS;  // where the order stands among them
constexpr int SHARE = weft::COUNTS - 4;  // 1 + the share that the pushing warp has drawn
constexpr int POSTED = weft::COUNTS - 3;  // shares whose flags are posted

static_assert(weft::CHUNKS <= 32, "a lane waits for each");
static_assert(BM % CHUNK_ROWS == 0 && K_CHUNK_COLUMNS % CHUNK_COLUMNS == 0 && K_CHUNK_COLUMNS % weft::BK == 0);

struct Params {
    weft::TensorMap own;  // A [1, 1, m, K], with ALL_TO_ALL [1, W, m, K], boxes of a stage
    weft::TensorMap gathered;  // the local buffer [1, W, m, K], boxes of a stage
    weft::TensorMap returned;  // with RETURN_A [1, W, m, K], boxes of a warpgroup's rows of a stage
    weft::TensorMap b[MOST_BS];  // with SPLIT_K [W, K, N] each
    weft::WaitParams watch;
    weft::BufferWords buffer;
    const weft::u16* a;  // A [m, K], with ALL_TO_ALL [W, m, K], rows `stride` elements apart
    weft::u16* data;  // the local buffer [W, m, K]
    weft::u16* c[MOST_BS];  // [W, m, N], with SPLIT_K [m, N]
    int n[MOST_BS];
    int bs;  // how many
    int columns[MOST_BS];  // of tiles, of each
    int m, k, stride;
    int raster_group;  // pairs of local rows of tiles in a raster group
    int remote_raster_group;  // and of the peers'
    int group;  // rows of tiles of a rank that are sent together
    int comm_sms;  // blocks that send first
    int skipped_steps;  // steps that each of the others takes meanwhile, after the first wave
    int first_wave;  // steps of the first wave
    int push;  // every block sends while it computes
    int final;  // this launch ends the epoch
#ifdef FP8_TYPES
    int reserved[12];
    const float* own_scales;  // one, or [S, m]
    const float* scales;  // one, or [W, S, m]: where they arrive, or those of all ranks' rows
    u32* arriving;  // where they arrive, if they travel, else null
    int blocks;  // S
    int of_blocks;  // from a rank's scales to the next one's
    weft::Scales of_b[MOST_BS];
#endif
};

using Order = weft::GatherTileScheduler<Params>;
using Chunk = weft::GatherChunk<Params>;
using Tile = weft::GatherTile;
using Steps = weft::GatherSteps;
static_assert(sizeof(Order) <= (SHARE - ORDER) * sizeof(u32));
#ifdef FP8_TYPES
constexpr int DRAINED = weft::COUNTS - 2;  // whether a warpgroup has read its last scale
#endif

__device__ __forceinline__ Steps steps_of(const Params& p, const Order& order) {
    const int first_wave = min(p.first_wave, order.own_pairs * order.columns);
    return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), p.comm_sms, p.skipped_steps, first_wave};
}

#if OUT_FLOAT32
using Out = float;
#else
using Out = weft::u16;
#endif
#ifdef FP8_TYPES
// By all lanes of a pushing warp: the scales of a chunk's rows to all peers.
__device__ __forceinline__ void push_scales(const Params& p, const Chunk& chunk) {
    const int world_size = p.buffer.world_size, rank = p.watch.rank, end = min(chunk.row + CHUNK_ROWS, p.m);
#pragma unroll 1
    for (int block = 0; block < p.blocks; ++block) {
#pragma unroll 1
        for (int row = chunk.row + threadIdx.x % 32; row < end; row += 32) {
            const u32 scale = __ldg(reinterpret_cast<const u32*>(p.own_scales) + static_cast<u64>(block) * p.m + row);
            u32* slot = p.arriving + (static_cast<u64>(rank) * p.blocks + block) * p.m + row;
#pragma unroll 1
            for (int peer = 0; peer < world_size; ++peer) {
                if (peer != rank) weft::store_word(weft::on_rank(slot, p.watch, p.buffer, peer), scale);
            }
        }
    }
}

__device__ __forceinline__ weft::TileScales scales_of(const Params& p, const Tile& t) {
    const float* a = t.src == p.watch.rank ? p.own_scales : p.scales + static_cast<u64>(t.src) * p.of_blocks;
    return {p.of_b[t.b], a, p.m, t.row * BM, p.m, t.column * BN, p.n[t.b]};
}
#endif

// Pushing warp `pusher` of the launch's `pushers`: its chunks, from the local rows to all peers. Ordinary stores: where
// bulk copies wait for a link, the same SM's loads queue after them.
__device__ __forceinline__ void push(
    const Params& p, const Order& order, u32 epoch, int pusher, int pushers, u32* sent) {
    const int lane = threadIdx.x % 32, world_size = p.buffer.world_size, rank = p.watch.rank;
    if (!weft::may_send(p.watch, p.buffer, epoch)) {
        if (lane == 0) weft::set_count(sent, weft::CLOSED);
        return;
    }
    constexpr int LANES = CHUNK_COLUMNS / 8;  // of a row of a chunk
    constexpr int ROWS = 32 / LANES;  // at once
    constexpr int VECTORS = CHUNK_ROWS / ROWS < 8 ? CHUNK_ROWS / ROWS : 8;  // of a lane, in flight at once
    static_assert(CHUNK_ROWS % (ROWS * VECTORS) == 0);
    const u64 from_stride = static_cast<u64>(ROWS) * p.stride, to_stride = static_cast<u64>(ROWS) * p.k;
    weft::RateLimiter limiter{VECTORS * 32 * 16 * static_cast<u64>(pushers) / (world_size > 2 ? RATE : RATE_OF_TWO)};
    u32 count = 0;
    for (int index = pusher; index < order.chunks; index += pushers) {
        const Chunk chunk(p, order, index);
        const int column = chunk.column + lane % LANES * 8;
#ifdef FP8_TYPES
        if (p.arriving != nullptr && chunk.inside && chunk.column == 0) push_scales(p, chunk);
#endif
        if (chunk.inside && column < p.k) {
#pragma unroll 1
            for (int row = chunk.row + lane / LANES; row < chunk.row + CHUNK_ROWS; row += ROWS * VECTORS) {
                uint4 v[VECTORS];
                const int left = p.m - row;
                const auto load = [&](u64 first) {
                    const weft::u16* from = p.a + (first + row) * p.stride + column;
#pragma unroll
                    for (int i = 0; i < VECTORS; ++i) {
                        if (i * ROWS < left) v[i] = __ldg(reinterpret_cast<const uint4*>(from + i * from_stride));
                    }
                };
                if (!ALL_TO_ALL) load(0);
                weft::u16* slot = p.data + (static_cast<u64>(rank) * p.m + row) * p.k + column;
#pragma unroll 1
                for (int offset = 1; offset < world_size; ++offset) {
                    const int peer = rank >= offset ? rank - offset : rank - offset + world_size;
                    weft::u16* to = weft::on_rank(slot, p.watch, p.buffer, peer);
                    if (ALL_TO_ALL) load(static_cast<u64>(peer) * p.m);
                    limiter.wait();
#pragma unroll
                    for (int i = 0; i < VECTORS; ++i) {
                        if (i * ROWS < left) *reinterpret_cast<uint4*>(to + i * to_stride) = v[i];
                    }
                }
            }
        }
        __syncwarp();
        if (lane == 0) weft::set_count(sent, ++count);
    }
}

// The posting warp of a block, for its `mine` pushing warps from number `first` on, a lane each: as many flags after
// one fence as there are, as it takes microseconds. (With a release after every chunk, links were idle half of the
// time.)
__device__ __forceinline__ void post(
    const Params& p, const Order& order, u32 epoch, int first, int mine, int pushers, const u32* sent) {
    const int lane = threadIdx.x % 32, rank = p.watch.rank;
    u32* flags = p.watch.words + p.buffer.flags + rank * p.buffer.flags_per_rank;
    u32 posted = 0;
    int index = lane < mine ? first + lane : order.chunks;
    while (__any_sync(~0u, index < order.chunks)) {
        const u32 there = lane < mine ? weft::read_count(sent + lane) : 0;
        if (there == weft::CLOSED) index = order.chunks;
        const bool more = index < order.chunks && there > posted;
        if (!__any_sync(~0u, more)) {
            __nanosleep(40);  // as in wait_count
            continue;
        }
        __threadfence_system();
        if (!more) continue;
        for (; posted < there; ++posted, index += pushers) {
            const Chunk chunk(p, order, index);
            if (!chunk.inside) continue;
            for (int peer = 0; peer < p.buffer.world_size; ++peer) {
                if (peer == rank) continue;
                weft::post_after_fence(weft::on_rank(flags, p.watch, p.buffer, peer) + chunk.flag, epoch);
            }
        }
    }
}

// The pushing warp of a block, where every block has one: shares of one in gridDim.x chunks, as it draws them. A block
// that is there from the beginning draws one, and then those of blocks that are not.
__device__ __forceinline__ void push_shares(const Params& p, const weft::Shared& s, const Order& order, u32 epoch) {
    const int lane = threadIdx.x % 32;
    for (u32 pushed = 0;; ++pushed) {
        u32 share = 0;
        if (lane == 0) {
            share = atomicAdd(p.watch.words + p.buffer.drawn, 1);
            weft::wait_count(s.counts + POSTED, pushed);
            weft::set_count(s.counts + SENT, 0);
            weft::set_count(s.counts + SHARE, share + 1);
        }
        share = __shfl_sync(~0u, share, 0);
        if (share >= gridDim.x) return;
        push(p, order, epoch, share, gridDim.x, s.counts + SENT);
    }
}

__device__ __forceinline__ void post_shares(const Params& p, const weft::Shared& s, const Order& order, u32 epoch) {
    u32 share = 0;
    for (u32 posted = 1; (share = weft::wait_count(s.counts + SHARE, share + 1)) <= gridDim.x; ++posted) {
        post(p, order, epoch, share - 1, 1, gridDim.x, s.counts + SENT);
        __syncwarp();
        if (threadIdx.x % 32 == 0) weft::set_count(s.counts + POSTED, posted);
    }
}

// A communication SM's block, before it computes.
__device__ __forceinline__ void send(const Params& p, const weft::Shared& s, const Order& order, u32 epoch) {
    const int warp = weft::warp_of_block(), first = blockIdx.x * PUSHERS, pushers = p.comm_sms * PUSHERS;
    if (warp < PUSHERS) {
        push(p, order, epoch, first + warp, pushers, s.counts + SENT + warp);
    } else {
        post(p, order, epoch, first, PUSHERS, pushers, s.counts + SENT);
    }
}

// The shards of tile `t`, in the order in which they are loaded, waited for and multiplied.
template <typename Each>
__device__ __forceinline__ void each_part(const Params& p, const Tile& t, const Each& each) {
    if constexpr (SPLIT_K) {
        for (int src = 0; src < p.buffer.world_size; ++src) each(src);
    } else {
        each(t.src);
    }
}

// Warp 0: loads the operands of the compute warpgroups.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, const Order& order) {
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::PipelineState<STAGES> state;
    u32 needed = 0;
    for (Steps steps = steps_of(p, order); steps.step < order.steps(); steps.next()) {
        const Tile t = order.tile(p, steps.step, s.block);
        each_part(p, t, [&](int src) {
            const bool own = src == p.watch.rank;
            const weft::Rows rows{t.row * BM, own && !ALL_TO_ALL ? 0 : src, 0};
            const weft::TensorMap& a = own ? p.own : p.gathered;
            for (int i = 0; i < depth; ++i) {
                if (!own && i % (K_CHUNK_COLUMNS / weft::BK) == 0) weft::wait_count(s.counts + ARRIVED, ++needed);
                weft::load_stage(s, state, a, rows, p.b[t.b], t.column * BN, i * weft::BK, src);
            }
        });
    }
    weft::drain(s, state);
#ifdef FP8_TYPES
    // Scales that have arrived are read after the last stage.
    for (int i = 0; i < 2; ++i) weft::wait_count(s.counts + DRAINED + i, 1);
#endif
}

// Warp 2: counts the k-chunks of peers' rows that have arrived, in the loader's order. It runs ahead of the loader,
// which the poll and the fence, some microseconds for each k-chunk, would hold up.
__device__ __forceinline__ void count_arrivals(const Params& p, const weft::Shared& s, const Order& order, u32 epoch) {
    const int lane = threadIdx.x % 32;
    u32 arrived = 0;
    for (Steps steps = steps_of(p, order); steps.step < order.steps(); steps.next()) {
        const Tile t = order.tile(p, steps.step, s.block);
        const int row = t.row * BM + lane / CHUNKS_K * CHUNK_ROWS;
        each_part(p, t, [&](int src) {
            if (src == p.watch.rank) return;
            for (int k_chunk = 0; k_chunk < order.k_chunks; ++k_chunk) {
                const int column = k_chunk * K_CHUNK_COLUMNS + lane % CHUNKS_K * CHUNK_COLUMNS;
                if (lane < CHUNKS && row < p.m && column < p.k) {
                    const int flag = (t.row * order.k_chunks + k_chunk) * CHUNKS + lane;
                    weft::wait_flag(
                        p.watch, src, p.buffer.flags + src * p.buffer.flags_per_rank + flag, epoch, weft::WAIT_DATA);
                }
                weft::fence_proxy_async();
                __syncwarp();
                if (lane == 0) weft::set_count(s.counts + ARRIVED, ++arrived);
            }
        });
    }
}

#if RETURN_A
using MainloopHook = weft::Returning<Params>;
#else
struct MainloopHook : weft::NoMainloopHook {
    __device__ __forceinline__ MainloopHook(const Params&, const Tile&, int) {}
};
#endif

#if TENSOR_MEMORY
// Warp 12: has the tensor cores multiply.
__device__ __forceinline__ void issue(const Params& p, const weft::Shared& s, const Order& order) {
    const int depth = (p.k + weft::BK - 1) / weft::BK * (SPLIT_K ? p.buffer.world_size : 1);
    weft::Issuer issuer(s);
    for (Steps steps = steps_of(p, order); steps.step < order.steps(); steps.next()) {
        const Tile t = order.tile(p, steps.step, s.block);
        issuer.multiply(depth, MainloopHook(p, t, 0), MainloopHook(p, t, 4));
    }
    issuer.end();
}
#endif

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    all_gather_matmul(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    // In shared memory: there are no registers to keep it in.
    Order& order = *reinterpret_cast<Order*>(s.counts + ORDER);
    const u32 epoch = p.watch.words[p.buffer.epoch] + 1;
    weft::begin(s, [&] { order = Order(p); });
    const int warp = weft::warp_of_block(), warpgroup = warp / 4, role = warp % 4;
    if (static_cast<int>(blockIdx.x) < p.comm_sms) {
        send(p, s, order, epoch);
        __syncthreads();
    }
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        if (role == 0) {
            load(p, s, order);
            if (p.final && p.push) weft::wait_count(s.counts + SHARE, gridDim.x + 1);  // it draws no more
            if (p.final && threadIdx.x % 32 == 0) weft::leave(p.watch, p.buffer, epoch);
        }
        if (role == 1 && p.push) push_shares(p, s, order, epoch);
        if (role == 2) count_arrivals(p, s, order, epoch);
        if (role == 3 && p.push) post_shares(p, s, order, epoch);
#if TENSOR_MEMORY
    } else if (warpgroup == 3) {
        weft::warpgroup_reg_dealloc<weft::ISSUE_REGISTERS>();
        if (role == 0) issue(p, s, order);
#endif
    } else {
        weft::warpgroup_reg_alloc<weft::MULTIPLY_REGISTERS>();
        weft::MultiplyState state;
        const int depth = (p.k + weft::BK - 1) / weft::BK * (SPLIT_K ? p.buffer.world_size : 1);
        for (Steps steps = steps_of(p, order); steps.step < order.steps(); steps.next()) {
            const Tile t = order.tile(p, steps.step, s.block);
            float sums[weft::ACC_REGS];
#ifdef FP8_TYPES
            weft::multiply_scaled(s, state, warpgroup, depth, sums, scales_of(p, t), MainloopHook(p, t, warp));
#else
            weft::multiply(s, state, warpgroup, depth, sums, MainloopHook(p, t, warp));
#endif
            const int row = t.row * BM, column = t.column * BN, n = p.n[t.b];
            Out* c = reinterpret_cast<Out*>(p.c[t.b]) + (static_cast<u64>(t.src) * p.m + row) * n + column;
            weft::store_rows(c, n, p.m - row, n - column, warpgroup, sums, [](int, float*) {});
        }
#ifdef FP8_TYPES
        weft::sync_warpgroup(warpgroup);
        if (threadIdx.x % weft::GROUP == 0) weft::set_count(s.counts + DRAINED + warpgroup, 1);
#endif
    }
}
