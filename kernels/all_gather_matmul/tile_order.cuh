// The tile scheduler: which tiles a cluster computes in which order, and in which order chunks of the local rows are
// sent. Plain arithmetic: it is tested on the CPU as it is. `Params` has m, k, bs, columns, raster_group,
// remote_raster_group, group, buffer.world_size and watch.rank; BM, K_CHUNK_COLUMNS, CHUNK_ROWS, CHUNK_COLUMNS and
// SPLIT_K are defined. docs/protocol.md#all-gather--matmul says why.

#pragma once

#include "gemm/tile_scheduler.cuh"

namespace weft {

constexpr int CHUNKS_M = BM / CHUNK_ROWS;  // chunks of a row of tiles
constexpr int CHUNKS_K = K_CHUNK_COLUMNS / CHUNK_COLUMNS;  // of a k-chunk
constexpr int CHUNKS = CHUNKS_M * CHUNKS_K;

struct GatherTile {
    int src, row, column, b;  // with SPLIT_K src is 0: all ranks have a part in each tile
};

// Rows of tiles stand in a list: the local ones, then group by group those of the peers, in turn. A step is a pair of
// neighbours of the list. With SPLIT_K each row of tiles stands there once.
template <typename Params>
struct GatherTileScheduler {
    int rows;  // of tiles, of a shard
    int columns, k_chunks;
    int pairs, own_pairs;
    int chunks;  // chunks that are sent

    __device__ explicit GatherTileScheduler(const Params& p) {
        rows = (p.m + BM - 1) / BM;
        k_chunks = (p.k + K_CHUNK_COLUMNS - 1) / K_CHUNK_COLUMNS;
        pairs = (SPLIT_K ? rows + 1 : rows * p.buffer.world_size + 1) / 2;
        own_pairs = SPLIT_K ? 0 : rows / 2;
        chunks = rows * k_chunks * CHUNKS;
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

// The steps of a cluster, one after the other. The first wave has `first_wave` steps only. The first `comm_sms` of all
// `blocks` send before they compute: their clusters join when the others have taken `skipped_steps` after it.
// Where fewer clusters run at once than the first wave has steps, it is as long as the others.
struct GatherSteps {
    int step, all, others, index, first_wave, joined;

    __device__ GatherSteps(int block, int blocks, int comm_sms, int skipped_steps, int wanted_first_wave) {
        const int cluster = block / 2, sending = comm_sms / 2;
        all = blocks / 2;
        others = all - sending;
        first_wave = wanted_first_wave <= others ? wanted_first_wave : 0;
        joined = first_wave + skipped_steps * others;
        index = cluster < sending ? others + cluster : cluster - sending;
        step = cluster < sending ? joined + index : index < first_wave ? index : first_wave + index;
    }

    __device__ void next() {
        if (step >= joined) {
            step += all;
        } else {
            step += step < first_wave ? first_wave : others;
            if (step >= joined) step = joined + index;
        }
    }
};

// Where chunk `index` of the sending order lies.
template <typename Params>
struct GatherChunk {
    int row, column, flag;
    bool inside;

    __device__ GatherChunk(const Params& p, const GatherTileScheduler<Params>& order, int index) {
        const int of_group = p.group * order.k_chunks * CHUNKS;
        const int first = index / of_group * p.group;
        const int height = min(p.group, order.rows - first);
        index %= of_group;
        const int k_chunk = index / (height * CHUNKS);
        index %= height * CHUNKS;
        const int tile_row = first + index / CHUNKS;
        index %= CHUNKS;
        row = tile_row * BM + index / CHUNKS_K * CHUNK_ROWS;
        column = k_chunk * K_CHUNK_COLUMNS + index % CHUNKS_K * CHUNK_COLUMNS;
        flag = (tile_row * order.k_chunks + k_chunk) * CHUNKS + index;
        inside = row < p.m && column < p.k;
    }
};

}  // namespace weft
