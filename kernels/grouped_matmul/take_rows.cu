// take_rows: C[i] = A[rows[i]], of rows of whole 16 bytes, of those rows i of experts whose tokens are this rank's, or are
// not. A warp copies up to 4096 bytes of a row, of which each thread has all its loads under way before it stores. A block
// copies a slice of an expert's rows. First slices come first: of an order by token all experts' rows of the same tokens
// are copied at about the same time, and all but one of them are read from the L2 cache.
//
// It waits for no other rank. Whatever `rows` and `offs` hold, nothing outside of the tensors is read or written.

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
