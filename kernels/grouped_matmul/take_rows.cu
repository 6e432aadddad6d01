// take_rows: C[i] = A[rows[i]], of rows of whole 16 bytes, of those rows i of experts whose tokens are this rank's, or are
// not. A warp copies up to 4096 bytes of a row, of which each thread has all its loads under way before it stores. A block
// copies a slice of an expert's rows. First slices come first: of an order by token all experts' rows of the same tokens
// are copied at about the same time, and all but one of them are read from the L2 cache.
//
// split_experts: of each expert, by a block of its own, a run of rows whose tokens are this rank's (of an order by token
// all of them), and the rows before and after it.
//
// They wait for no other rank. Whatever `rows` and `offs` hold, nothing outside of the tensors is read or written.

using u64 = unsigned long long;

constexpr int VECTORS = 8;  // of 16 bytes, of a thread
constexpr int WARPS = 4;

// This rank's tokens.
struct Own {
    int first, end;
    __device__ __forceinline__ bool has(int token) const { return token >= first && token < end; }
};

__device__ __forceinline__ int token_of(const int* rows, u64 row, int tokens) {
    return min(max(__ldg(rows + row), 0), tokens - 1);
}

struct Range {
    int begin, end;
};

__device__ __forceinline__ Range rows_of(const int* offs, int expert, int total) {
    const int begin = expert == 0 ? 0 : min(max(offs[expert - 1], 0), total);
    return {begin, max(min(offs[expert], total), begin)};
}

struct TakeParams {
    const uint4* from;  // where token 0 lies, or would
    const int* rows;
    const int* offs;
    uint4* to;
    u64 stride;  // of A, in vectors
    int tokens, total, width;  // width: of a row, in vectors
    int pieces;  // of a row
    int experts, slices;  // slices: of an expert's rows
    Own own;
    int takes_own;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) take_rows(const __grid_constant__ TakeParams p) {
    const int slice = blockIdx.x / p.experts;
    const Range range = rows_of(p.offs, blockIdx.x % p.experts, p.total);
    const u64 count = range.end - range.begin;
    const int begin = range.begin + static_cast<int>(count * slice / p.slices);
    const int end = range.begin + static_cast<int>(count * (slice + 1) / p.slices);
    for (u64 at = threadIdx.x / 32; at < static_cast<u64>(end - begin) * p.pieces; at += WARPS) {
        const u64 row = begin + at / p.pieces;
        const int token = token_of(p.rows, row, p.tokens);
        if (p.own.has(token) != (p.takes_own != 0)) continue;
        const int first = static_cast<int>(at % p.pieces) * 32 * VECTORS + threadIdx.x % 32;
        const uint4* from = p.from + token * p.stride;
        uint4* to = p.to + row * p.width;
        uint4 taken[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (first + 32 * i < p.width) taken[i] = from[first + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (first + 32 * i < p.width) to[first + 32 * i] = taken[i];
        }
    }
}

struct SplitParams {
    const int* rows;
    const int* offs;
    int* own;  // [2, E]: where runs begin, and where they end
    int* others;  // [2, E, 2]: the same of what is before and after them
    int tokens, total;
    Own of;
};

// The first row from `begin` on of which it is `wanted` whether its token is this rank's, else `end`; by the whole block.
__device__ __forceinline__ int first_row(const SplitParams& p, int begin, int end, bool wanted) {
    __shared__ int found;
    for (int at = begin; at < end; at += blockDim.x) {
        const int row = at + threadIdx.x;
        const bool is = row < end && p.of.has(token_of(p.rows, row, p.tokens)) == wanted;
        if (!__syncthreads_or(is)) continue;
        if (threadIdx.x == 0) found = end;
        __syncthreads();
        if (is) atomicMin(&found, row);
        __syncthreads();
        const int first = found;
        __syncthreads();
        return first;
    }
    return end;
}

extern "C" __global__ void __launch_bounds__(512) split_experts(const __grid_constant__ SplitParams p) {
    const int expert = blockIdx.x, experts = gridDim.x;
    const Range range = rows_of(p.offs, expert, p.total);
    const int first = first_row(p, range.begin, range.end, true), last = first_row(p, first, range.end, false);
    if (threadIdx.x != 0) return;
    p.own[expert] = first;
    p.own[experts + expert] = last;
    int* begins = p.others + 2 * expert;
    int* ends = begins + 2 * experts;
    begins[0] = range.begin;
    ends[0] = first;
    begins[1] = last;
    ends[1] = range.end;
}
