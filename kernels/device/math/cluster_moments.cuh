// Means of rows and sums of the squares around them by a cluster of blocks, in one round of cluster_reduce.cuh.
//
//   ClusterMoments<BLOCKS, TERMS, ROWS> team(count);
//   team.publish(i, elements, means, sums);   chunk i of each row: so many elements, the mean of this lane's, and
//                                             sums(row, from, first, second) of what its own are away from a number,
//                                             and of the squares of that
//   team.join();
//   team.totals(most, elements, of_chunk, map, means, out);   of all chunks; map of each sum of squares
//
// The rest is as there. Both sums are taken at once, around the mean of lane 0's elements in a chunk, and of chunk 0 in
// a row. With n of them among N, whatever the numbers are, the squares around it are at most N / n times those around
// the mean of all: their difference loses five bits of a chunk, and as many of a row of 32 (docs/protocol.md).

#pragma once

#include "math/cluster_reduce.cuh"

namespace weft {

template <int BLOCKS, int TERMS, int ROWS>
struct ClusterMoments : ClusterReduce<BLOCKS, TERMS, ROWS, 2> {
    using Base = ClusterReduce<BLOCKS, TERMS, ROWS, 2>;
    using Sums = WarpSums<ROWS>;
    using Base::Base;

    // By whole warps.
    template <typename Of>
    __device__ __forceinline__ void publish(
        int chunk, float elements, const float (&means)[ROWS], const Of& sums) {
        float first[ROWS] = {}, second[ROWS] = {}, from[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            from[row] = __shfl_sync(~0u, means[row], 0);
            sums(row, from[row], first[row], second[row]);
        }
        const float apart = Sums::of(first), squares = Sums::of(second);
        Base::share(0, chunk, apart + elements * mine(from));
        Base::share(1, chunk, around_mean(apart, squares, elements));
    }

    // By whole warps, after `join` of the round in which the chunks were published.
    template <typename Elements, typename Map>
    __device__ __forceinline__ void totals(
        int most, float elements, const Elements& of_chunk, const Map& map, float (&means)[ROWS],
        float (&out)[ROWS]) const {
        float first[ROWS] = {}, second[ROWS] = {}, from[ROWS];
        const float* published = Base::published();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) from[row] = published[row * TERMS] / of_chunk(0);
        Base::each_published(most, [&](int chunk, const float* term) {
            const float count = of_chunk(chunk);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float apart = term[row * TERMS] / count - from[row];
                first[row] += count * apart;
                second[row] += term[(ROWS + row) * TERMS] + count * apart * apart;
            }
        });
        const float apart = Sums::of(first), squares = Sums::of(second);
        Sums::to_all(mine(from) + apart / elements, means);
        Sums::to_all(map(around_mean(apart, squares, elements)), out);
    }

private:
    // Of the row whose sums this lane holds. By a mask: of a choice the compiler makes an array in memory.
    __device__ __forceinline__ static float mine(const float (&rows)[ROWS]) {
        u32 value = 0;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) value |= -u32{Sums::which() == row} & __float_as_uint(rows[row]);
        return __uint_as_float(value);
    }

    // The sum of the squares around the mean, by both sums around another number.
    __device__ __forceinline__ static float around_mean(float first, float second, float elements) {
        const float left = second - first * first / elements;
        return left < 0 ? 0 : left;  // and a NaN stays one
    }
};

}  // namespace weft
