// all_gather(A) @ B in one kernel: every block sends its part of the own rows while it multiplies.
//
// Computes C[src] = A[src] @ B for every rank src: A[src] [m, K] are the rows of rank src, B [K, N] is this rank's,
// C [W, m, N]. Up to MOST_BS Bs are multiplied by the same A. Products are summed in float32.
//
// Who writes: warp 1 of every block, pieces of PIECE_ROWS x PIECE_COLUMNS of the own rows, into slot `rank` of every
// peer's half, viewed [W, m, K]: from memory to shared memory once, from there by a bulk store to each peer, by a lane
// for each. When a store lies there, the lane sets flags(half)[rank][piece] = e on that peer. Before anything is sent
// to peer p, done(half)[p] >= e - 1 was seen.
// Who waits: the loader (warp 0), before it loads of a peer's rows the next UNIT_COLUMNS of K: a lane for each piece
// that these lie in. Own rows are read from the input.
// Use e = EPOCH[half] + 1 is read when the kernel starts; its last block ends the use (weft::leave), if `final`.
//
// Order: rows are sent and multiplied in groups of `group` rows of tiles from every rank, the own rows first. Inside a
// group pieces are sent by columns, then by rows: all tiles of a group advance along K as the data comes, and what
// remains to be done behind the last byte is the last columns' share of a tile, not a tile.
//
// Every block waits for what blocks of the other ranks send, so all blocks of a launch must be resident at once: no
// more than there are SMs to be had.

#define ROUNDS 0
#include "gemm.cuh"
#include "order.cuh"

using weft::PIECES;
using weft::PIECES_K;
using weft::u32;
using weft::u64;
using weft::u8;

namespace {

constexpr int MOST_BS = 4;
constexpr int PIECE_BYTES = PIECE_ROWS * PIECE_COLUMNS * 2;
constexpr int RING = EXTRA_SHARED / PIECE_BYTES;  // pieces in shared memory
constexpr int LAG = RING - 2;  // pieces on their way behind the newest, before the oldest is waited for

static_assert(RING >= 2 && RING <= 8);
static_assert(weft::PIECES <= 32, "a lane waits for each");
static_assert(BM % PIECE_ROWS == 0 && UNIT_COLUMNS % PIECE_COLUMNS == 0 && UNIT_COLUMNS % weft::BK == 0);

struct Params {
    weft::TensorMap own;  // A [1, 1, m, K], boxes of a stage
    weft::TensorMap gathered;  // the own half [1, W, m, K], boxes of a stage
    weft::TensorMap from;  // A [1, 1, m, K], boxes of a piece
    weft::TensorMap to;  // all halves [W, W, m, K], boxes of a piece; rank and slot lead
    weft::TensorMap b[MOST_BS];
    weft::Watch watch;
    weft::Half half;
    weft::u16* c[MOST_BS];  // [W, m, N]
    int n[MOST_BS];
    int bs;  // how many
    int columns[MOST_BS];  // of tiles, of each
    int m, k;
    int band;  // pairs of own rows of tiles walked together
    int remote_band;  // and of the peers'
    int group;  // rows of tiles of a rank that are sent together
    int push;  // this launch sends
    int final;  // and ends the use
};

using Order = weft::GatherOrder<Params>;
using Piece = weft::GatherPiece<Params>;
using Tile = weft::GatherTile;

// Warp 0: what the multiplying warpgroups work on.
__device__ __forceinline__ void load(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
    const int lane = threadIdx.x % 32;
    const int depth = (p.k + weft::BK - 1) / weft::BK;
    weft::Turn<STAGES> turn;
    for (int step = weft::first_step(); step < order.steps(); step += weft::stride()) {
        const Tile t = order.tile(p, step, s.block);
        const bool own = t.src == p.watch.rank;
        const weft::Rows rows{t.row * BM, own ? 0 : t.src, 0};
        for (int i = 0; i < depth; ++i) {
            if (!own && i % (UNIT_COLUMNS / weft::BK) == 0) {
                const int unit = i / (UNIT_COLUMNS / weft::BK);
                const int row = t.row * BM + lane / PIECES_K * PIECE_ROWS;
                const int column = unit * UNIT_COLUMNS + lane % PIECES_K * PIECE_COLUMNS;
                if (lane < PIECES && row < p.m && column < p.k) {
                    const int flag = (t.row * order.units + unit) * PIECES + lane;
                    weft::wait_flag(
                        p.watch, t.src, p.half.flags + t.src * p.half.flags_per_rank + flag, use, weft::WAIT_DATA);
                }
                __syncwarp();
                weft::fence_proxy_async();
            }
            const weft::TensorMap& a = own ? p.own : p.gathered;
            weft::load_stage(s, turn, a, rows, p.b[t.b], t.column * BN, i * weft::BK);
        }
    }
}

// Warp 1: lane l serves peer rank - 1 - l, lane 0 also fetches.
__device__ __forceinline__ void push(const Params& p, const weft::Shared& s, const Order& order, u32 use) {
    const int lane = threadIdx.x % 32, world_size = p.half.world_size, rank = p.watch.rank;
    const bool serves = lane < world_size - 1;
    const int peer = (rank + world_size - 1 - lane % world_size) % world_size;
    bool free = !weft::is_broken(p.watch);  // else the own rows may be worth nothing
    if (serves && free) free = weft::wait_flag(p.watch, peer, p.half.done + peer, use - 1, weft::WAIT_FREE);
    if (!__all_sync(~0u, free)) return;  // a peer may still read what would be overwritten; it will miss the flags
    weft::fence_proxy_async();
    u32* flags = weft::on_rank(p.watch.words, p.watch, p.half, peer) + p.half.flags + rank * p.half.flags_per_rank;

    const int all = order.rows * order.units * PIECES;
    int fetched = blockIdx.x, sent = blockIdx.x, posted = blockIdx.x;
    weft::Turn<RING> in, out;
    const auto fetch = [&] {
        const Piece piece(p, order, fetched);
        if (lane == 0) {
            if (piece.inside) {
                weft::arrive_expecting(s.own + in.at, PIECE_BYTES);
                weft::load_box(p.from, s.extra + in.at * PIECE_BYTES, s.own + in.at, piece.column, piece.row, 0, 0);
            } else {
                weft::arrive(s.own + in.at);
            }
        }
        in.next();
        fetched += gridDim.x;
    };
    const auto post = [&] {
        const Piece piece(p, order, posted);
        weft::fence_proxy_async();
        if (serves && piece.inside) weft::post_flag(flags + piece.flag, use);
        posted += gridDim.x;
    };
    for (int i = 0; i < RING && fetched < all; ++i) fetch();
    for (int i = 0; sent < all; ++i, sent += gridDim.x) {
        const Piece piece(p, order, sent);
        weft::wait(s.own + out.at, out.parity);
        if (serves && piece.inside) {
            weft::store_box(p.to, s.extra + out.at * PIECE_BYTES, piece.column, piece.row, rank, peer);
        }
        weft::commit_stores();
        out.next();
        if (i >= LAG) {
            weft::wait_stores<LAG>();
            __syncwarp();  // of all lanes: the oldest piece's place is free
            if (fetched < all) fetch();
            post();
        }
    }
    weft::wait_stores<0>();
    while (posted < sent) post();
}

}  // namespace

extern "C" __global__ void __cluster_dims__(weft::CLUSTER, 1, 1) __launch_bounds__(weft::THREADS, 1)
    all_gather_matmul(const __grid_constant__ Params p) {
    extern __shared__ u8 base[];
    const weft::Shared s = weft::shared_memory(base);
    weft::begin(s);
    const u32 use = p.watch.words[p.half.epoch] + 1;
    const Order order(p);
    const int warpgroup = threadIdx.x / weft::GROUP;
    if (warpgroup == 2) {
        weft::give_registers<weft::SERVE_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) load(p, s, order, use);
        if (warp == 1 && p.push) push(p, s, order, use);
    } else {
        weft::take_registers<weft::MULTIPLY_REGISTERS>();
        const int depth = (p.k + weft::BK - 1) / weft::BK;
        weft::Turn<STAGES> turn;
        for (int step = weft::first_step(); step < order.steps(); step += weft::stride()) {
            const Tile t = order.tile(p, step, s.block);
            float sums[weft::SUMS];
            weft::multiply(s, turn, warpgroup, depth, sums);
            const int row = t.row * BM, column = t.column * BN, n = p.n[t.b];
            weft::u16* c = p.c[t.b] + (static_cast<u64>(t.src) * p.m + row) * n + column;
            weft::store_rows(c, n, p.m - row, n - column, warpgroup, sums, [](int, float*) {});
        }
    }
    weft::end();
    if (p.final) weft::leave(p.watch, p.half, use);
}
