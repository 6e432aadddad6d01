// sums = residual + all_reduce(x), normed = sums / rms(sums) * weight, row by row, in one kernel.
//
// The all-reduce is taken in float32, in rank order, and rounded; every rank adds its own residual, which may differ,
// and norms the rounded sum, or with ROUND_SUM 0 the sum in float32. Without RESIDUAL nothing is added. The weight is of
// the dtype of x, or float32 with WIDE_WEIGHT, and with OFFSET a number is added to it. Two forms that give the same
// bits:
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
#ifndef RESIDUAL
#define RESIDUAL 1
#endif
#ifndef ROUND_SUM
#define ROUND_SUM 1
#endif
#ifndef WIDE_WEIGHT
#define WIDE_WEIGHT 0
#endif
#ifndef OFFSET
#define OFFSET 0
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
    float offset;    // of the weight
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

// A vector of what is normed.
struct RowSum {
#if ROUND_SUM
    uint4 kept;
    __device__ __forceinline__ Numbers numbers() const { return Numbers(kept); }
    __device__ __forceinline__ uint4 rounded() const { return kept; }
    __device__ __forceinline__ void keep(const Numbers& sum) { kept = sum.rounded(); }
#else
    float kept[ELEMENTS];
    __device__ __forceinline__ Numbers numbers() const {
        Numbers sum(make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) sum.of[i] = kept[i];
        return sum;
    }
    __device__ __forceinline__ uint4 rounded() const { return numbers().rounded(); }
    __device__ __forceinline__ void keep(const Numbers& sum) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) kept[i] = sum.of[i];
    }
#endif
};

// The weight of a vector's numbers.
struct Weight {
#if WIDE_WEIGHT
    static constexpr int LOADS = ELEMENTS / 4;
#else
    static constexpr int LOADS = 1;
#endif
    uint4 loaded[LOADS];

    __device__ __forceinline__ void load(const Params& p, u32 at) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) loaded[i] = weft::load_vector(p.weight + at * LOADS + i);
    }

    __device__ __forceinline__ void of(float (&numbers)[ELEMENTS], float offset) const {
#if WIDE_WEIGHT
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            numbers[4 * i] = __uint_as_float(loaded[i].x);
            numbers[4 * i + 1] = __uint_as_float(loaded[i].y);
            numbers[4 * i + 2] = __uint_as_float(loaded[i].z);
            numbers[4 * i + 3] = __uint_as_float(loaded[i].w);
        }
#else
        const Numbers packed(loaded[0]);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) numbers[i] = packed.of[i];
#endif
#if OFFSET
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) numbers[i] += offset;
#endif
    }
};

__device__ __forceinline__ float squares(const RowSum& sum) {
    const Numbers numbers = sum.numbers();
    float total = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) total += numbers.of[i] * numbers.of[i];
    return total;
}

__device__ __forceinline__ RowSum plus(const uint4& reduced, const uint4& residual) {
    RowSum sum;
#if RESIDUAL
    Numbers total(reduced);
    const Numbers more(residual);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) total.of[i] += more.of[i];
    sum.keep(total);
#else
    sum.kept = reduced;
#endif
    return sum;
}

__device__ __forceinline__ uint4 scaled(const RowSum& sum, float scale, const Weight& weight, float offset) {
    Numbers result = sum.numbers();
    float w[ELEMENTS];
    weight.of(w, offset);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) result.of[i] = result.of[i] * scale * w[i];
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

__device__ __forceinline__ uint4 residual_of(const Params& p, u32 row, u32 at) {
#if RESIDUAL
    return weft::load_vector(vector(p.residual, p, row, at));
#else
    return make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ uint4 residual_or_zeros(const Params& p, u32 row, u32 at) {
    return row < p.rows ? residual_of(p, row, at) : make_uint4(0, 0, 0, 0);
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

    Weight weight[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) weight[v].load(p, s.at(v));
    }
    base = 0;
    for (u32 row = first; row < p.rows; row += teams, base += slots) {
        RowSum sums[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float term[1] = {};
            if (s.has(v)) {
                const uint4 own = weft::load_vector(vector(p.x, p, row, s.at(v)));
                const uint4 residual = residual_of(p, row, s.at(v));
                sums[v] = plus(weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded(), residual);
                weft::store_vector(vector(p.sums, p, row, s.at(v)), sums[v].rounded());
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
                weft::store_vector(vector(p.normed, p, row, s.at(v)), scaled(sums[v], scale[0], weight[v], p.offset));
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
#if ROUND_SUM
            const uint4 residual = residual_or_zeros(p, row, s.at(v));
#endif
            const uint4 total = weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded();
            epoch.send_to_all(results + base + s.index(v), weft::ll_encode(total));
#if ROUND_SUM
            if (row < p.rows) weft::store_vector(vector(p.sums, p, row, s.at(v)), plus(total, residual).rounded());
#else
            // Until this row's norm takes its place: the sum that is stored is not the one that is normed.
            if (row < p.rows) weft::store_vector(vector(p.normed, p, row, s.at(v)), total);
#endif
        }
    }

    Weight weight[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) weight[v].load(p, s.at(v));
    }
    base = 0;
    for (u32 group = first; group < groups; group += teams, base += slots) {
        // With ROUND_SUM the sums. Else the totals, as sums in float32 have no room: the residuals are read again.
        uint4 kept[VECTORS][WORLD_SIZE];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float terms[WORLD_SIZE] = {};
            if (s.has(v)) {
                // The residuals are in flight while the totals arrive.
                uint4 residual[WORLD_SIZE];
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
                    const u32 row = group * WORLD_SIZE + q;
                    const bool summed = ROUND_SUM && q == RANK;
                    residual[q] = summed ? row_or_zeros(p.sums, p, row, s.at(v)) : residual_or_zeros(p, row, s.at(v));
                }
                if (!ROUND_SUM) kept[v][RANK] = row_or_zeros(p.normed, p, group * WORLD_SIZE + RANK, s.at(v));
                epoch.take_all(results + base + s.index(v), kept[v]);
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
#if ROUND_SUM
                    kept[v][q] = q == RANK ? residual[q] : plus(kept[v][q], residual[q]).kept;
                    terms[q] = squares(RowSum{kept[v][q]});
#else
                    terms[q] = squares(plus(kept[v][q], residual[q]));
#endif
                }
            }
            __syncwarp();
            team.gather();
            team.publish(s.chunk(v), terms);
        }
#if ROUND_SUM
#pragma unroll
        for (int q = 0; q < WORLD_SIZE; ++q) {
            const u32 row = group * WORLD_SIZE + q;
            if (q == RANK || row >= p.rows) continue;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (s.has(v)) weft::store_vector(vector(p.sums, p, row, s.at(v)), kept[v][q]);
            }
        }
#endif
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
#if ROUND_SUM
                const RowSum sum{kept[v][q]};
#else
                const RowSum sum = plus(kept[v][q], residual_of(p, row, s.at(v)));
                weft::store_vector(vector(p.sums, p, row, s.at(v)), sum.rounded());
#endif
                const uint4 normed = scaled(sum, scale[q], weight[v], p.offset);
                weft::store_vector(vector(p.normed, p, row, s.at(v)), normed);
            }
        }
    }
    epoch.leave();
}
