// all_reduce(A @ B) of few rows in one kernel: out [M, N] = the sum over ranks of A_src [M, K] @ B_src [K, N], 16 bits.
//
// With up to 16 rows a matmul takes as long as reading B, and an all-reduce as long as a launch and a trip to the
// peers. Each block has a strip of columns. Its warps split K: each takes every WARPS-th 32 of it; there are many, to
// have as much of B in flight as memory gives. The warps' sums are added in float32 in the order of the warps, rounded,
// and sent to all ranks, which add them in float32 in rank order and round once more: the same bits on all ranks and in
// all runs.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh). Graph-safe. docs/protocol.md#ll-exchange has the proof.
//
// The order of k inside of 32 is chosen for the lanes, the same for A and B: lane 4 g + q takes eight in a row, one
// vector, of rows g and g + 8 of A and of columns 4 g to 4 g + 3 of B. So it ends with sums of columns 8 q to 8 q + 7:
// a vector of out.

#include "ptx/barriers.cuh"
#include "ptx/mma.cuh"
#include "comm/ll_exchange.cuh"

#if !defined(REDUCE) || !defined(B_ROWS) || !defined(GROUPS) || !defined(WARPS)
#error "REDUCE: sum or avg; B_ROWS: 1: N is contiguous in B, 0: K; GROUPS: of 32 columns, in a strip; WARPS: of a block"
#endif

namespace {

using weft::u16;
using weft::u32;
using weft::u64;
using weft::word;

constexpr int COLUMNS = 32 * GROUPS;  // of a strip
constexpr int BK = 32;
constexpr int VECTORS = 64 * GROUPS;  // of a strip of 16 rows
// Warps' sums that shared memory holds at once. Where there are more, the upper half is added to the lower one first.
constexpr int SUMS = WARPS / GROUPS;
static_assert(GROUPS == 1 || GROUPS == 2, "added in one go or two");
static_assert(WARPS * 32 >= VECTORS, "a thread for each vector");

struct Params {
    weft::ExchangeSlots slots;
    const u16* a;  // A [M, K], rows `a_stride` elements apart
    const u16* b;  // B [K, N], rows, or with K contiguous columns, `b_stride` elements apart
    uint4* out;  // [M, N]
    u64 a_stride, b_stride;
    int m, n, k;
    int reserved;
};

struct Partials {
    uint4 of[SUMS][2][VECTORS];  // float32
};

// Where this lane's operands begin, for K = 0.
struct Start {
    const u16 *a, *b;
    int k, rows, groups;  // rows of A, of g and g + 8, and groups of 32 columns that this lane has any of

    __device__ __forceinline__ explicit Start(const Params& p) {
        const int lane = threadIdx.x % 32, row = lane / 4, column = blockIdx.x * COLUMNS + lane / 4 * 4;
        k = threadIdx.x / 32 * BK + lane % 4 * 8;
        rows = row + 8 < p.m ? 2 : row < p.m ? 1 : 0;
        groups = column < p.n ? (p.n - column + 31) / 32 : 0;
        a = p.a + row * p.a_stride;
        b = B_ROWS ? p.b + column : p.b + column * p.b_stride;
    }
};

// What a lane multiplies in one step.
struct Operands {
    uint4 a[2];
    uint4 b[GROUPS][4];  // of column i eight rows; or, with B_ROWS, rows 2 i and 2 i + 1 of four columns

    __device__ __forceinline__ void load(const Params& p, const Start& start, int step) {
        const int k = start.k + step * (WARPS * BK);
        const bool there = k < p.k;
        const u16* from = start.b + (B_ROWS ? k * p.b_stride : k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                uint4& to = b[group][i];
                to = make_uint4(0, 0, 0, 0);
                if (!there || group >= start.groups) continue;
                if constexpr (B_ROWS) {
                    const uint2 upper = weft::load_once(reinterpret_cast<const uint2*>(from + 32 * group));
                    const uint2 lower = weft::load_once(reinterpret_cast<const uint2*>(from + p.b_stride + 32 * group));
                    to = make_uint4(upper.x, upper.y, lower.x, lower.y);
                } else {
                    to = weft::load_once(reinterpret_cast<const uint4*>(from + 32 * group * p.b_stride));
                }
            }
            from += (B_ROWS ? 2 : 1) * p.b_stride;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i] = make_uint4(0, 0, 0, 0);
            const u16* row = start.a + i * 8 * p.a_stride + k;
            if (there && i < start.rows) a[i] = weft::load_vector(reinterpret_cast<const uint4*>(row));
        }
    }

    // Rows 2 i and 2 i + 1 of column `column` of a group.
    __device__ __forceinline__ u32 pair(int group, int column, int i) const {
        if constexpr (!B_ROWS) return word(b[group][column], i);
        const uint4& rows = b[group][i];
        return __byte_perm(word(rows, column / 2), word(rows, 2 + column / 2), column % 2 ? 0x7632 : 0x5410);
    }
};

// Of rows g and g + 8: of columns 8 q + j and 8 q + 4 + j of a group.
struct Sums {
    float of[GROUPS][4][4];

    __device__ __forceinline__ void add(const Operands& x) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 2 * half;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    weft::multiply_add(
                        of[group][j], word(x.a[0], i), word(x.a[1], i), word(x.a[0], i + 1), word(x.a[1], i + 1),
                        x.pair(group, j, i), x.pair(group, j, i + 1));
                }
            }
        }
    }

    // Each vector of a row of A: `what(place, numbers)`, of its first and of its second four numbers.
    template <typename What>
    __device__ __forceinline__ void each(int m, const What& what) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i * 8 + static_cast<int>(threadIdx.x % 32 / 4) >= m) continue;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float* numbers[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) numbers[j] = &of[group][j][i * 2 + e];
                    what(e, (group * 2 + i) * 32 + threadIdx.x % 32, numbers);
                }
            }
        }
    }

    __device__ __forceinline__ void store(int m, uint4 (&to)[2][VECTORS]) {
        each(m, [&](int e, int at, float* const(&x)[4]) {
            to[e][at] = make_uint4(
                __float_as_uint(*x[0]), __float_as_uint(*x[1]), __float_as_uint(*x[2]), __float_as_uint(*x[3]));
        });
    }

    __device__ __forceinline__ void add(int m, const uint4 (&from)[2][VECTORS]) {
        each(m, [&](int e, int at, float* const(&x)[4]) {
            const uint4 more = from[e][at];
#pragma unroll
            for (int j = 0; j < 4; ++j) *x[j] += __uint_as_float(word(more, j));
        });
    }
};

// All warps' sums of a vector, rounded.
__device__ __forceinline__ uint4 total_of(const Partials& partials, int at) {
    float total[8] = {};
#pragma unroll
    for (int warp = 0; warp < SUMS; ++warp) {
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] += __uint_as_float(word(partials.of[warp][i / 4][at], i % 4));
    }
    using Number = weft::Number;
    return make_uint4(
        Number::pack(total), Number::pack(total + 2), Number::pack(total + 4), Number::pack(total + 6));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) matmul_all_reduce(const __grid_constant__ Params p) {
    weft::begin();
    Partials& partials = weft::of_block<Partials>();
    const int warp = threadIdx.x / 32, steps = (p.k + BK * WARPS - 1) / (BK * WARPS);
    const Start start(p);
    Operands operands;
    operands.load(p, start, 0);
    const weft::Epoch epoch(p.slots);

    Sums sums = {};
#pragma unroll 1
    for (int step = 1; step <= steps; ++step) {
        sums.add(operands);
        operands.load(p, start, step);  // after the last one nothing: it is past K
    }
    if (SUMS < WARPS) {
        if (warp >= SUMS) sums.store(p.m, partials.of[warp - SUMS]);
        __syncthreads();
        if (warp < SUMS) sums.add(p.m, partials.of[warp]);
    }
    if (warp < SUMS) sums.store(p.m, partials.of[warp]);
    __syncthreads();

    // A thread's vector, of those that are: of group after group, row after row.
    const int vector = threadIdx.x, group = vector / (4 * p.m), row = vector % (4 * p.m) / 4;
    const int column = blockIdx.x * COLUMNS + group * 32 + vector % 4 * 8;
    if (group < GROUPS && column < p.n) {
        const uint4 own = total_of(partials, (group * 2 + row / 8) * 32 + row % 8 * 4 + vector % 4);
        epoch.send_to_all(vector, weft::ll_encode(own));
        uint4* to = p.out + (static_cast<u64>(row) * p.n + column) / 8;
        weft::store_vector(to, weft::take_reduced<weft::reduce::REDUCE>(epoch, vector, own).rounded());
    }
    epoch.leave();
}
