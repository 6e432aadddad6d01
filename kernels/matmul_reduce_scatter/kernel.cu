// reduce_scatter(A @ B) in one kernel that sends each tile where it is summed.
//
// Computes out = sum over ranks src of A_src[:, rank] @ B_src: A [L, W, m, K] (L: the product of the dimensions before
// the one that is scattered, W: the ranks), B [K, N], out [L, m, N]. Products are summed in float32 and rounded to A's
// dtype once to be sent; the W partial results are summed in float32 in the order of the ranks and rounded once to A's
// dtype, or with OUT_FLOAT32 not at all. Before that the own rows get, if there are BIAS and RESIDUAL, a row of N numbers
// and a matrix [L, m, N], both of A's dtype.
//
// Who writes: a tile for rank dst leaves in two parts, one of each multiplying warpgroup, into dst's half, viewed
// [W - 1][tiles][2][PART_BYTES] (the sender's slot: its rank, less one behind dst). A part lies there as its threads hold
// it: the same thread of the same warpgroup adds it up. Either they store it there from their registers; or, with
// `staging`, in a place of their own in local memory, and warp 1 or 2 copies it while they multiply the next tile: a
// store that waits for the link then holds up no products. Behind a part warp 3 sets
// flags(half)[src][2 tile + part] = e on dst. Before the first store, done(half)[p] >= e - 1 was seen of every peer p.
// (Ordinary stores: where bulk copies wait for a link, what the same SM loads for its products waits behind them.)
// Who waits: a multiplying warpgroup with its part of an own tile in registers, for the same part from every peer.
// Use e = EPOCH[half] + 1 is read when the kernel starts; its last block ends the use (weft::leave).
//
// Order: chunks of tiles for the peers, the own ones a chunk behind (order.cuh). What a block waits for, a peer's block
// computes in the same step of its order or an earlier one, and waits only for what is due in earlier ones itself. So the
// kernels of all ranks come to their end if all their blocks are resident together: launch no more blocks than there are
// SMs to be had.

// Of a thread; what is copied is on its way in them.
#define SERVE_REGISTERS 72
#define MULTIPLY_REGISTERS 216
#include "../device/gemm.cuh"
#include "order.cuh"

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int VECTORS = weft::PART_BYTES / 16;  // of a part
// Which of s.counts: parts that a multiplying warpgroup has staged, and parts of its that have been sent.
constexpr int STAGED = 0, SENT = 2;

#if OUT_FLOAT32
using Out = float;
#else
using Out = u16;
#endif

struct Params {
    weft::TensorMap a;  // [L, W, m, K], boxes of a stage
    weft::TensorMap b;
    weft::Watch watch;
    weft::Half half;
    u8* inbox;  // the own half
    u8* staging;  // [blocks][2][PART_BYTES], or null
    Out* out;  // [L, m, N]
    int batches, m, n, k;
    int band;  // pairs of rows of tiles walked together, and rows of a chunk
    int average;
    const u16* bias;  // [N]
    const u16* residual;  // [L, m, N]
};

using Order = weft::ScatterOrder<Params>;
using Tile = weft::ScatterTile;

// Where a part of a tile goes at the peer that it is for, and the flag of it there.
__device__ __forceinline__ u8* inbox(const Params& p, const Order& order, const Tile& t, int part) {
    const int slot = p.watch.rank - (p.watch.rank > t.dst);
    const u64 place = (static_cast<u64>(slot) * order.each + t.index) * 2 + part;
    return weft::on_rank(p.inbox, p.watch, p.half, t.dst) + place * weft::PART_BYTES;
}

__device__ __forceinline__ u32* flag(const Params& p, const Tile& t, int part) {
    const int index = p.half.flags + p.watch.rank * p.half.flags_per_rank + 2 * t.index + part;
    return weft::on_rank(p.watch.words, p.watch, p.half, t.dst) + index;
}

// The first step from `step` on, of this block's, at which it has a tile for a peer.
__device__ __forceinline__ int next_sent(const Params& p, const weft::Shared& s, const Order& order, int step) {
    for (; step < order.steps(); step += weft::stride()) {
        const Tile t = order.tile(p, step, s.block);
        if (t.inside && t.dst != p.watch.rank) break;
    }
    return step;
}

__device__ __forceinline__ uint4* staged(const Params& p, int warpgroup) {
    return reinterpret_cast<uint4*>(p.staging + (2 * u64{blockIdx.x} + warpgroup) * weft::PART_BYTES);
}

// Warps 1 and 2: what their warpgroup stages, to the peers.
__device__ __forceinline__ void push(
    const Params& p, const weft::Shared& s, const Order& order, int warpgroup, u32 use) {
    const int lane = threadIdx.x % 32;
    u32* sent = s.counts + SENT + warpgroup;
    if (!weft::may_send(p.watch, p.half, use)) {
        if (lane == 0) weft::set_count(sent, weft::NOTHING);
        return;
    }
    constexpr int AHEAD = 8;  // vectors of a lane, on their way at once
    static_assert(VECTORS % (32 * AHEAD) == 0);
    const uint4* from = staged(p, warpgroup) + lane;
    u32 count = 0;
    int step = next_sent(p, s, order, weft::first_step());
    for (; step < order.steps(); step = next_sent(p, s, order, step + weft::stride())) {
        uint4* to = reinterpret_cast<uint4*>(inbox(p, order, order.tile(p, step, s.block), warpgroup)) + lane;
        weft::wait_count(s.counts + STAGED + warpgroup, ++count);
#pragma unroll 1
        for (int first = 0; first < VECTORS; first += 32 * AHEAD) {
            uint4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) v[i] = __ldcg(from + first + 32 * i);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) to[first + 32 * i] = v[i];
        }
        __syncwarp();
        if (lane == 0) weft::set_count(sent, count);
    }
}

// Warp 3, a lane for each warpgroup: the flags of its parts, as many behind one fence as there are, for it takes
// microseconds.
__device__ __forceinline__ void post(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
    const int lane = threadIdx.x % 32;
    u32 posted = 0;
    int step = lane < 2 ? next_sent(p, s, order, weft::first_step()) : order.steps();
    while (__any_sync(~0u, step < order.steps())) {
        const u32 there = lane < 2 ? weft::read_count(s.counts + SENT + lane) : 0;
        if (there == weft::NOTHING) step = order.steps();
        const bool more = step < order.steps() && there > posted;
        if (!__any_sync(~0u, more)) continue;
        __threadfence_system();
        if (!more) continue;
        for (; posted < there; ++posted) {
            weft::post_behind_fence(flag(p, order.tile(p, step, s.block), lane), use);
            step = next_sent(p, s, order, step + weft::stride());
        }
    }
}

// A multiplying warpgroup's part of a tile, on its way to the peer that it is for. `sent` counts them.
__device__ __forceinline__ void send(
    const Params& p, const weft::Shared& s, const Order& order, const Tile& t, int warpgroup, u32 use, u32& sent,
    const float (&sums)[weft::SUMS]) {
    if (p.staging) {
        weft::wait_count(s.counts + SENT + warpgroup, sent);  // its place has been read
        weft::store_registers(staged(p, warpgroup), sums);
        ++sent;
    } else {
        // Warps may see different things around a deadline: all send, or none does and the peers will miss the flags.
        if (sent == 0 && !weft::all_of_warpgroup(warpgroup, weft::may_send(p.watch, p.half, use))) sent = weft::NOTHING;
        if (sent != weft::NOTHING) {
            weft::store_registers(reinterpret_cast<uint4*>(inbox(p, order, t, warpgroup)), sums);
            ++sent;
        }
    }
    weft::sync_warpgroup(warpgroup);
    if (threadIdx.x % weft::GROUP == 0) weft::set_count(s.counts + (p.staging ? STAGED : SENT) + warpgroup, sent);
}

// Warp 0: what the multiplying warpgroups work on.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, const Order& order) {
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::Turn<STAGES> turn;
    for (int step = weft::first_step(); step < order.steps(); step += weft::stride()) {
        const Tile t = order.tile(p, step, s.block);
        const weft::Rows rows{t.row * BM, t.dst, t.batch};
        for (int i = 0; i < depth; ++i) weft::load_stage(s, turn, p.a, rows, p.b, t.column * BN, i * weft::BK);
    }
}

// Wait for a warpgroup's part of an own tile from every peer: by each of its warps, a lane for each peer.
__device__ __forceinline__ void wait_parts(const Params& p, const Tile& t, int warpgroup, u32 use) {
    const int lane = threadIdx.x % 32;
    if (lane < WORLD_SIZE && lane != p.watch.rank) {
        const int flag = p.half.flags + lane * p.half.flags_per_rank + 2 * t.index + warpgroup;
        weft::wait_flag(p.watch, lane, flag, use, weft::WAIT_DATA);
    }
}

// own[8] = the sum of all ranks' in their order, of which `own` is one, and `parts` are the others.
__device__ __forceinline__ void add_up(const uint4 (&parts)[WORLD_SIZE - 1], int rank, float scale, float* own) {
    float total[8] = {};
#pragma unroll
    for (int i = 0; i < WORLD_SIZE; ++i) {
        if (i == rank) {  // in front of slot `rank`
#pragma unroll
            for (int e = 0; e < 8; ++e) total[e] += own[e];
        }
        if (i == WORLD_SIZE - 1) break;
        const u32 words[4] = {parts[i].x, parts[i].y, parts[i].z, parts[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float pair[2];
            weft::Number::unpack(words[w], pair);
            total[2 * w] += pair[0];
            total[2 * w + 1] += pair[1];
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) own[e] = total[e] * scale;
}

// To a warpgroup's part of an own tile, those of all peers. As many loads at once as there are registers for: one by one
// they would keep the tensor cores waiting for microseconds.
__device__ __forceinline__ void add_parts(
    const Params& p, const Order& order, const Tile& t, int warpgroup, float (&sums)[weft::SUMS]) {
    constexpr int ALL = VECTORS / weft::GROUP, AHEAD = WORLD_SIZE > 5 ? 1 : 8 / (WORLD_SIZE - 1);
    const u64 slot = 2 * order.each * u64{VECTORS};
    const uint4* part = reinterpret_cast<const uint4*>(p.inbox) + (2 * t.index + warpgroup) * u64{VECTORS}
        + threadIdx.x % weft::GROUP;
    const float scale = p.average ? 1.0f / WORLD_SIZE : 1.0f;
#pragma unroll
    for (int first = 0; first < ALL; first += AHEAD) {
        uint4 parts[AHEAD][WORLD_SIZE - 1];
        __syncwarp();  // each lane has waited for one peer; and the compiler shall not load all at once, and spill
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) {
#pragma unroll
            for (int peer = 0; peer < WORLD_SIZE - 1; ++peer) {
                parts[i][peer] = weft::load_payload(part + (first + i) * weft::GROUP + peer * slot);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) {
            add_up(parts[i], p.watch.rank, scale, sums + 8 * (first + i));
        }
    }
}

// values += the two numbers at `at`.
__device__ __forceinline__ void add_pair(const u16* at, float* values) {
    float pair[2];
    weft::Number::unpack(__ldg(reinterpret_cast<const u32*>(at)), pair);
    values[0] += pair[0];
    values[1] += pair[1];
}

// What an own tile gets besides the ranks' parts: this thread's vector `i`. N is a multiple of 8, so pairs are inside or not.
__device__ __forceinline__ void add_terms(const Params& p, const Tile& t, int warpgroup, int i, float* values) {
    const weft::Place first = weft::place_of_sums(warpgroup);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int column = t.column * BN + first.column + 16 * i + 8 * j;
        if (column >= p.n) break;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = t.row * BM + first.row + 8 * r;
            float* pair = values + 4 * j + 2 * r;
            if (BIAS) add_pair(p.bias + column, pair);
            if (RESIDUAL && row < p.m) {
                add_pair(p.residual + (static_cast<u64>(t.batch) * p.m + row) * p.n + column, pair);
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    matmul_reduce_scatter(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    weft::begin(s);
    const u32 use = p.watch.words[p.half.epoch] + 1;
    const Order order(p);
    const int warpgroup = threadIdx.x / weft::GROUP;
    if (warpgroup == 2) {
        weft::give_registers<SERVE_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) load(p, s, order);
        if ((warp == 1 || warp == 2) && p.staging) push(p, s, order, warp - 1, use);
        if (warp == 3) post(p, s, order, use);
    } else {
        weft::take_registers<MULTIPLY_REGISTERS>();
        const int depth = (p.k + weft::BK - 1) / weft::BK;
        weft::Turn<STAGES> turn;
        u32 sent = 0;
        for (int step = weft::first_step(); step < order.steps(); step += weft::stride()) {
            const Tile t = order.tile(p, step, s.block);
            float sums[weft::SUMS];
            weft::multiply(s, turn, warpgroup, depth, sums);
            if (!t.inside) continue;
            if (t.dst != p.watch.rank) {
                send(p, s, order, t, warpgroup, use, sent, sums);
                continue;
            }
            wait_parts(p, t, warpgroup, use);
            add_parts(p, order, t, warpgroup, sums);
            const int row = t.row * BM, column = t.column * BN;
            Out* out = p.out + (static_cast<u64>(t.batch) * p.m + row) * p.n + column;
            weft::store_rows(out, p.n, p.m - row, p.n - column, warpgroup, sums, [&](int i, float* values) {
#if BIAS || RESIDUAL
                add_terms(p, t, warpgroup, i, values);
#endif
            });
        }
    }
    weft::end();
    weft::leave(p.watch, p.half, use);
}
