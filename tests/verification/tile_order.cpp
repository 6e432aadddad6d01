// The orders of the CUDA products on the CPU: who computes, sends and waits for what. Prints what is wrong, or nothing.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

#include GATHER
#include SCATTER

struct BufferWords {
    int world_size;
};
struct WaitParams {
    int rank;
};
struct Params {
    int m, n, k, bs, batches;
    int columns[4];
    int raster_group, remote_raster_group, group;
    BufferWords buffer;
    WaitParams watch;
};

static int failures = 0;
static void expect(bool good, const char* what, const Params& p) {
    if (good) return;
    std::printf(
        "%s: m=%d n=%d k=%d bs=%d columns=%d batches=%d bands=%d,%d group=%d ranks=%d rank=%d\n", what, p.m,
        p.n, p.k, p.bs, p.columns[0], p.batches, p.raster_group, p.remote_raster_group, p.group, p.buffer.world_size,
        p.watch.rank);
    if (++failures > 20) std::exit(1);
}

static void gather(const Params& p) {
    using namespace weft;
    const GatherTileScheduler<Params> order(p);
    std::set<std::tuple<int, int, int, int>> tiles;
    for (int step = 0; step < order.steps(); ++step) {
        for (int block = 0; block < 2; ++block) {
            const GatherTile t = order.tile(p, step, block);
            expect(t.b < p.bs && t.column < p.columns[t.b], "a column that no B has", p);
            if (t.row >= order.rows) continue;  // a block without a tile
            expect(t.src >= 0 && t.src < (SPLIT_K ? 1 : p.buffer.world_size), "rows of no rank", p);
            expect(tiles.insert({t.src, t.row, t.b, t.column}).second, "a tile twice", p);
        }
    }
    expect(
        tiles.size() == size_t(order.rows) * order.columns * (SPLIT_K ? 1 : p.buffer.world_size),
        "not every tile of every rank", p);

    const int all = order.chunks;
    std::vector<int> sent(all);
    std::set<std::pair<int, int>> places;
    for (int i = 0; i < all; ++i) {
        const GatherChunk<Params> chunk(p, order, i);
        expect(chunk.flag >= 0 && chunk.flag < all, "a flag past the end", p);
        if (chunk.flag < 0 || chunk.flag >= all) return;
        expect(!sent[chunk.flag]++, "a flag twice", p);
        expect(places.insert({chunk.row, chunk.column}).second, "a chunk twice", p);
        expect(chunk.inside == (chunk.row < p.m && chunk.column < p.k), "outside", p);
        // What the loader waits for: lane l of k-chunk c of row r, as kernel.cu computes it.
        const int lane = chunk.flag % CHUNKS, k_chunk = chunk.flag / CHUNKS % order.k_chunks;
        const int row = chunk.flag / CHUNKS / order.k_chunks;
        expect(row * BM + lane / CHUNKS_K * CHUNK_ROWS == chunk.row, "a lane waits for other rows", p);
        expect(
            k_chunk * K_CHUNK_COLUMNS + lane % CHUNKS_K * CHUNK_COLUMNS == chunk.column, "a lane waits for other columns", p);
    }
}

// `blocks` in pairs, the first `comm_sms` of which send first.
static void walk(int steps, int blocks, int comm_sms, int skipped_steps, int wanted_first_wave) {
    using namespace weft;
    std::vector<int> taken(steps);
    const int others = (blocks - comm_sms) / 2, first_wave = wanted_first_wave <= others ? wanted_first_wave : 0;
    for (int block = 0; block < blocks; ++block) {
        int before = -1, count = 0;
        for (GatherSteps w(block, blocks, comm_sms, skipped_steps, wanted_first_wave); w.step < steps; w.next()) {
            expect(w.step > before, "a step that is not behind the last one", {});
            expect(w.step >= first_wave || before < 0, "a second step of the first wave", {});
            before = w.step;
            if (w.step < 0 || w.step >= steps) return;
            ++taken[w.step];
            const bool all_have_skipped = w.step >= first_wave + skipped_steps * others;
            expect(block >= comm_sms || all_have_skipped, "a sender multiplies before it is due", {});
            if (w.step < first_wave) continue;
            expect(block < comm_sms || all_have_skipped == (count >= skipped_steps), "a round that is not one", {});
            ++count;
        }
    }
    for (int times : taken) expect(times == 2, "a step that is not one cluster's", {});
}

static void scatter(Params p) {
    using namespace weft;
    std::map<std::tuple<int, int, int>, int> steps;  // (rank, dst, tile) -> step
    for (int rank = 0; rank < WORLD_SIZE; ++rank) {
        p.watch.rank = rank;
        const ScatterTileScheduler<Params> order(p);
        std::set<std::tuple<int, int, int, int>> places;
        for (int step = 0; step < order.steps(); ++step) {
            for (int block = 0; block < 2; ++block) {
                const ScatterTile t = order.tile(p, step, block);
                expect(t.column < order.columns, "a column past the end", p);
                // Both blocks load B's columns for each other, whether they have a tile or not.
                const ScatterTile other = order.tile(p, step, 1 - block);
                expect(t.column == other.column && (!SPLIT_N || t.dst == other.dst), "other columns of B", p);
                if (!t.inside) continue;
                expect(t.index >= 0 && t.index < order.each(), "a tile past the end", p);
                expect(places.insert({t.dst, t.batch, t.row, t.column}).second, "a tile twice", p);
                expect(steps.insert({{rank, t.dst, t.index}, step}).second, "an index twice", p);
            }
        }
        const int tiles = p.batches * ((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN);
        expect(tiles <= order.each(), "too few places", p);
        expect(places.size() == size_t(tiles) * WORLD_SIZE, "not every tile for every rank", p);
    }
    // No own tile waits for one that a peer computes behind a wait of its own: their steps are not later.
    for (const auto& [key, step] : steps) {
        const auto [rank, dst, index] = key;
        if (rank != dst) expect(step <= steps.at({dst, dst, index}), "a tile is waited for before it is due", p);
    }
}

int main() {
    std::mt19937 random(std::random_device{}());
    const auto pick = [&](int low, int high) { return int(random() % (high - low + 1)) + low; };
    for (int round = 0; round < 400; ++round) {
        Params p{};
        p.m = pick(1, 1500), p.n = pick(1, 3000), p.k = pick(1, 5000);
        p.bs = pick(1, 4), p.batches = SPLIT_N ? 1 : pick(1, 3);
        for (int i = 0; i < p.bs; ++i) p.columns[i] = pick(1, 9);
        p.raster_group = pick(1, 9), p.remote_raster_group = pick(1, 12);
        p.group = pick(1, (p.m + BM - 1) / BM);
        p.buffer.world_size = pick(2, 8);
        p.watch.rank = pick(0, p.buffer.world_size - 1);
        gather(p);
        scatter(p);
        const int comm_sms = 2 * pick(0, 6);
        walk(pick(1, 900), comm_sms + 2 * pick(1, 60), comm_sms, pick(0, 9), pick(0, 60));
    }
    return failures != 0;
}
