// Sums over the lanes of a warp, one or several at once, and the largest. By whole warps.

#pragma once

namespace weft {

// COUNT sums, each of one term of every lane. In each step half of the lanes take half of the sums, until a lane has
// one left: six shuffles for four sums instead of twenty. Lanes are paired alike for any COUNT, so the bits are the
// same.
template <int COUNT>
struct WarpSums {
    static constexpr int PADDED = COUNT <= 1 ? 1 : COUNT <= 2 ? 2 : COUNT <= 4 ? 4 : 8;
    static constexpr int LANES = 32 / PADDED;  // that hold the same sum
    static_assert(COUNT <= 8, "8 sums at most");

    // The sum that this lane holds (none from COUNT on), and this lane's number among those that hold it.
    __device__ __forceinline__ static int which() { return threadIdx.x % 32 / LANES; }
    __device__ __forceinline__ static int lane() { return threadIdx.x % LANES; }

    __device__ __forceinline__ static float of(const float (&terms)[COUNT]) {
        float left[PADDED];
#pragma unroll
        for (int i = 0; i < PADDED; ++i) left[i] = i < COUNT ? terms[i] : 0;
#pragma unroll
        for (int count = PADDED, mask = 16; mask > 0; mask /= 2) {
            if (count == 1) {
                left[0] += __shfl_xor_sync(~0u, left[0], mask);
                continue;
            }
            count /= 2;
            const bool upper = threadIdx.x & mask;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const float given = upper ? left[i] : left[i + count];
                left[i] = (upper ? left[i + count] : left[i]) + __shfl_xor_sync(~0u, given, mask);
            }
        }
        return left[0];
    }

    // Broadcasts numbers that lie where the sums do to every lane.
    __device__ __forceinline__ static void to_all(float mine, float (&all)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all[i] = COUNT == 1 ? mine : __shfl_sync(~0u, mine, i * LANES);
    }
};

// The largest word of all lanes. Of floats that are not negative it is the largest, and a NaN beyond all.
__device__ __forceinline__ unsigned int largest_of_warp(unsigned int word) { return __reduce_max_sync(~0u, word); }

}  // namespace weft
