// sums = residual + all_reduce(x), normed = sums / rms(sums) * weight, row by row, in one kernel.
//
// The all-reduce is taken in float32, in rank order, and rounded; every rank adds its own residual, which may differ,
// and norms the rounded sum. Two forms that give the same bits:
//   one_shot  every rank sends its rows to all, and computes every row.
//   two_shot  row g * WORLD_SIZE + q of group g belongs to rank q, which reduces it and sends the total to all; every
//             rank adds its residual to every row and norms it. A group's rows past the end are zeros, so every block
//             of every rank receives from every rank.
// A cluster of CLUSTER blocks computes a row, or a group; chunk j of 32 vectors is one warp's, its sum of squares term
// j of the row's. Clusters take rows, or groups, round-robin.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh) between ranks, cluster_reduce.cuh inside a cluster.
// Graph-safe.
// docs/protocol.md#ll-exchange, #cluster-reduction

#include "comm/ll_exchange.cuh"
#include "math/cluster_reduce.cuh"

#ifndef CLUSTER
#error "CLUSTER, VECTORS: blocks of a team; vectors of a row that a thread holds"
#endif

namespace {

using weft::ELEMENTS;
using weft::Numbers;
using weft::u32;
using weft::Epoch;
using Sum = weft::reduce::sum;

constexpr int WARPS = 16;  // of a block, at most
constexpr int TERMS = CLUSTER * WARPS * VECTORS;  // of a row, at most
using OneRow = weft::ClusterReduce<CLUSTER, TERMS>;
using Group = weft::ClusterReduce<CLUSTER, TERMS, WORLD_SIZE>;

struct Params {
    weft::ExchangeSlots slots;
    const uint4* x;
    const uint4* residual;
    const uint4* weight;
    uint4* normed;
    uint4* sums;
    u32 rows;
    u32 vectors;  // of a row
    float eps;
    float elements;  // of a row
};

// Where this thread's vectors lie: `chunk(v)` among the row's chunks, `at(v)` in the row, `index(v)` in a slot row.
struct RowShare {
    u32 first, step, vectors;

    __device__ __forceinline__ RowShare(const Params& p, u32 block) {
        first = threadIdx.x / 32 * CLUSTER + block;
        step = blockDim.x / 32 * CLUSTER;
        vectors = p.vectors;
    }

    __device__ __forceinline__ u32 chunk(int v) const { return first + v * step; }
    __device__ __forceinline__ u32 at(int v) const { return chunk(v) * 32 + threadIdx.x % 32; }
    __device__ __forceinline__ bool has(int v) const { return at(v) < vectors; }
    __device__ __forceinline__ u32 index(int v) const { return v * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ u32 chunks() const { return (vectors + 31) / 32; }
};

__device__ __forceinline__ float squares(const uint4& v) {
    const Numbers numbers(v);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sum += numbers.of[i] * numbers.of[i];
    return sum;
}

__device__ __forceinline__ uint4 plus(const uint4& reduced, const uint4& residual) {
    Numbers total(reduced);
    const Numbers more(residual);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) total.of[i] += more.of[i];
    return total.rounded();
}

__device__ __forceinline__ uint4 scaled(const uint4& sums, float scale, const uint4& weight) {
    Numbers result(sums);
    const Numbers w(weight);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) result.of[i] = result.of[i] * scale * w.of[i];
    return result.rounded();
}

__device__ __forceinline__ float scale_of(const Params& p, float squares) {
    return rsqrtf(squares / p.elements + p.eps);
}

__device__ __forceinline__ const uint4* vector(const uint4* rows, const Params& p, u32 row, u32 at) {
    return rows + static_cast<weft::u64>(row) * p.vectors + at;
}

__device__ __forceinline__ uint4* vector(uint4* rows, const Params& p, u32 row, u32 at) {
    return rows + static_cast<weft::u64>(row) * p.vectors + at;
}

__device__ __forceinline__ uint4 row_or_zeros(const uint4* rows, const Params& p, u32 row, u32 at) {
    return row < p.rows ? weft::load_vector(vector(rows, p, row, at)) : make_uint4(0, 0, 0, 0);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(512, 1)
    one_shot(const __grid_constant__ Params p) {
    OneRow team(blockDim.x / 32 * CLUSTER * VECTORS);
    weft::begin();
    const RowShare s(p, team.rank());
    const u32 first = blockIdx.x / CLUSTER, teams = gridDim.x / CLUSTER;
    const u32 slots = VECTORS * blockDim.x;  // of a row

    uint4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) x[v] = weft::load_vector(vector(p.x, p, first, s.at(v)));
    }
    const Epoch epoch(p.slots);

    u32 base = 0;
    for (u32 row = first; row < p.rows; row += teams, base += slots) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!s.has(v)) continue;
            if (row != first) x[v] = weft::load_vector(vector(p.x, p, row, s.at(v)));
            epoch.send_to_all(base + s.index(v), weft::ll_encode(x[v]));
        }
    }

    uint4 weight[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) weight[v] = weft::load_vector(p.weight + s.at(v));
    }
    base = 0;
    for (u32 row = first; row < p.rows; row += teams, base += slots) {
        uint4 sums[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float term[1] = {};
            if (s.has(v)) {
                const uint4 own = weft::load_vector(vector(p.x, p, row, s.at(v)));
                const uint4 residual = weft::load_vector(vector(p.residual, p, row, s.at(v)));
                sums[v] = plus(weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded(), residual);
                weft::store_vector(vector(p.sums, p, row, s.at(v)), sums[v]);
                term[0] = squares(sums[v]);
            }
            __syncwarp();
            team.gather();
            team.publish(s.chunk(v), term);
        }
        team.join();
        float scale[1];
        team.totals(s.chunks(), [&](float squares) { return scale_of(p, squares); }, scale);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (s.has(v)) {
                weft::store_vector(vector(p.normed, p, row, s.at(v)), scaled(sums[v], scale[0], weight[v]));
            }
        }
    }
    epoch.leave();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(512, 1)
    two_shot(const __grid_constant__ Params p) {
    Group team(blockDim.x / 32 * CLUSTER * VECTORS);
    weft::begin();
    const RowShare s(p, team.rank());
    const u32 first = blockIdx.x / CLUSTER, teams = gridDim.x / CLUSTER;
    const u32 groups = (p.rows + WORLD_SIZE - 1) / WORLD_SIZE;
    const u32 slots = VECTORS * blockDim.x;
    const u32 results = p.slots.capacity / 2;  // the second half of a sender's slots has the results

    uint4 x[VECTORS][WORLD_SIZE];
    auto load = [&](u32 group) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) {
                if (s.has(v)) x[v][i] = row_or_zeros(p.x, p, group * WORLD_SIZE + weft::peer_of(i), s.at(v));
            }
        }
    };
    load(first);
    const Epoch epoch(p.slots);

    u32 base = 0;
    for (u32 group = first; group < groups; base += slots) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) {
                if (s.has(v)) epoch.send(weft::peer_of(i), base + s.index(v), weft::ll_encode(x[v][i]));
            }
        }
        group += teams;
        if (group < groups) load(group);
    }

    base = 0;
    for (u32 group = first; group < groups; group += teams, base += slots) {
        const u32 row = group * WORLD_SIZE + RANK;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!s.has(v)) continue;
            const uint4 own = row_or_zeros(p.x, p, row, s.at(v));
            const uint4 residual = row_or_zeros(p.residual, p, row, s.at(v));
            const uint4 total = weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded();
            epoch.send_to_all(results + base + s.index(v), weft::ll_encode(total));
            if (row < p.rows) weft::store_vector(vector(p.sums, p, row, s.at(v)), plus(total, residual));
        }
    }

    uint4 weight[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) weight[v] = weft::load_vector(p.weight + s.at(v));
    }
    base = 0;
    for (u32 group = first; group < groups; group += teams, base += slots) {
        uint4 sums[VECTORS][WORLD_SIZE];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float terms[WORLD_SIZE] = {};
            if (s.has(v)) {
                // The residuals are in flight while the totals arrive.
                uint4 residual[WORLD_SIZE];
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
                    const uint4* from = q == RANK ? p.sums : p.residual;
                    residual[q] = row_or_zeros(from, p, group * WORLD_SIZE + q, s.at(v));
                }
                epoch.take_all(results + base + s.index(v), sums[v]);
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
                    sums[v][q] = q == RANK ? residual[q] : plus(sums[v][q], residual[q]);
                    terms[q] = squares(sums[v][q]);
                }
            }
            __syncwarp();
            team.gather();
            team.publish(s.chunk(v), terms);
        }
#pragma unroll
        for (int q = 0; q < WORLD_SIZE; ++q) {
            const u32 row = group * WORLD_SIZE + q;
            if (q == RANK || row >= p.rows) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (s.has(v)) weft::store_vector(vector(p.sums, p, row, s.at(v)), sums[v][q]);
            }
        }
        team.join();
        float scale[WORLD_SIZE];
        team.totals(s.chunks(), [&](float squares) { return scale_of(p, squares); }, scale);
#pragma unroll
        for (int q = 0; q < WORLD_SIZE; ++q) {
            const u32 row = group * WORLD_SIZE + q;
            if (row >= p.rows) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (!s.has(v)) continue;
                weft::store_vector(vector(p.normed, p, row, s.at(v)), scaled(sums[v][q], scale[q], weight[v]));
            }
        }
    }
    epoch.leave();
}
