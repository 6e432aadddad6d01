// all_gather(A) @ B in one kernel, which sends the own rows while it multiplies.
//
// Computes C[src] = A[src] @ B for every rank src: A[src] [m, K] are the rows of rank src, B [K, N] is this rank's,
// C [W, m, N]. Up to MOST_BS Bs are multiplied by the same A. Products are summed in float32.
// With SPLIT_K the shards lie side by side: B is [W, K, N], and C [m, N] the sum of A[src] @ B[src] over the ranks. A tile
// takes them in rank order whoever computes it, as one product of the gathered A would: ranks with equal Bs get equal bits.
// (Own shards first would give the first wave something to do while others come, and each rank bits of its own.)
//
// Who writes: pushing warps, pieces of PIECE_ROWS x PIECE_COLUMNS of the own rows, into slot `rank` of every peer's buffer,
// viewed [W, m, K]; behind them the block's posting warp sets flags(buffer)[rank][piece] = e on the peers. Before anything
// is sent, done(buffer)[p] >= e - 1 was seen of every peer p. Either every block has one pushing warp beside its
// multiplying ones (`comm_sms` is 0), or the first `comm_sms` blocks do nothing else until all is sent, with all their
// warps: eight to sixteen blocks fill the links, and what the other blocks load does not wait behind what is sent.
// Who waits: warp 2 of every multiplying block, for every UNIT_COLUMNS of K of a peer's rows, a lane for each piece that
// these lie in; it tells the loader (warp 0). Own rows are read from the input.
// Use e = EPOCH[buffer] + 1 is read when the kernel starts; the last block whose loads have all been multiplied ends the
// use (weft::leave), if `final`.
//
// Order: rows are sent and multiplied in groups of `group` rows of tiles from every rank, the own rows first. (With SPLIT_K
// no rows are only the own ones.) Inside a group pieces are sent by columns, then by rows: all tiles of a group advance
// along K as the data comes, and what remains to be done behind the last byte is the last columns' share of a tile, not a
// tile. So that all clusters have one then, the wave that is not full is the first one: `lead` steps, of own rows.
// (Sharing K of these among the clusters that have none would give own rows bits that the peers' results do not have.)
//
// Blocks wait for what blocks of the other ranks send, so all blocks of a launch must run at once: no more than there
// are SMs to be had.

// Of a thread; what is pushed is on its way in them.
#define SERVE_REGISTERS 72
#define MULTIPLY_REGISTERS 216
#include "gemm/gemm.cuh"
#include "comm/rate_limiter.cuh"
#include "order.cuh"

using weft::PIECES;
using weft::PIECES_K;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int MOST_BS = 4;
constexpr int PUSHERS = weft::THREADS / 32 - 1;  // warps of a block while it only sends; the last one posts
// Bytes a nanosecond that all pushing warps send: what the links take where several ranks send to one, and between two.
constexpr u64 RATE = 328, RATE_OF_TWO = 345;
// Which of s.counts: units of peers' rows that lie here, in the loader's order; and, of each pushing warp from SENT on,
// pieces that have been sent.
constexpr int ARRIVED = 0, SENT = 1;
constexpr int ORDER = SENT + PUSHERS;  // where the order stands among them

static_assert(weft::PIECES <= 32, "a lane waits for each");
static_assert(BM % PIECE_ROWS == 0 && UNIT_COLUMNS % PIECE_COLUMNS == 0 && UNIT_COLUMNS % weft::BK == 0);

struct Params {
    weft::TensorMap own;  // A [1, 1, m, K], boxes of a stage
    weft::TensorMap gathered;  // the own buffer [1, W, m, K], boxes of a stage
    weft::TensorMap b[MOST_BS];  // with SPLIT_K [W, K, N] each
    weft::WaitParams watch;
    weft::BufferWords buffer;
    const weft::u16* a;  // A [m, K], rows `stride` elements apart
    weft::u16* data;  // the own buffer [W, m, K]
    weft::u16* c[MOST_BS];  // [W, m, N], with SPLIT_K [m, N]
    int n[MOST_BS];
    int bs;  // how many
    int columns[MOST_BS];  // of tiles, of each
    int m, k, stride;
    int raster_group;  // pairs of own rows of tiles walked together
    int remote_raster_group;  // and of the peers'
    int group;  // rows of tiles of a rank that are sent together
    int comm_sms;  // blocks that first send
    int missed;  // steps that each of the others takes meanwhile, behind the first wave
    int lead;  // steps of the first wave
    int push;  // every block sends beside its products
    int final;  // this launch ends the use
};

using Order = weft::GatherTileScheduler<Params>;
using Piece = weft::GatherPiece<Params>;
using Tile = weft::GatherTile;
using Walk = weft::GatherSteps;
static_assert(sizeof(Order) <= (weft::COUNTS - ORDER) * sizeof(u32));

__device__ __forceinline__ Walk steps_of(const Params& p, const Order& order) {
    const int lead = min(p.lead, order.own_pairs * order.columns);
    return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), p.comm_sms, p.missed, lead};
}

// Pushing warp `pusher` of the launch's `pushers`: its pieces, from the own rows to all peers. Ordinary stores:
// where bulk copies wait for a link, what the same SM loads for its products waits behind them.
__device__ __forceinline__ void push(const Params& p, const Order& order, u32 use, int pusher, int pushers, u32* sent) {
    const int lane = threadIdx.x % 32, world_size = p.buffer.world_size, rank = p.watch.rank;
    if (!weft::may_send(p.watch, p.buffer, use)) {
        if (lane == 0) weft::set_count(sent, weft::NOTHING);
        return;
    }
    constexpr int LANES = PIECE_COLUMNS / 8;  // of a row of a piece
    constexpr int ROWS = 32 / LANES;  // at once
    constexpr int VECTORS = PIECE_ROWS / ROWS < 8 ? PIECE_ROWS / ROWS : 8;  // of a lane, on their way at once
    static_assert(PIECE_ROWS % (ROWS * VECTORS) == 0);
    const u64 from_stride = static_cast<u64>(ROWS) * p.stride, to_stride = static_cast<u64>(ROWS) * p.k;
    weft::RateLimiter pace{VECTORS * 32 * 16 * static_cast<u64>(pushers) / (world_size > 2 ? RATE : RATE_OF_TWO)};
    u32 count = 0;
    for (int index = pusher; index < order.pieces; index += pushers) {
        const Piece piece(p, order, index);
        const int column = piece.column + lane % LANES * 8;
        if (piece.inside && column < p.k) {
#pragma unroll 1
            for (int row = piece.row + lane / LANES; row < piece.row + PIECE_ROWS; row += ROWS * VECTORS) {
                uint4 v[VECTORS];
                const int left = p.m - row;
                const weft::u16* from = p.a + static_cast<u64>(row) * p.stride + column;
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    if (i * ROWS < left) v[i] = __ldg(reinterpret_cast<const uint4*>(from + i * from_stride));
                }
                weft::u16* slot = p.data + (static_cast<u64>(rank) * p.m + row) * p.k + column;
#pragma unroll 1
                for (int turn = 1; turn < world_size; ++turn) {
                    const int peer = rank >= turn ? rank - turn : rank - turn + world_size;
                    weft::u16* to = weft::on_rank(slot, p.watch, p.buffer, peer);
                    pace.wait();
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

// The posting warp of a block, for its `mine` pushing warps from number `first` on, a lane for each: as many flags behind
// one fence as there are, for it takes microseconds. (With a release behind every piece, links stood still half the time.)
__device__ __forceinline__ void post(
    const Params& p, const Order& order, u32 use, int first, int mine, int pushers, const u32* sent) {
    const int lane = threadIdx.x % 32, rank = p.watch.rank;
    u32* flags = p.watch.words + p.buffer.flags + rank * p.buffer.flags_per_rank;
    u32 posted = 0;
    int index = lane < mine ? first + lane : order.pieces;
    while (__any_sync(~0u, index < order.pieces)) {
        const u32 there = lane < mine ? weft::read_count(sent + lane) : 0;
        if (there == weft::NOTHING) index = order.pieces;
        const bool more = index < order.pieces && there > posted;
        if (!__any_sync(~0u, more)) continue;
        __threadfence_system();
        if (!more) continue;
        for (; posted < there; ++posted, index += pushers) {
            const Piece piece(p, order, index);
            if (!piece.inside) continue;
            for (int peer = 0; peer < p.buffer.world_size; ++peer) {
                if (peer == rank) continue;
                weft::post_behind_fence(weft::on_rank(flags, p.watch, p.buffer, peer) + piece.flag, use);
            }
        }
    }
}

// A block that sends before it multiplies.
__device__ __forceinline__ void send(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
    const int warp = weft::warp_of_block(), first = blockIdx.x * PUSHERS, pushers = p.comm_sms * PUSHERS;
    if (warp < PUSHERS) {
        push(p, order, use, first + warp, pushers, s.counts + SENT + warp);
    } else {
        post(p, order, use, first, PUSHERS, pushers, s.counts + SENT);
    }
}

// Whose shards tile `t` is made of, in the order in which they are loaded, waited for and multiplied.
template <typename Each>
__device__ __forceinline__ void each_part(const Params& p, const Tile& t, const Each& each) {
    if constexpr (SPLIT_K) {
        for (int src = 0; src < p.buffer.world_size; ++src) each(src);
    } else {
        each(t.src);
    }
}

// Warp 0: what the multiplying warpgroups work on.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, const Order& order) {
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::PipelineState<STAGES> turn;
    u32 needed = 0;
    for (Walk walk = steps_of(p, order); walk.step < order.steps(); walk.next()) {
        const Tile t = order.tile(p, walk.step, s.block);
        each_part(p, t, [&](int src) {
            const bool own = src == p.watch.rank;
            const weft::Rows rows{t.row * BM, own ? 0 : src, 0};
            const weft::TensorMap& a = own ? p.own : p.gathered;
            for (int i = 0; i < depth; ++i) {
                if (!own && i % (UNIT_COLUMNS / weft::BK) == 0) weft::wait_count(s.counts + ARRIVED, ++needed);
                weft::load_stage(s, turn, a, rows, p.b[t.b], t.column * BN, i * weft::BK, src);
            }
        });
    }
    weft::drain(s, turn);
}

// Warp 2: tells the loader how many units of peers' rows lie here, in its order. It goes ahead of the loader, which a
// look at a flag and a fence, some microseconds for each unit, would hold up.
__device__ __forceinline__ void watch(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
    const int lane = threadIdx.x % 32;
    u32 arrived = 0;
    for (Walk walk = steps_of(p, order); walk.step < order.steps(); walk.next()) {
        const Tile t = order.tile(p, walk.step, s.block);
        const int row = t.row * BM + lane / PIECES_K * PIECE_ROWS;
        each_part(p, t, [&](int src) {
            if (src == p.watch.rank) return;
            for (int unit = 0; unit < order.units; ++unit) {
                const int column = unit * UNIT_COLUMNS + lane % PIECES_K * PIECE_COLUMNS;
                if (lane < PIECES && row < p.m && column < p.k) {
                    const int flag = (t.row * order.units + unit) * PIECES + lane;
                    weft::wait_flag(
                        p.watch, src, p.buffer.flags + src * p.buffer.flags_per_rank + flag, use, weft::WAIT_DATA);
                }
                weft::fence_proxy_async();
                __syncwarp();
                if (lane == 0) weft::set_count(s.counts + ARRIVED, ++arrived);
            }
        });
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    all_gather_matmul(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    // In shared memory: there are no registers to keep it in.
    Order& order = *reinterpret_cast<Order*>(s.counts + ORDER);
    const u32 use = p.watch.words[p.buffer.epoch] + 1;
    weft::begin(s, [&] { order = Order(p); });
    const int warp = weft::warp_of_block(), warpgroup = warp / 4, role = warp % 4;
    if (static_cast<int>(blockIdx.x) < p.comm_sms) {
        send(p, s, order, use);
        __syncthreads();
    }
    if (warpgroup == 2) {
        weft::warpgroup_reg_dealloc<SERVE_REGISTERS>();
        if (role == 0) {
            load(p, s, order);
            if (p.final && threadIdx.x % 32 == 0) weft::leave(p.watch, p.buffer, use);
        }
        if (role == 1 && p.push) push(p, order, use, blockIdx.x, gridDim.x, s.counts + SENT);
        if (role == 2) watch(p, s, order, use);
        if (role == 3 && p.push) post(p, order, use, blockIdx.x, 1, gridDim.x, s.counts + SENT);
    } else {
        weft::warpgroup_reg_alloc<MULTIPLY_REGISTERS>();
        weft::PipelineState<STAGES> turn;
        const int depth = (p.k + weft::BK - 1) / weft::BK * (SPLIT_K ? p.buffer.world_size : 1);
        for (Walk walk = steps_of(p, order); walk.step < order.steps(); walk.next()) {
            const Tile t = order.tile(p, walk.step, s.block);
            float sums[weft::SUMS];
            weft::multiply(s, turn, warpgroup, depth, sums);
            const int row = t.row * BM, column = t.column * BN, n = p.n[t.b];
            weft::u16* c = p.c[t.b] + (static_cast<u64>(t.src) * p.m + row) * n + column;
            weft::store_rows(c, n, p.m - row, n - column, warpgroup, sums, [](int, float*) {});
        }
    }
}
