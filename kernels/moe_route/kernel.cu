// Sorts the choices of a mixture of experts: a stable counting sort by one cluster.
//
// Of ids [T, k], the experts that tokens have chosen, those from `first` to `first + count` are this rank's. rows[i] is
// the token of the i-th choice of this rank's, by expert and then in the order of ids, 0 past the last one; offs[e] is
// how many there are of experts up to e; slots[T, k] is i of each choice, -1 where another rank has the expert or no
// one has.
//
// Each warp has a part of the ids and counts of its own. Nobody else writes to these, so there are no atomics; the
// order of warps is the order of ids, so there is one result. Blocks meet twice, in the cluster: the second time before
// one of them may end, as others read what it has counted. Graph-safe; it waits for no other rank.
//
// Defined by the includer: ID, the type of an id.

#include "ptx/barriers.cuh"

namespace {

constexpr int BLOCKS = 8, THREADS = 512, WARPS = THREADS / 32;

struct Params {
    const ID* ids;
    int* rows;
    int* offs;
    int* slots;
    int first, count;
    int choices, k;
};

// The expert's number among this rank's, -1 if it is none.
__device__ __forceinline__ int local_expert(const Params& p, int index, int end) {
    if (index >= end) return -1;
    const long long expert = static_cast<long long>(p.ids[index]) - p.first;
    return expert >= 0 && expert < p.count ? static_cast<int>(expert) : -1;
}

}  // namespace

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) moe_route(
    const __grid_constant__ Params p) {
    extern __shared__ int memory[];  // [WARPS + 2][count], and the number of this rank's choices
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = weft::rank_in_cluster();
    int* of_warp = memory + warp * p.count;
    int* of_block = memory + WARPS * p.count;
    int* starts = of_block + p.count;
    const int share = (p.choices + BLOCKS * THREADS - 1) / (BLOCKS * THREADS) * 32;
    const int begin = min((block * WARPS + warp) * share, p.choices), end = min(begin + share, p.choices);

    for (int e = lane; e < p.count; e += 32) of_warp[e] = 0;
    __syncwarp();
    for (int i = begin; i < end; i += 32) {
        const int expert = local_expert(p, i + lane, end);
        const unsigned same = __match_any_sync(~0u, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) of_warp[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.count; e += THREADS) {
        int before = 0;
        for (int w = 0; w < WARPS; ++w) {
            const int counted = memory[w * p.count + e];
            memory[w * p.count + e] = before;
            before += counted;
        }
        of_block[e] = before;
    }
    weft::sync_cluster();
    for (int e = threadIdx.x; e < p.count; e += THREADS) {
        int before = 0, total = 0;
        for (int b = 0; b < BLOCKS; ++b) {
            const int counted = weft::load_from(of_block + e, b);
            if (b < block) before += counted;
            total += counted;
        }
        for (int w = 0; w < WARPS; ++w) memory[w * p.count + e] += before;
        starts[e] = total;
    }
    weft::sync_cluster();
    if (warp == 0) {
        int before = 0;
        for (int first = 0; first < p.count; first += 32) {
            const int e = first + lane, counted = e < p.count ? starts[e] : 0;
            int up_to = counted;
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_up_sync(~0u, up_to, step);
                if (lane >= step) up_to += lower;
            }
            up_to += before;
            if (e < p.count) {
                starts[e] = up_to - counted;
                if (block == 0) p.offs[e] = up_to;
            }
            before = __shfl_sync(~0u, up_to, 31);
        }
        if (lane == 0) starts[p.count] = before;
    }
    __syncthreads();
    for (int i = begin; i < end; i += 32) {
        const int index = i + lane, expert = local_expert(p, index, end);
        const unsigned same = __match_any_sync(~0u, expert);
        const int earlier = __popc(same & ((1u << lane) - 1));
        const int slot = expert >= 0 ? starts[expert] + of_warp[expert] + earlier : -1;
        __syncwarp();
        if (expert >= 0) {
            if (earlier == 0) of_warp[expert] += __popc(same);
            p.rows[slot] = index / p.k;
        }
        if (index < end) p.slots[index] = slot;
        __syncwarp();
    }
    for (int i = starts[p.count] + block * THREADS + threadIdx.x; i < p.choices; i += BLOCKS * THREADS) p.rows[i] = 0;
}
