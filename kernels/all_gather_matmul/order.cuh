// The tile scheduler: which tiles a cluster computes in which order, and in which order chunks of the local rows are
// sent. Plain arithmetic: it is tested on the CPU as it is. `Params` has m, k, bs, columns, raster_group,
// remote_raster_group, group, buffer.world_size and watch.rank; BM, UNIT_COLUMNS, PIECE_ROWS, PIECE_COLUMNS and SPLIT_K are
// defined. docs/protocol.md#all-gather--matmul says why.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

constexpr int PIECES_M = BM / PIECE_ROWS;  // chunks of a row of tiles
constexpr int PIECES_K = UNIT_COLUMNS / PIECE_COLUMNS;  // of a k-chunk
constexpr int PIECES = PIECES_M * PIECES_K;

struct GatherTile {
    int src, row, column, b;  // with SPLIT_K src is 0: all ranks have a part in each tile
};

// Rows of tiles stand in a list: the local ones, then group by group those of the peers, in turn. A step is a pair of
// neighbours of the list. With SPLIT_K each row of tiles stands there once.
template <typename Params>
struct GatherTileScheduler {
    int rows;  // of tiles, of a shard
    int columns, units;
    int pairs, own_pairs;
    int pieces;  // chunks that are sent

    __device__ explicit GatherTileScheduler(const Params& p) {
        rows = (p.m + BM - 1) / BM;
        units = (p.k + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
        pairs = (SPLIT_K ? rows + 1 : rows * p.buffer.world_size + 1) / 2;
        own_pairs = SPLIT_K ? 0 : rows / 2;
        pieces = rows * units * PIECES;
        columns = 0;
        for (int i = 0; i < p.bs; ++i) columns += p.columns[i];
    }

    __device__ int steps() const { return pairs * columns; }

    __device__ GatherTile tile(const Params& p, int step, int block) const {
        GatherTile t;
        const int own = own_pairs * columns, peers = p.buffer.world_size - 1, rank = p.watch.rank;
        int pair;
        if (step < own) {
            grouped(step, own_pairs, columns, p.raster_group, pair, t.column);
        } else {
            grouped(step - own, pairs - own_pairs, columns, p.remote_raster_group, pair, t.column);
            pair += own_pairs;
        }
        int place = 2 * pair + block;
        if (SPLIT_K || place < rows || place >= rows * p.buffer.world_size) {
            t.src = SPLIT_K ? 0 : rank;
            t.row = min(place, rows);  // past the end of the list is past that of A: nothing is stored
        } else {
            place -= rows;
            const int first = place / (p.group * peers) * p.group;
            place -= first * peers;
            t.row = first + place / peers;
            t.src = (rank + 1 + place % peers) % p.buffer.world_size;
        }
        t.b = 0;
        while (t.column >= p.columns[t.b]) t.column -= p.columns[t.b++];
        return t;
    }
};

// The steps of a cluster, one after the other. The first wave has `lead` steps only. The first `comm_sms` of all
// `blocks` send before they compute: their clusters join when the others have taken `missed` steps behind that wave.
// Where fewer clusters run at once than the first wave has steps, it is as long as the others.
struct GatherSteps {
    int step, all, others, index, lead, joined;

    __device__ GatherSteps(int block, int blocks, int comm_sms, int missed, int wanted_lead) {
        const int cluster = block / 2, sending = comm_sms / 2;
        all = blocks / 2;
        others = all - sending;
        lead = wanted_lead <= others ? wanted_lead : 0;
        joined = lead + missed * others;
        index = cluster < sending ? others + cluster : cluster - sending;
        step = cluster < sending ? joined + index : index < lead ? index : lead + index;
    }

    __device__ void next() {
        if (step >= joined) {
            step += all;
        } else {
            step += step < lead ? lead : others;
            if (step >= joined) step = joined + index;
        }
    }
};

// Where chunk `index` of the sending order lies.
template <typename Params>
struct GatherPiece {
    int row, column, flag;
    bool inside;

    __device__ GatherPiece(const Params& p, const GatherTileScheduler<Params>& order, int index) {
        const int of_group = p.group * order.units * PIECES;
        const int first = index / of_group * p.group;
        const int height = min(p.group, order.rows - first);
        index %= of_group;
        const int unit = index / (height * PIECES);
        index %= height * PIECES;
        const int tile_row = first + index / PIECES;
        index %= PIECES;
        row = tile_row * BM + index / PIECES_K * PIECE_ROWS;
        column = unit * UNIT_COLUMNS + index % PIECES_K * PIECE_COLUMNS;
        flag = (tile_row * order.units + unit) * PIECES + index;
        inside = row < p.m && column < p.k;
    }
};

}  // namespace weft
