// Means of rows and sums of the squares around them by a cluster of blocks, in one round of cluster_reduce.cuh.
//
//   ClusterMoments<BLOCKS, TERMS, ROWS> team(count);
//   team.publish(i, elements, sums, squares);   chunk i of each row: so many elements, this lane's sums of them, and
//                                               squares(row, mean) of what its own are away from a mean
//   team.join();
//   team.totals(most, elements, of_chunk, map, means, out);   of all chunks; map of each sum of squares
//
// The rest is as there. A chunk is one warp's, which sees its numbers twice: it takes the squares around the chunk's own
// mean. Chunks are joined as Chan, Golub and LeVeque (1979) do, so no difference of large squares is taken anywhere.

#pragma once

#include "math/cluster_reduce.cuh"

namespace weft {

template <int BLOCKS, int TERMS, int ROWS>
struct ClusterMoments : ClusterReduce<BLOCKS, TERMS, ROWS, 2> {
    using Base = ClusterReduce<BLOCKS, TERMS, ROWS, 2>;
    using Sums = WarpSums<ROWS>;
    using Base::Base;

    // By whole warps.
    template <typename Squares>
    __device__ __forceinline__ void publish(
        int chunk, float elements, const float (&sums)[ROWS], const Squares& squares) {
        const float sum = Sums::of(sums);
        Base::share(0, chunk, sum);
        float means[ROWS], around[ROWS];
        Sums::to_all(sum / elements, means);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) around[row] = squares(row, means[row]);
        Base::share(1, chunk, Sums::of(around));
    }

    // By whole warps, behind `join` of the round in which the chunks were published.
    template <typename Elements, typename Map>
    __device__ __forceinline__ void totals(
        int most, float elements, const Elements& of_chunk, const Map& map, float (&means)[ROWS],
        float (&out)[ROWS]) const {
        float of_lane[ROWS] = {};
        Base::each_published(most, [&](int chunk, const float* term) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) of_lane[row] += term[row * TERMS];
        });
        Sums::to_all(Sums::of(of_lane) / elements, means);
        float around[ROWS] = {};
        Base::each_published(most, [&](int chunk, const float* term) {
            const float count = of_chunk(chunk);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float apart = term[row * TERMS] / count - means[row];
                around[row] += term[(ROWS + row) * TERMS] + count * apart * apart;
            }
        });
        Sums::to_all(map(Sums::of(around)), out);
    }
};

}  // namespace weft
