// Sorts the choices of a mixture of experts: a stable counting sort by one cluster.
//
// Of ids [T, k], the experts that tokens have chosen, those from `first` to `first + count` are this rank's.
//
// moe_route: rows[i] is the token of the i-th choice of this rank's, by expert and then in the order of ids, 0 past the
// last one; offs[e] is how many there are of experts up to e; slots[T, k] is i of each choice, -1 where another rank has
// the expert or no one has.
//
// moe_dispatch_route: the same of all ranks' tokens, whose ids it gathers, but rows[C] holds choices, -1 where there is
// none; each expert's rows are filled up to a multiple of `align`; what lies past C is left out. ranks[W * T]: bit r says
// that rank r has an expert of the token. If a rank needs more than C rows, `note` gets that: [calls that lacked room,
// rows, C], in pinned memory.
//
// Each warp has a part of the ids and counts of its own. Nobody else writes to these, so there are no atomics; the
// order of warps is the order of ids, so there is one result. Blocks meet twice, in the cluster: the second time before
// one of them may end, as others read what it has counted. Graph-safe.
//
// Who writes and who waits: moe_route for no other rank, moe_dispatch_route by LL exchange (ll_exchange.cuh) before it
// sorts. Defined by the includer: ID, the type of an id; CLUSTER, blocks of THREADS; of moe_dispatch_route also WORLD_SIZE
// and RANK.

#include "ptx/barriers.cuh"
#ifdef WORLD_SIZE
#include "comm/ll_exchange.cuh"
#endif

namespace {

constexpr int WARPS = THREADS / 32;
using i64 = long long;

struct Params {
    i64* note;
    const ID* ids;
    int* rows;
    int* offs;
    int* slots;
    int* ranks;
    int first, count;  // this rank's experts
    int choices, k;
    int experts;  // of all ranks
    int capacity;  // of rows
    int align;
};

// The expert of a choice, as a number from `from` on; -1 if it is not below `count`.
template <typename Id>
__device__ __forceinline__ int expert_of(const Id* ids, int index, int end, int from, int count) {
    if (index >= end) return -1;
    const i64 expert = static_cast<i64>(ids[index]) - from;
    return expert >= 0 && expert < count ? static_cast<int>(expert) : -1;
}

// The ids from `begin` to `end`, a warp's part, as experts' numbers from `from` on.
template <typename Id>
struct Part {
    static constexpr int AHEAD = 8;  // times 32: loads under way at once
    const Id* ids;
    int begin, end, from, count;
    int loaded = -1;  // the first one of those that are here: a small part is loaded once
    int experts[AHEAD];

    // `what(index, expert)` of each, 32 after 32.
    template <typename What>
    __device__ __forceinline__ void in_order(const What& what) {
        const int lane = threadIdx.x % 32;
        for (int i = begin; i < end; i += 32 * AHEAD) {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (loaded != i) experts[k] = expert_of(ids, i + 32 * k + lane, end, from, count);
            }
            loaded = i;
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (i + 32 * k < end) what(i + 32 * k + lane, experts[k]);
            }
        }
    }
};

__device__ __forceinline__ i64 padded(const Params& p, int rows) {
    return (static_cast<i64>(rows) + p.align - 1) / p.align * p.align;
}

#ifdef WORLD_SIZE

// All ranks' ids into `slots`, until slots take their place; -1 or -2 where there is no expert.
__device__ void gather_ids(const weft::ExchangeSlots& exchange, const Params& p) {
    constexpr unsigned IDS = 8;  // of a vector, of 16 bits each
    const unsigned own = p.choices / WORLD_SIZE, vectors = (own + IDS - 1) / IDS;
    const weft::Epoch epoch(exchange);
    const auto each = [&](const auto& what) {  // each block hears from every peer
        for (weft::ThreadShare s; s.at < vectors || s.index == 0; s.next()) what(s.index, IDS * s.at);
    };
    const auto put = [&](int rank, unsigned first, const uint4& v) {
        int *to = p.slots + rank * own + first, id[IDS];
#pragma unroll
        for (int i = 0; i < IDS; ++i) id[i] = static_cast<short>(weft::word(v, i / 2) >> i % 2 * 16);
        if (own % IDS == 0 && first < own) {
            reinterpret_cast<uint4*>(to)[0] = make_uint4(id[0], id[1], id[2], id[3]);
            reinterpret_cast<uint4*>(to)[1] = make_uint4(id[4], id[5], id[6], id[7]);
            return;
        }
#pragma unroll
        for (int i = 0; i < IDS; ++i) {
            if (first + i < own) to[i] = id[i];
        }
    };
    each([&](unsigned index, unsigned first) {
        int id[IDS];
        uint4 v;
#pragma unroll
        for (int i = 0; i < IDS; ++i) id[i] = expert_of(p.ids, first + i, own, 0, p.experts);
#pragma unroll
        for (int i = 0; i < IDS; i += 2) weft::word(v, i / 2) = (id[i] & 0xffff) | id[i + 1] << 16;
        epoch.send_to_all(index, weft::ll_encode(v));
        put(RANK, first, v);
    });
    weft::let_next_begin();  // tokens do not delay ids
    each([&](unsigned index, unsigned first) {
        weft::store_all(epoch, index, [&](int src, const uint4& v) { put(src, first, v); });
    });
    epoch.leave();
    weft::sync_cluster();
}

#endif

// By one warp: the rows of the rank that needs most.
__device__ void note_overflow(const Params& p, const int* totals) {
    const int lane = threadIdx.x % 32;
    i64 most = 0;
    for (int first = 0; first < p.experts; first += p.count) {
        i64 needed = 0;
        for (int e = lane; e < p.count; e += 32) needed += padded(p, totals[first + e]);
        for (int step = 16; step > 0; step /= 2) needed += __shfl_xor_sync(~0u, needed, step);
        most = max(most, needed);
    }
    if (lane != 0 || most <= p.capacity) return;
    volatile i64* note = p.note;
    note[1] = most;
    note[2] = p.capacity;
    __threadfence_system();
    note[0] = note[0] + 1;
}

// DISPATCH: counts all ranks' experts, and sorts the choices of this rank's.
template <bool DISPATCH, typename Id>
__device__ __forceinline__ void route(const Params& p, const Id* ids) {
    extern __shared__ int memory[];  // [WARPS + 2][counted], [count + 1]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = weft::rank_in_cluster();
    const int from = DISPATCH ? 0 : p.first, counted = DISPATCH ? p.experts : p.count, own = p.first - from;
    int* of_warp = memory + warp * counted;
    int* of_block = memory + WARPS * counted;
    int* totals = of_block + counted;
    int* starts = totals + counted;
    const int share = (p.choices + CLUSTER * THREADS - 1) / (CLUSTER * THREADS) * 32;
    const int begin = min((block * WARPS + warp) * share, p.choices), end = min(begin + share, p.choices);

    Part<Id> part{ids, begin, end, from, counted};

    if constexpr (DISPATCH) {
        const int tokens = p.choices / p.k;
        constexpr int MOST = 4, STEP = CLUSTER * THREADS;  // tokens whose ids are loaded together
        for (int t = block * THREADS + threadIdx.x; t < tokens; t += MOST * STEP) {
            int ranks[MOST] = {};
#pragma unroll 1
            for (int j = 0; j < p.k; ++j) {
                int expert[MOST];
#pragma unroll
                for (int i = 0; i < MOST; ++i) expert[i] = t + i * STEP < tokens ? ids[(t + i * STEP) * p.k + j] : -1;
#pragma unroll
                for (int i = 0; i < MOST; ++i) {
                    if (expert[i] >= 0) ranks[i] |= 1 << expert[i] / p.count;
                }
            }
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                if (t + i * STEP < tokens) p.ranks[t + i * STEP] = ranks[i];
            }
        }
    }
    for (int e = lane; e < counted; e += 32) of_warp[e] = 0;
    __syncwarp();
    part.in_order([&](int, int expert) {
        if (expert >= 0) atomicAdd(reinterpret_cast<unsigned*>(of_warp + expert), 1u);
    });
    __syncthreads();
    for (int e = threadIdx.x; e < counted; e += THREADS) {
        int before = 0;
        for (int w = 0; w < WARPS; ++w) {
            const int here = memory[w * counted + e];
            memory[w * counted + e] = before;
            before += here;
        }
        of_block[e] = before;
    }
    weft::sync_cluster();  // all blocks have read the ids in whose place slots are written
    for (int e = threadIdx.x; e < counted; e += THREADS) {
        int before = 0, total = 0;
        for (int b = 0; b < CLUSTER; ++b) {
            const int there = weft::load_from(of_block + e, b);
            if (b < block) before += there;
            total += there;
        }
        for (int w = 0; w < WARPS; ++w) memory[w * counted + e] += before;
        totals[e] = total;
    }
    __syncthreads();
    if (warp == 0) {
        i64 before = 0;
        for (int first = 0; first < p.count; first += 32) {
            const int e = first + lane;
            const i64 mine = e < p.count ? padded(p, totals[own + e]) : 0;
            i64 up_to = mine;
            for (int step = 1; step < 32; step *= 2) {
                const i64 lower = __shfl_up_sync(~0u, up_to, step);
                if (lane >= step) up_to += lower;
            }
            up_to += before;
            if (e < p.count) {
                starts[e] = static_cast<int>(min(up_to - mine, static_cast<i64>(p.capacity)));
                if (block == 0) p.offs[e] = static_cast<int>(min(up_to, static_cast<i64>(p.capacity)));
            }
            before = __shfl_sync(~0u, up_to, 31);
        }
        if (lane == 0) starts[p.count] = static_cast<int>(min(before, static_cast<i64>(p.capacity)));
    } else if (DISPATCH && warp == 1 && block == 0) {
        note_overflow(p, totals);
    }
    __syncthreads();
    part.in_order([&](int index, int counted_as) {
        const int number = counted_as - own, expert = number >= 0 && number < p.count ? number : -1;
        const unsigned same = __match_any_sync(~0u, expert);
        const int earlier = __popc(same & ((1u << lane) - 1));
        const unsigned place = expert >= 0 ? starts[expert] + of_warp[own + expert] + earlier : ~0u;
        const bool fits = place < static_cast<unsigned>(p.capacity);
        __syncwarp();
        if (expert >= 0 && earlier == 0) of_warp[own + expert] += __popc(same);
        if (fits) p.rows[place] = DISPATCH ? index : index / p.k;
        if (index < end) p.slots[index] = fits ? static_cast<int>(place) : -1;
        __syncwarp();
    });
    for (int i = starts[p.count] + block * THREADS + threadIdx.x; i < p.capacity; i += CLUSTER * THREADS) {
        p.rows[i] = DISPATCH ? -1 : 0;
    }
    if constexpr (DISPATCH) {
        for (int e = block * WARPS + warp; e < p.count; e += CLUSTER * WARPS) {  // what fills an expert's rows up
            const i64 first = static_cast<i64>(starts[e]) + totals[own + e], next = starts[e + 1];
            for (i64 i = first + lane; i < next; i += 32) p.rows[i] = -1;
        }
    }
    weft::sync_cluster();  // others may still read what this block has counted
}

#ifdef WORLD_SIZE

struct DispatchParams {
    weft::ExchangeSlots exchange;
    Params route;
};

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) moe_dispatch_route(
    const __grid_constant__ DispatchParams p) {
    gather_ids(p.exchange, p.route);
    route<true>(p.route, p.route.slots);
}

#else

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) moe_route(
    const __grid_constant__ Params p) {
    route<false>(p, p.ids);
}

#endif
