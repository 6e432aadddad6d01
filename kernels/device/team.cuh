// A team of blocks, one cluster, that works on a row together: sums over the row through distributed shared memory.
//
//   Team<BLOCKS, TERMS> team;       the cluster's blocks begin to gather
//   team.publish(i, warp_sum(x));   warp for warp, each i once: a term of the sums, told to every block
//   team.meet();                    all terms are there
//   team.total(first, count);       terms first, first + 1, ...: the same bits in every thread of every block
//
// Terms are added in an order that depends on their numbers alone, neither on the cluster's size nor on who
// published them. Two sets of terms take turns, so one meeting a round is enough: who publishes for round
// n + 2 has met, in round n + 1, everybody who had read round n. A block whose memory a peer may still write to
// must not end: the last meeting is behind the last publish.

#pragma once

namespace weft {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

template <int BLOCKS, int ROUND>
struct Team {
    float* terms;
    bool gathered = BLOCKS == 1;
    int round = 0;

    __device__ __forceinline__ Team() {
        __shared__ float memory[2 * ROUND];
        terms = memory;
        if constexpr (BLOCKS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }

    __device__ __forceinline__ static int rank() {
        if constexpr (BLOCKS == 1) return 0;
        int rank;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        return rank;
    }

    // By all threads, before the first publish: a block that has not started has no memory to write to.
    __device__ __forceinline__ void gather() {
        if constexpr (BLOCKS > 1) {
            if (!gathered) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
            gathered = true;
        }
    }

    // By whole warps: lane i tells block i.
    __device__ __forceinline__ void publish(int term, float value) {
        const int lane = threadIdx.x % 32;
        if (lane >= BLOCKS) return;
        float* place = terms + round % 2 * ROUND + term;
        if constexpr (BLOCKS == 1) {
            *place = value;
        } else {
            const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(place));
            asm volatile(
                "{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;"
                " st.shared::cluster.f32 [there], %2; }" ::"r"(here),
                "r"(lane), "f"(value)
                : "memory");
        }
    }

    __device__ __forceinline__ void meet() {
        if constexpr (BLOCKS == 1) {
            __syncthreads();
        } else {
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        }
        ++round;
    }

    // By whole warps, behind the meeting of the round in which they were published.
    __device__ __forceinline__ float total(int first, int count) const {
        const float* published = terms + (round - 1) % 2 * ROUND + first;
        float sum = 0;
        for (int i = threadIdx.x % 32; i < count; i += 32) sum += published[i];
        return warp_sum(sum);
    }
};

}  // namespace weft
