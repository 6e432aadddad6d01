// reduce_scatter(A @ B) in one kernel that sends each tile to the rank that sums it.
//
// Computes out = sum over ranks src of A_src[:, rank] @ B_src: A [L, W, m, K] (L: the product of the dimensions before
// the one that is scattered, W: the ranks), B [K, N], out [L, m, N]. Up to MOST_PRODUCTS of them, of different K, are
// one product of what stands side by side, [A1 A2] @ [B1; B2]. Partial results are rounded to A's dtype once to
// be sent, summed in float32 in rank order, and rounded once to A's dtype, or with OUT_FLOAT32 not at all. Before that
// BIAS adds a row of N numbers and RESIDUAL a matrix [L, m, N], both of A's dtype. With SPLIT_N rank r owns the N
// columns of B from N r on: A [1, 1, m, K], B [K, W N]. With ALL_REDUCE the sums go to all ranks, rounded, and out is
// [M, N] on each: A [1, 1, M, K], of which rank r owns the m rows from r m on, as far as there are. With ALL_TO_ALL
// nothing is summed: out [W, L, m, N] has the ranks' results, each rounded once.
//
// Of fp8 operands (gemm/sm90/scales.cuh) a partial result is scaled, gets a bias, and is sent in the result's dtype.
//
// Who writes: a tile for rank dst leaves as two accumulator fragments, one of each compute warpgroup, into dst's buffer
// [W - 1][tiles][2][PART_BYTES] (slot: the sender's rank, less one above dst), by the LL protocol: there are no flags.
// The warpgroup stores it into local memory, from where warp 1 or 2 copies it while the next tile is computed. With
// ALL_REDUCE sums travel in the same way, into as many slots after those.
// Who waits: senders, for done(buffer)[p] >= e - 1 of every peer; each thread of a compute warpgroup, for the same
// thread's vectors of a local tile of every peer, with ALL_REDUCE a step later for the peers' sums. It resets the slots
// it has read. Warp 3 of the last block ends the epoch (weft::leave). Graph-safe.
// Clusters draw their tiles in order (gemm/step_queue.cuh): blocks that have found no room on the GPU are not waited for.
// docs/protocol.md#matmul--reduce-scatter has the proof; tile_order.cuh the order of the tiles.

// Per thread; data that is copied, and data that arrives, passes through them.
#define SERVE_REGISTERS 56
#include "gemm/gemm.cuh"
#include "gemm/step_queue.cuh"
#include "comm/rate_limiter.cuh"
#include "tile_order.cuh"
#include "parts.cuh"
#include "sums.cuh"
#ifdef FP8_TYPES
#include "gemm/sm90/scales.cuh"
#endif

using weft::u16;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int MOST_PRODUCTS = 4;
constexpr u32 PART = weft::PART_BYTES / 16;  // vectors
constexpr u64 RATE = 356;  // bytes per nanosecond that leave: what the links carry at most
// Which of s.counts: fragments that a compute warpgroup has staged, and those of them that have been sent.
constexpr int STAGED = 0, SENT = 2;
constexpr int DRAINED = 4;  // whether a warpgroup has taken all that it takes from the buffer
constexpr int EXPIRED = 6;  // 1 + the place of a vector whose wait has expired
constexpr int STEP = 7;  // of what a compute warpgroup has staged
constexpr int PARTS = 9;  // local tiles whose parts a warpgroup has
constexpr int SLOTS = 11;  // of the cluster's steps
constexpr int ORDER = SLOTS + weft::StepQueue::SLOTS;  // where the order stands among them

#if OUT_FLOAT32
using Out = float;
#else
using Out = u16;
#endif

#if ALL_REDUCE && (OUT_FLOAT32 || BIAS || RESIDUAL || SPLIT_N)
#error "ALL_REDUCE: sums of 16 bits of rows, to which nothing is added"
#endif
#if ALL_TO_ALL && (ALL_REDUCE || OUT_FLOAT32 || BIAS || RESIDUAL)
#error "ALL_TO_ALL: results of 16 bits, to which nothing is added"
#endif

struct Params {
    weft::TensorMap a[MOST_PRODUCTS];  // each [L, W, m, K] (SPLIT_N: [1, 1, m, K]), boxes of a stage
    weft::TensorMap b[MOST_PRODUCTS];
    weft::WaitParams watch;
    weft::BufferWords buffer;
    uint4* receive_buffer;  // the local buffer
    uint4* staging;  // [blocks][2][PART], if there is any
    Out* out;  // [L, m, N], with ALL_TO_ALL [W, L, m, N]
    int batches, m, n;
    int products;  // how many
    int depths[MOST_PRODUCTS];  // of each, in stages
    int depth;  // of all
    int raster_group;  // pairs of rows of tiles in a raster group, and rows of a chunk
    float scale;  // of the sum: 1, or that of an average
    const u16* bias;  // [N]
    const u16* residual;  // [L, m, N]
    int total;  // ALL_REDUCE: M
#ifdef FP8_TYPES
    int reserved[5];
    const float* scales;  // of A: one, or [blocks of K, all rows of A]
    weft::Scales of_b;
#endif
};

using Order = weft::ScatterTileScheduler<Params>;
using Tile = weft::ScatterTile;
static_assert(sizeof(Order) <= (weft::COUNTS - ORDER) * sizeof(u32));

// Rows of `rank`'s part from `row` on.
__device__ __forceinline__ int rows_from(const Params& p, int rank, int row) {
    return (ALL_REDUCE ? min(p.m, p.total - rank * p.m) : p.m) - row;
}

// The place of a fragment that `src` sends to rank `at`, in vectors from a buffer's begin. Sums come after all
// others.
__device__ __forceinline__ u32 place_of(const Order& order, const Tile& t, int part, int src, int at) {
    const int slot = src - (src > at) + (t.dst == src ? WORLD_SIZE - 1 : 0);
    return ((slot * order.each() + t.index) * 2 + part) * PART;
}

// The sender of the vector at a place of rank `at`: the inverse.
__device__ __forceinline__ int sender_of(const Order& order, u32 place, int at) {
    const int peer = place / (2 * order.each() * PART) % (WORLD_SIZE - 1);
    return peer + (peer >= at);
}

// Where this rank's fragment of tile t goes at `dst`.
__device__ __forceinline__ uint4* at_peer(const Params& p, const Order& order, const Tile& t, int part, int dst) {
    return weft::on_rank(p.receive_buffer, p.watch, p.buffer, dst) + place_of(order, t, part, p.watch.rank, dst);
}

__device__ __forceinline__ weft::ReceiveBuffer receive_buffer(const Params& p, const weft::Shared& s) {
    return {p.watch, p.receive_buffer, s.counts + EXPIRED};
}

// The receivers of tile t: the peer that it is for, or of a sum all peers.
template <typename Send>
__device__ __forceinline__ void to_receivers(const Params& p, const Tile& t, const Send& send) {
    if (!ALL_REDUCE || t.dst != p.watch.rank) {
        send(t.dst);
    } else {
#pragma unroll 1
        for (int i = 1; i < WORLD_SIZE; ++i) send((p.watch.rank + i) % WORLD_SIZE);
    }
}

}  // namespace

#include "push.cuh"

namespace {

// Stages a compute warpgroup's fragment of a tile.
__device__ __forceinline__ void send(
    const Params& p, const weft::Shared& s, const Tile& t, int warpgroup, u32& sent,
    const float (&sums)[weft::ACC_REGS]) {
    if (sent == weft::CLOSED) return;
    weft::wait_count(s.counts + SENT + warpgroup, sent);  // the staging memory has been read
    weft::store_part(staged(p, warpgroup), sums);
    tell(s, warpgroup, ++sent, t.step);
}

// Whether the last vectors of a local tile's parts have arrived, by all lanes of a warp: a guess that all have.
__device__ __forceinline__ bool likely_arrived(const Params& p, const Order& order, const Tile& t) {
    const u32 lane = threadIdx.x % 32, slot = 2 * order.each() * PART;
    const uint4* last = p.receive_buffer + (2 * t.index + 1) * PART + PART - 1 + lane * u64{slot};
    return __all_sync(~0u, lane >= WORLD_SIZE - 1 || weft::load_payload_word(reinterpret_cast<const u32*>(last)) != 0);
}

// Warp 0: loads the operands of the compute warpgroups.
__device__ __forceinline__ void load(
    const Params& p, const weft::Shared& s, const Order& order, weft::StepSource steps) {
    weft::PipelineState<STAGES> state;
    u32 local = 0;
    for (int step; (step = steps.next()) < order.steps();) {
        int left = p.depth;
        const Tile t = order.tile(p, step, s.block);
        // Who may wait for parts draws no step that another cluster could compute meanwhile.
        bool waits = s.block == 0 && t.inside && t.dst == p.watch.rank;
        local += waits;
        // A step without a tile for this block, and rows past the end of a part, are loaded all the same.
#if ALL_REDUCE
        const weft::Rows rows{t.dst * p.m + t.row * BM, 0, 0};
#else
        const weft::Rows rows{t.row * BM, SPLIT_N ? 0 : t.dst, t.batch};
#endif
        const int column = (SPLIT_N ? t.dst * p.n : 0) + t.column * BN;
#pragma unroll 1
        for (int of = 0; of < p.products; ++of) {
            for (int i = 0; i < p.depths[of]; ++i) {
                // With ALL_REDUCE there are no registers to look in.
                if (left-- == min(2, p.depth) && !(waits = waits && (ALL_REDUCE || !likely_arrived(p, order, t)))) {
                    steps.ask(p.watch.words + p.buffer.drawn);
                }
                weft::load_stage(s, state, p.a[of], rows, p.b[of], column, i * weft::BK);
            }
        }
        if (!waits) continue;
        for (int i = 0; i < 2; ++i) weft::wait_count(s.counts + PARTS + i, local);
        steps.ask(p.watch.words + p.buffer.drawn);
    }
    weft::drain(s, state);
}

// By a compute warpgroup: it has the parts of one local tile more (PARTS), or has drained the buffer (DRAINED).
__device__ __forceinline__ void count_up(const weft::Shared& s, int which, int warpgroup) {
    u32* count = s.counts + which + warpgroup;
    weft::sync_warpgroup(warpgroup);
    if (threadIdx.x % weft::GROUP == 0) weft::set_count(count, weft::read_count(count) + 1);
}

// Warp 3: reports the first vector whose wait has expired, and ends the epoch when all are taken.
__device__ __forceinline__ void report_and_leave(
    const Params& p, const weft::Shared& s, const Order& order, u32 epoch) {
    if (threadIdx.x % 32 != 0) return;
    for (bool told = false, over = false; !over; __nanosleep(100)) {
        over = weft::read_count(s.counts + DRAINED) != 0 && weft::read_count(s.counts + DRAINED + 1) != 0;
        const u32 expired = weft::read_count(s.counts + EXPIRED);
        if (told || expired == 0) continue;
        told = true;
        const u32 word = static_cast<u32>(reinterpret_cast<u32*>(p.receive_buffer + expired - 1) - p.watch.words);
        const int sender = sender_of(order, expired - 1, p.watch.rank);
        weft::report(p.watch, sender, word, epoch, epoch - 1, weft::WAIT_DATA);
    }
    weft::leave(p.watch, p.buffer, epoch);
}

#ifdef FP8_TYPES
__device__ __forceinline__ weft::TileScales scales_of(const Params& p, const Tile& t) {
    const int part = SPLIT_N ? 0 : t.batch * WORLD_SIZE + t.dst, parts = SPLIT_N ? 1 : p.batches * WORLD_SIZE;
    const int first = SPLIT_N ? p.n * t.dst : 0, columns = SPLIT_N ? WORLD_SIZE * p.n : p.n;
    return {p.of_b, p.scales, parts * p.m, part * p.m + t.row * BM, parts * p.m, first + t.column * BN, columns};
}
#endif

// Stores a compute warpgroup's fragment of a local tile, and from every peer that of the tile with the same index.
__device__ __forceinline__ void store_each(
    const Params& p, const weft::Shared& s, const Order& order, const Tile& t, int warpgroup,
    float (&sums)[weft::ACC_REGS]) {
    const int row = t.row * BM, column = t.column * BN, rows = rows_from(p, p.watch.rank, row);
    u16* out = reinterpret_cast<u16*>(p.out) + (static_cast<u64>(t.batch) * p.m + row) * p.n + column;
    const u64 each = static_cast<u64>(p.batches) * p.m * p.n;
    weft::store_rows(out + RANK * each, p.n, rows, p.n - column, warpgroup, sums, [](int, float*) {});
#pragma unroll 1
    for (int i = 1; i < WORLD_SIZE; ++i) {
        const int src = (RANK + i) % WORLD_SIZE;
        uint4* part = p.receive_buffer + place_of(order, t, warpgroup, src, RANK);
        weft::store_rows(out + src * each, p.n, rows, p.n - column, warpgroup, receive_buffer(p, s), part);
    }
    count_up(s, PARTS, warpgroup);
}

// Finishes a compute warpgroup's fragment of a local tile: adds the peers', stores the sum to `out`, with ALL_REDUCE
// sends it.
__device__ __forceinline__ void finish(
    const Params& p, const weft::Shared& s, const Order& order, const Tile& t, int warpgroup, u32& sent,
    float (&sums)[weft::ACC_REGS]) {
    uint4* parts = p.receive_buffer + (2 * t.index + warpgroup) * PART + threadIdx.x % weft::GROUP;
    const bool there = weft::add_parts(receive_buffer(p, s), parts, 2 * order.each() * PART, p.scale, sums);
    count_up(s, PARTS, warpgroup);
    if constexpr (ALL_REDUCE) {
        if (!weft::all_of_warpgroup(warpgroup, there)) tell(s, warpgroup, sent = weft::CLOSED);
        send(p, s, t, warpgroup, sent, sums);
    }
    const int row = t.row * BM, column = t.column * BN, part = ALL_REDUCE ? p.watch.rank : t.batch;
    Out* out = p.out + (static_cast<u64>(part) * p.m + row) * p.n + column;
    const int rows = rows_from(p, p.watch.rank, row);
    if constexpr (BIAS || RESIDUAL) {
        weft::store_rows(out, p.n, rows, p.n - column, warpgroup, sums, weft::Terms<Params>(p, t, warpgroup));
    } else {
        weft::store_rows(out, p.n, rows, p.n - column, warpgroup, sums, [](int, float*) {});
    }
}

// If the tile of `step` was local: receives from every peer the sum of the tile with the same index, and stores it.
__device__ __forceinline__ void take_sums(
    const Params& p, const weft::Shared& s, const Order& order, int step, int warpgroup) {
    if (step < 0) return;
    const Tile own = order.tile(p, step, s.block);
    if (!own.inside || own.dst != p.watch.rank) return;
#pragma unroll 1
    for (int i = 1; i < WORLD_SIZE; ++i) {
        Tile t = own;
        t.dst = (p.watch.rank + i) % WORLD_SIZE;
        const int row = t.row * BM, column = t.column * BN;
        u16* out = reinterpret_cast<u16*>(p.out) + static_cast<u64>(t.dst * p.m + row) * p.n + column;
        const int rows = rows_from(p, t.dst, row);
        uint4* part = p.receive_buffer + place_of(order, t, warpgroup, t.dst, p.watch.rank);
        weft::store_rows(out, p.n, rows, p.n - column, warpgroup, receive_buffer(p, s), part);
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    matmul_reduce_scatter(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    // In shared memory: there are no registers to keep it in.
    Order& order = *reinterpret_cast<Order*>(s.counts + ORDER);
    const u32 epoch = p.watch.words[p.buffer.epoch] + 1;
    weft::StepSource steps(s, s.counts + SLOTS);
    steps.ask(p.watch.words + p.buffer.drawn);
    weft::begin(s, [&] { order = Order(p); });
    const int warp = weft::warp_of_block(), warpgroup = warp / 4, role = warp % 4;
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        if (role == 0) load(p, s, order, steps);
        if (role == 1 || role == 2) push(p, s, order, role - 1, epoch);
        if (role == 3) report_and_leave(p, s, order, epoch);
#if TENSOR_MEMORY
    } else if (warpgroup == 3) {
        weft::warpgroup_reg_dealloc<weft::ISSUE_REGISTERS>();
        if (role == 0) {
            weft::Issuer issuer(s);
            for (weft::StepQueue queue{s.counts + SLOTS}; queue.next() < order.steps();) issuer.multiply(p.depth);
            issuer.end();
        }
#endif
    } else {
        weft::warpgroup_reg_alloc<weft::MULTIPLY_REGISTERS>();
        weft::MultiplyState state;
        weft::StepQueue queue{s.counts + SLOTS};
        u32 sent = 0;
        int before = -1;
        for (int step; (step = queue.next()) < order.steps(); before = step) {
            float sums[weft::ACC_REGS];
#ifdef FP8_TYPES
            const Tile t = order.tile(p, step, s.block);
#if OUT_FLOAT32  // else the compiler keeps what the epilogue leaves in them, and waits for each wgmma
#pragma unroll
            for (int e = 0; e < weft::ACC_REGS; ++e) sums[e] = 0;
#endif
            weft::multiply_scaled(s, state, warpgroup, p.depth, sums, scales_of(p, t));
#elif OUT_FLOAT32  // there are no registers to keep the tile in
            weft::multiply(s, state, warpgroup, p.depth, sums);
            const Tile t = order.tile(p, step, s.block);
#else
            const Tile t = order.tile(p, step, s.block);
            weft::multiply(s, state, warpgroup, p.depth, sums);
#endif
            if (t.inside && t.dst != p.watch.rank) send(p, s, t, warpgroup, sent, sums);
            if (t.inside && t.dst == p.watch.rank) {
#if ALL_TO_ALL
                store_each(p, s, order, t, warpgroup, sums);
#else
                finish(p, s, order, t, warpgroup, sent, sums);
#endif
            }
            if (ALL_REDUCE) take_sums(p, s, order, before, warpgroup);
        }
        if (ALL_REDUCE) take_sums(p, s, order, before, warpgroup);
        count_up(s, DRAINED, warpgroup);
        end_sending(s, warpgroup, sent);
    }
#ifdef RACECHECK  // which knows barriers alone: the other block's loader stores no slot into a block that has ended
    weft::sync_cluster();
#endif
}
