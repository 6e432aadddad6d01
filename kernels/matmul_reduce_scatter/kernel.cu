// reduce_scatter(A @ B) in one kernel that sends each tile where it is summed.
//
// Computes out = sum over ranks src of A_src[:, rank] @ B_src: A [L, W, m, K] (L: the product of the dimensions before
// the one that is scattered, W: the ranks), B [K, N], out [L, m, N]. Products are summed in float32 and rounded to A's
// dtype once to be sent; the W partial results are summed in float32 in the order of the ranks and rounded once to A's
// dtype, or with OUT_FLOAT32 not at all. Before that the own rows get, if there are BIAS and RESIDUAL, a row of N numbers
// and a matrix [L, m, N], both of A's dtype.
//
// With SPLIT_N rank r's part are the N columns of B from N r on: A [1, 1, m, K], B [K, W N].
//
// With ALL_REDUCE the own part of the sum goes to all ranks, rounded, and out is [M, N] on each: A [1, 1, M, K], of which
// rank r's rows are the m from r m on, as far as there are. L is 1 there, and sums have A's dtype.
//
// Who writes: a tile for rank dst leaves in two parts, one of each multiplying warpgroup, into dst's half, viewed
// [W - 1][tiles][2][PART_BYTES] (the sender's slot: its rank, less one behind dst). A part lies there as its threads hold
// it: the same thread of the same warpgroup adds it up. Either they store it there from their registers; or, with
// STAGING, in a place of their own in local memory, and warp 1 or 2 copies it while they multiply the next tile: a
// store that waits for the link then holds up no products. Behind a part warp 3 sets
// flags(half)[src][2 tile + part] = e on dst. Before the first store, done(half)[p] >= e - 1 was seen of every peer p.
// Sums for all ranks travel in the same way, into as many slots and flags behind those. A warpgroup whose wait has expired
// sends none, nor anything after it: what it has added up is worth nothing.
// (Ordinary stores: where bulk copies wait for a link, what the same SM loads for its products waits behind them.)
// Who waits: a multiplying warpgroup with its part of an own tile in registers, for the same part from every peer. With
// ALL_REDUCE also a step later, for the peers' sums of the tiles that have the index of that one: they come in the same
// step of the peers' order.
// Use e = EPOCH[half] + 1 is read when the kernel starts; the last block that has read its parts ends the use (weft::leave).
//
// Order: chunks of tiles for the peers, the own ones a chunk behind (order.cuh). What a block waits for, a peer's block
// computes in the same step of its order or an earlier one, and waits only for what is due in earlier ones itself. So the
// kernels of all ranks come to their end if all their blocks are resident together: launch no more blocks than there are
// SMs to be had.

// Of a thread; what is copied is on its way in them.
#define SERVE_REGISTERS 72
#define MULTIPLY_REGISTERS 216
#include "../device/gemm.cuh"
#include "../device/pace.cuh"
#include "order.cuh"
#include "sums.cuh"

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int VECTORS = weft::PART_BYTES / 16;  // of a part
constexpr u64 RATE = 356;  // bytes a nanosecond that leave: what the links take at most
// Which of s.counts: parts that a multiplying warpgroup has staged, and parts of its that have been sent.
constexpr int STAGED = 0, SENT = 2;
constexpr int READ = 4;  // whether one reads nothing of the half any more
constexpr int ORDER = 6;  // where the order stands among them

#if OUT_FLOAT32
using Out = float;
#else
using Out = u16;
#endif

#if ALL_REDUCE && (OUT_FLOAT32 || BIAS || RESIDUAL || SPLIT_N || !STAGING)
#error "ALL_REDUCE: sums of 16 bits of rows, to which nothing is added, and which are staged"
#endif

struct Params {
    weft::TensorMap a;  // [L, W, m, K] (SPLIT_N: [1, 1, m, K]), boxes of a stage
    weft::TensorMap b;
    weft::Watch watch;
    weft::Half half;
    u8* inbox;  // the own half
    u8* staging;  // with STAGING: [blocks][2][PART_BYTES]
    Out* out;  // [L, m, N]
    int batches, m, n, k;
    int band;  // pairs of rows of tiles walked together, and rows of a chunk
    int average;
    const u16* bias;  // [N]
    const u16* residual;  // [L, m, N]
    int total;  // ALL_REDUCE: M
};

using Order = weft::ScatterOrder<Params>;
using Tile = weft::ScatterTile;
static_assert(sizeof(Order) <= (weft::COUNTS - ORDER) * sizeof(u32));

// Rows of `rank`'s part from `row` on.
__device__ __forceinline__ int rows_from(const Params& p, int rank, int row) {
    return (ALL_REDUCE ? min(p.m, p.total - rank * p.m) : p.m) - row;
}

// Which of a sender's places and flags a part has: those of sums stand behind all others.
__device__ __forceinline__ u64 place_of(const Order& order, const Tile& t, int part, bool sum) {
    return (static_cast<u64>(sum ? order.each() : 0) + t.index) * 2 + part;
}

// Where a part that `src` sends to rank `at` lies there, in the half whose own copy begins at p.inbox.
__device__ __forceinline__ u8* inbox(const Params& p, const Order& order, const Tile& t, int part, int src, int at) {
    const bool sum = t.dst == src;
    const int slot = src - (src > at) + (sum ? WORLD_SIZE - 1 : 0);
    const u64 place = (static_cast<u64>(slot) * order.each() + t.index) * 2 + part;
    return weft::on_rank(p.inbox, p.watch, p.half, at) + place * weft::PART_BYTES;
}

// What this rank sends of tile t: to the peer that it is for, or its sum to all of them.
template <typename Send>
__device__ __forceinline__ void to_receivers(const Params& p, const Tile& t, const Send& send) {
    if (!ALL_REDUCE || t.dst != p.watch.rank) {
        send(t.dst);
    } else {
#pragma unroll 1
        for (int i = 1; i < WORLD_SIZE; ++i) send((p.watch.rank + i) % WORLD_SIZE);
    }
}

__device__ __forceinline__ void post(const Params& p, const Order& order, const Tile& t, int part, u32 use) {
    const int first = p.half.flags + p.watch.rank * p.half.flags_per_rank;
    u32* mine = p.watch.words + first + place_of(order, t, part, t.dst == p.watch.rank);
    to_receivers(p, t, [&](int dst) { weft::post_behind_fence(weft::on_rank(mine, p.watch, p.half, dst), use); });
}

// The first step from `step` on, of this block's, at which it has something to send.
__device__ __forceinline__ int next_sent(const Params& p, const weft::Shared& s, const Order& order, int step) {
    for (; step < order.steps(); step += weft::stride()) {
        const Tile t = order.tile(p, step, s.block);
        if (t.inside && (ALL_REDUCE || t.dst != p.watch.rank)) break;
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
    weft::SharedPace pace(p.watch, p.half, AHEAD * 32 * 16, RATE);
    u32 count = 0;
    for (int step = next_sent(p, s, order, weft::first_step()); step < order.steps();) {
        const Tile t = order.tile(p, step, s.block);
        step = next_sent(p, s, order, step + weft::stride());
        if (weft::wait_count(s.counts + STAGED + warpgroup, ++count) == weft::NOTHING) count = weft::NOTHING;
        if (count == weft::NOTHING) break;
        const int receivers = ALL_REDUCE && t.dst == p.watch.rank ? WORLD_SIZE - 1 : 1;
        pace.ask(receivers);
#pragma unroll 1
        for (int first = 0; first < VECTORS; first += 32 * AHEAD) {
            uint4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) v[i] = __ldcg(from + first + 32 * i);
            pace.wait();
            if (first + 32 * AHEAD < VECTORS) pace.ask(receivers);
            to_receivers(p, t, [&](int dst) {
                uint4* to = reinterpret_cast<uint4*>(inbox(p, order, t, warpgroup, p.watch.rank, dst)) + lane + first;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) to[32 * i] = v[i];
            });
        }
        __syncwarp();
        if (lane == 0) weft::set_count(sent, count);
    }
    if (count == weft::NOTHING && lane == 0) weft::set_count(sent, count);
}

// Warp 3, a lane for each warpgroup: the flags of its parts, as many behind one fence as there are, for it takes
// microseconds.
__device__ __forceinline__ void post_all(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
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
            post(p, order, order.tile(p, step, s.block), lane, use);
            step = next_sent(p, s, order, step + weft::stride());
        }
    }
}

// `sent`: parts of this warpgroup that are on their way; NOTHING: it sends no more. To the warp that goes on with them.
__device__ __forceinline__ void tell(const Params& p, const weft::Shared& s, int warpgroup, u32 sent) {
    weft::sync_warpgroup(warpgroup);
    if (threadIdx.x % weft::GROUP == 0) weft::set_count(s.counts + (STAGING ? STAGED : SENT) + warpgroup, sent);
}

// A multiplying warpgroup's part of a tile, on its way to those that it is for.
__device__ __forceinline__ void send(
    const Params& p, const weft::Shared& s, const Order& order, const Tile& t, int warpgroup, u32 use, u32& sent,
    const float (&sums)[weft::SUMS]) {
    if (sent == weft::NOTHING) return;
    if constexpr (STAGING) {
        weft::wait_count(s.counts + SENT + warpgroup, sent);  // its place has been read
        weft::store_registers(staged(p, warpgroup), sums);
        ++sent;
    } else {
        // Warps may see different things around a deadline: all send, or none does and the peers will miss the flags.
        if (sent == 0 && !weft::all_of_warpgroup(warpgroup, weft::may_send(p.watch, p.half, use))) sent = weft::NOTHING;
        if (sent != weft::NOTHING) {
            const auto to = inbox(p, order, t, warpgroup, p.watch.rank, t.dst);
            weft::store_registers(reinterpret_cast<uint4*>(to), sums);
            ++sent;
        }
    }
    tell(p, s, warpgroup, sent);
}

// Warp 0: what the multiplying warpgroups work on.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, const Order& order) {
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::Turn<STAGES> turn;
    for (int step = weft::first_step(); step < order.steps(); step += weft::stride()) {
        const Tile t = order.tile(p, step, s.block);
        // A step without a tile for this block, and rows past the end of a part, are loaded all the same.
#if ALL_REDUCE
        const weft::Rows rows{t.dst * p.m + t.row * BM, 0, 0};
#else
        const weft::Rows rows{t.row * BM, SPLIT_N ? 0 : t.dst, t.batch};
#endif
        const int column = (SPLIT_N ? t.dst * p.n : 0) + t.column * BN;
        for (int i = 0; i < depth; ++i) weft::load_stage(s, turn, p.a, rows, p.b, column, i * weft::BK);
    }
    weft::drain(s, turn);
}

// A multiplying warpgroup reads nothing of the half any more; warp 3, which ends the use when neither does.
__device__ __forceinline__ void have_read(const weft::Shared& s, int warpgroup) {
    weft::sync_warpgroup(warpgroup);
    if (threadIdx.x % weft::GROUP == 0) weft::set_count(s.counts + READ + warpgroup, 1);
}

__device__ __forceinline__ void leave(const Params& p, const weft::Shared& s, u32 use) {
    if (threadIdx.x % 32 != 0) return;
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) weft::wait_count(s.counts + READ + warpgroup, 1);
    weft::leave(p.watch, p.half, use);
}

// Wait for what every peer sends of a tile for this warpgroup, its part or its sum: by each of its warps, a lane for each
// peer. Whether it has come.
__device__ __forceinline__ bool wait_parts(
    const Params& p, const Order& order, const Tile& t, int warpgroup, u32 use, bool sums) {
    const int lane = threadIdx.x % 32;
    if (lane >= WORLD_SIZE || lane == p.watch.rank) return true;
    const int first = p.half.flags + lane * p.half.flags_per_rank;
    return weft::wait_flag(p.watch, lane, first + place_of(order, t, warpgroup, sums), use, weft::WAIT_DATA);
}

// To a warpgroup's part of an own tile, those of all peers. As many loads at once as there are registers for: each trip
// keeps the tensor cores waiting for half a microsecond and more.
__device__ __forceinline__ void add_parts(
    const Params& p, const Order& order, const Tile& t, int warpgroup, float (&sums)[weft::SUMS]) {
    constexpr int ALL = VECTORS / weft::GROUP, PEERS = WORLD_SIZE - 1;
    constexpr int AHEAD = PEERS > 14 ? 1 : PEERS > 1 ? 14 / PEERS : ALL_REDUCE ? 8 : 16;
    const u64 slot = 2 * order.each() * u64{VECTORS};
    const uint4* slots = reinterpret_cast<const uint4*>(p.inbox);
    u32 at = (2u * t.index + warpgroup) * VECTORS + threadIdx.x % weft::GROUP;
    const float scale = p.average ? 1.0f / WORLD_SIZE : 1.0f;
#pragma unroll
    for (int first = 0; first < ALL; first += AHEAD) {
        uint4 parts[AHEAD][WORLD_SIZE - 1];
        __syncwarp();  // each lane has waited for one peer; and the compiler shall not load all at once, and spill
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) {
#pragma unroll
            for (int peer = 0; peer < WORLD_SIZE - 1; ++peer) {
                parts[i][peer] = weft::load_payload(slots + peer * slot + at + i * weft::GROUP);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD && first + i < ALL; ++i) {
            weft::add_up(parts[i], p.watch.rank, scale, sums + 8 * (first + i));
        }
        at += AHEAD * weft::GROUP;
    }
}

// A multiplying warpgroup's part of an own tile: the peers' are added to it, and the sum goes to `out`, and on its way.
// `last`: no tile follows.
__device__ __forceinline__ void finish(
    const Params& p, const weft::Shared& s, const Order& order, const Tile& t, int warpgroup, u32 use, bool last,
    u32& sent, float (&sums)[weft::SUMS]) {
    const bool there = wait_parts(p, order, t, warpgroup, use, false);
    if (ALL_REDUCE && !weft::all_of_warpgroup(warpgroup, there)) {
        sent = weft::NOTHING;
        tell(p, s, warpgroup, sent);
    }
    add_parts(p, order, t, warpgroup, sums);
    if constexpr (ALL_REDUCE) send(p, s, order, t, warpgroup, use, sent, sums);
    if (!ALL_REDUCE && last) have_read(s, warpgroup);
    const int row = t.row * BM, column = t.column * BN, part = ALL_REDUCE ? p.watch.rank : t.batch;
    Out* out = p.out + (static_cast<u64>(part) * p.m + row) * p.n + column;
    const int rows = rows_from(p, p.watch.rank, row);
    weft::store_rows(out, p.n, rows, p.n - column, warpgroup, sums, [&](int i, float* values) {
#if BIAS || RESIDUAL
        weft::add_terms(p, t, warpgroup, i, values);
#endif
    });
}

// If an own tile came at `step`: from every peer the sum of the tile with its index, to its rows.
__device__ __forceinline__ void take_sums(
    const Params& p, const weft::Shared& s, const Order& order, int step, int warpgroup, u32 use) {
    if (step < 0) return;
    const Tile own = order.tile(p, step, s.block);
    if (!own.inside || own.dst != p.watch.rank) return;
    wait_parts(p, order, own, warpgroup, use, true);
    __syncwarp();  // each lane has waited for one peer
#pragma unroll 1
    for (int i = 1; i < WORLD_SIZE; ++i) {
        Tile t = own;
        t.dst = (p.watch.rank + i) % WORLD_SIZE;
        const auto part = reinterpret_cast<const uint4*>(inbox(p, order, t, warpgroup, t.dst, p.watch.rank));
        const int row = t.row * BM, column = t.column * BN;
        u16* out = reinterpret_cast<u16*>(p.out) + static_cast<u64>(t.dst * p.m + row) * p.n + column;
        weft::store_rows(out, p.n, rows_from(p, t.dst, row), p.n - column, warpgroup, part);
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    matmul_reduce_scatter(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    // In shared memory: there are no registers to keep it in.
    Order& order = *reinterpret_cast<Order*>(s.counts + ORDER);
    const u32 use = p.watch.words[p.half.epoch] + 1;
    weft::begin(s, [&] { order = Order(p); });
    const int warpgroup = threadIdx.x / weft::GROUP;
    if (warpgroup == 2) {
        weft::give_registers<SERVE_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) load(p, s, order);
        if (STAGING && (warp == 1 || warp == 2)) push(p, s, order, warp - 1, use);
        if (warp == 3) {
            post_all(p, s, order, use);
            leave(p, s, use);
        }
    } else {
        weft::take_registers<MULTIPLY_REGISTERS>();
        const int depth = (p.k + weft::BK - 1) / weft::BK;
        weft::Turn<STAGES> turn;
        u32 sent = 0;
        int step = weft::first_step();
        for (; step < order.steps(); step += weft::stride()) {
            const Tile t = order.tile(p, step, s.block);
            float sums[weft::SUMS];
            weft::multiply(s, turn, warpgroup, depth, sums);
            if (t.inside && t.dst != p.watch.rank) send(p, s, order, t, warpgroup, use, sent, sums);
            const bool last = step + weft::stride() >= order.steps();
            if (t.inside && t.dst == p.watch.rank) finish(p, s, order, t, warpgroup, use, last, sent, sums);
            if (ALL_REDUCE) take_sums(p, s, order, step - weft::stride(), warpgroup, use);
        }
        if (ALL_REDUCE) take_sums(p, s, order, step - weft::stride(), warpgroup, use);
        have_read(s, warpgroup);  // once more, where `finish` has said so
    }
}
