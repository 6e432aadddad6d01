// sums = residual + all_reduce(x), normed = sums / rms(sums) * weight, row by row, in one kernel; with SUBTRACT_MEAN
// normed = (sums - mean(sums)) / std(sums) * weight + bias, the LayerNorm; with QUANT the RMSNorm, rounded, becomes fp8.
// With CHOICES x is what experts' outputs add up to (collective/combine.cuh).
//
// The all-reduce is taken in float32, in rank order, and rounded; every rank adds its own residual, which may differ,
// and norms the rounded sum, or with ROUND_SUM 0 the sum in float32. rows.cuh has what is compiled in. Two forms that
// give the same bits:
//   one_shot  every rank sends its rows to all, and computes every row.
//   two_shot  row g * WORLD_SIZE + q of group g belongs to rank q, which reduces it and sends the total to all; every
//             rank adds its residual to every row and norms it. A group's rows past the end are zeros, so every block
//             of every rank receives from every rank.
// A cluster of CLUSTER blocks computes a row, or a group; chunk j of 32 vectors is one warp's, and gives term j of the
// row's. Clusters take rows, or groups, round-robin.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh) between ranks, cluster_reduce.cuh inside a cluster.
// Graph-safe.
// docs/protocol.md#ll-exchange, #cluster-reduction

#include "rows.cuh"

// With IN_TURN two_shot sends totals again and again, so sums come after them.
#define SUMS_AT_ONCE (ROUND_SUM && !IN_TURN)

// Before Hopper there are no clusters, and no attribute of one block.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TEAM
#if CLUSTER > 1
#error "CLUSTER: must be 1 before Hopper"
#endif
#else
#define TEAM __cluster_dims__(CLUSTER, 1, 1)
#endif

extern "C" __global__ void TEAM __launch_bounds__(512, 1)
    one_shot(const __grid_constant__ Params p) {
    Team<1> team;
    weft::begin();
    const RowShare s(p, team.rank());
    const u32 first = blockIdx.x / CLUSTER, teams = gridDim.x / CLUSTER;
    const u32 slots = VECTORS * blockDim.x;  // of a row

    uint4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) x[v] = input_of(p, first, s.at(v));
    }
    const Epoch epoch(p.slots);

    u32 base;
    do {
        base = 0;
        for (u32 row = first; row < p.rows; row += teams, base += slots) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (!s.has(v)) continue;
                if (row != first || epoch.first_peer() > 1) x[v] = input_of(p, row, s.at(v));
#if CHOICES
                weft::store_vector(vector(p.sums, p, row, s.at(v)), x[v]);  // until the sum takes its place
#endif
                epoch.send_to_all(base + s.index(v), weft::ll_encode(x[v]));
            }
        }
    } while (epoch.next_turn());

    Affine affine[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) affine[v].load(p, s.at(v));
    }
    base = 0;
    for (u32 row = first; row < p.rows; row += teams, base += slots) {
        RowSum sums[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (s.has(v)) {
                const uint4 own = weft::load_vector(vector(CHOICES ? p.sums : p.x, p, row, s.at(v)));
                const uint4 residual = residual_of(p, row, s.at(v));
                sums[v] = plus(weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded(), residual);
                weft::store_vector(vector(p.sums, p, row, s.at(v)), sums[v].rounded());
            }
            team.publish(s, v, [&](int) { return sums[v].numbers(); });
        }
        Norm norm[1];
        team.join(p, s, norm);
        uint4 normed[VECTORS][1];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!s.has(v)) continue;
            normed[v][0] = norm[0].of(sums[v], affine[v], p);
            if (!QUANT) weft::store_vector(normed_vector(p, row, s.at(v)), normed[v][0]);
        }
        if constexpr (QUANT != 0) team.store_quantized(p, s, normed, row);
    }
    epoch.leave();
}

extern "C" __global__ void TEAM __launch_bounds__(512, 1)
    two_shot(const __grid_constant__ Params p) {
    Team<WORLD_SIZE> team;
    weft::begin();
    const RowShare s(p, team.rank());
    const u32 first = blockIdx.x / CLUSTER, teams = gridDim.x / CLUSTER;
    const u32 groups = (p.rows + WORLD_SIZE - 1) / WORLD_SIZE;
    const u32 slots = VECTORS * blockDim.x;
    const u32 results = p.slots.capacity / 2;  // the second half of a sender's slots has the results
    // With ROUND_SUM 0, else they are read again: there are no registers for more.
    constexpr bool KEEPS_RESIDUALS = WORLD_SIZE == 2;
    constexpr int KEPT = KEEPS_RESIDUALS ? VECTORS : 1;

    uint4 x[VECTORS][WORLD_SIZE];
#if IN_TURN
    int turn = 1;  // the one i of peer_of(i) whose rows are loaded
#endif
    auto load = [&](u32 group) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) {
#if IN_TURN
                if (i != turn) continue;
#endif
                if (s.has(v)) x[v][i] = input_or_zeros(p, group * WORLD_SIZE + weft::peer_of(i), s.at(v));
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
#if IN_TURN
                if (i != turn) continue;
#endif
                if (s.has(v)) epoch.send(weft::peer_of(i), base + s.index(v), weft::ll_encode(x[v][i]));
            }
        }
        group += teams;
#if IN_TURN
        if (group >= groups && epoch.next_turn()) {
            group = first;
            base = -slots;  // the next is 0
        }
        turn = epoch.first_peer();
#endif
        if (group < groups) load(group);
    }

    base = 0;
    for (u32 group = first; group < groups; group += teams, base += slots) {
        const u32 row = group * WORLD_SIZE + RANK;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!s.has(v)) continue;
            const uint4 own = input_or_zeros(p, row, s.at(v));
#if SUMS_AT_ONCE
            const uint4 residual = residual_or_zeros(p, row, s.at(v));
#endif
            const uint4 total = weft::take_reduced<Sum>(epoch, base + s.index(v), own).rounded();
            epoch.send_to_all(results + base + s.index(v), weft::ll_encode(total));
#if SUMS_AT_ONCE
            if (row < p.rows) weft::store_vector(vector(p.sums, p, row, s.at(v)), plus(total, residual).rounded());
#else
            if (row < p.rows) weft::store_vector(vector(totals(p), p, row, s.at(v)), total);
#endif
        }
    }
#if IN_TURN
    for (bool again = true; again;) {
        again = epoch.next_turn();
        base = 0;
        for (u32 group = first; group < groups; group += teams, base += slots) {
            const u32 row = group * WORLD_SIZE + RANK;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (!s.has(v)) continue;
                const uint4 total = row_or_zeros(totals(p), p, row, s.at(v));
                if (again) epoch.send_to_all(results + base + s.index(v), weft::ll_encode(total));
#if ROUND_SUM
                else if (row < p.rows) {
                    const uint4 sum = plus(total, residual_or_zeros(p, row, s.at(v))).rounded();
                    weft::store_vector(vector(p.sums, p, row, s.at(v)), sum);
                }
#endif
            }
        }
    }
#endif

    Affine affine[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (s.has(v)) affine[v].load(p, s.at(v));
    }
    base = 0;
    for (u32 group = first; group < groups; group += teams, base += slots) {
        // With ROUND_SUM the sums. Else the totals, as sums in float32 have no room.
        uint4 kept[VECTORS][WORLD_SIZE], residuals[KEPT][WORLD_SIZE];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            auto& residual = residuals[v % KEPT];
            if (s.has(v)) {
                // The residuals are in flight while the totals arrive.
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
                    const u32 row = group * WORLD_SIZE + q;
                    const bool summed = ROUND_SUM && q == RANK;
                    residual[q] = summed ? row_or_zeros(p.sums, p, row, s.at(v)) : residual_or_zeros(p, row, s.at(v));
                }
                if (!ROUND_SUM) kept[v][RANK] = row_or_zeros(totals(p), p, group * WORLD_SIZE + RANK, s.at(v));
                epoch.take_all(results + base + s.index(v), kept[v]);
#if ROUND_SUM
#pragma unroll
                for (int q = 0; q < WORLD_SIZE; ++q) {
                    kept[v][q] = q == RANK ? residual[q] : plus(kept[v][q], residual[q]).kept;
                }
#endif
            }
#if ROUND_SUM
            team.publish(s, v, [&](int q) { return Numbers(kept[v][q]); });
#else
            team.publish(s, v, [&](int q) { return plus(kept[v][q], residual[q]).numbers(); });
#endif
        }
        if constexpr (ROUND_SUM || KEEPS_RESIDUALS) {
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const u32 row = group * WORLD_SIZE + q;
                if ((ROUND_SUM && q == RANK) || row >= p.rows) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    if (!s.has(v)) continue;
                    const uint4 sum = ROUND_SUM ? kept[v][q] : plus(kept[v][q], residuals[v % KEPT][q]).rounded();
                    weft::store_vector(vector(p.sums, p, row, s.at(v)), sum);
                }
            }
        }
        Norm norm[WORLD_SIZE];
        team.join(p, s, norm);
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
                const uint4 residual = KEEPS_RESIDUALS ? residuals[v % KEPT][q] : residual_of(p, row, s.at(v));
                const RowSum sum = plus(kept[v][q], residual);
                if (!KEEPS_RESIDUALS) weft::store_vector(vector(p.sums, p, row, s.at(v)), sum.rounded());
#endif
                const uint4 normed = norm[q].of(sum, affine[v], p);
                if (QUANT) {
                    kept[v][q] = normed;
                } else {
                    weft::store_vector(normed_vector(p, row, s.at(v)), normed);
                }
            }
        }
        if constexpr (QUANT != 0) team.store_quantized(p, s, kept, group * WORLD_SIZE);
    }
    epoch.leave();
}
