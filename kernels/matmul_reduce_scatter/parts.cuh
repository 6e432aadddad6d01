// A compute warpgroup's accumulator fragment of a finished tile, sent to another rank: vectors as its threads hold
// them, [VECTORS][GROUP], by the LL protocol (comm/ll_protocol.cuh). Who has received a vector resets its slot.

#pragma once

#include "gemm/gemm.cuh"
#include "comm/ll_protocol.cuh"

namespace weft {

// What partial results are sent as.
#if defined(FP8_TYPES) && OUT_FLOAT32
using PartNumber = float32;
#else
using PartNumber = Number;
#endif

constexpr int PART_ELEMENTS = 4 * PartNumber::PER_WORD;  // of a vector
constexpr int VECTORS = ACC_REGS / PART_ELEMENTS;  // of a thread, in a fragment
constexpr int PART_BYTES = VECTORS * GROUP * 16;  // of a fragment

__device__ __forceinline__ void store_part(uint4* part, const float (&sums)[ACC_REGS]) {
    part += threadIdx.x % GROUP;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const float* v = sums + PART_ELEMENTS * i;
        constexpr int NEXT = PartNumber::PER_WORD;
        part[i * GROUP] = ll_encode(make_uint4(
            PartNumber::pack(v), PartNumber::pack(v + NEXT), PartNumber::pack(v + 2 * NEXT),
            PartNumber::pack(v + 3 * NEXT)));
    }
}

// Where vectors arrive. If a wait expires, `expired`, a count of the block, becomes 1 + the missing vector's place.
// (A warp that has registers to spare reports it.)
struct ReceiveBuffer {
    const WaitParams& watch;
    uint4* vectors;
    u32* expired;
};

// Receives the first `count` of v, this thread's vectors at `at(i)`, still encoded, and resets their slots. False: a
// wait has expired. By whole warps: where lanes may diverge, the compiler gives up uniform registers all over the
// kernel, and each wgmma waits for the descriptors of its operands (up to 13 % slower in tiles of 64 x 256).
template <int MOST, typename At>
__device__ __forceinline__ bool take(const ReceiveBuffer& receive_buffer, uint4 (&v)[MOST], int count, const At& at) {
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i < count) v[i] = load_payload(at(i));
    }
    bool there = true;
    for (Deadline deadline;;) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < MOST; ++i) missing |= i < count && has_sentinel(v[i]);
        if (!__any_sync(~0u, missing && there)) break;
        if (missing && deadline.should_poll()) {
            there = !is_broken(receive_buffer.watch);
            if (there && deadline.has_passed(receive_buffer.watch)) {
#pragma unroll
                for (int i = 0; i < MOST; ++i) {
                    if (i < count && has_sentinel(v[i])) {
                        set_count(receive_buffer.expired, 1 + static_cast<u32>(at(i) - receive_buffer.vectors));
                    }
                }
                there = false;
            }
        }
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            if (i < count) reload_payload(has_sentinel(v[i]), at(i), v[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i < count) store_vector(at(i), make_uint4(0, 0, 0, 0));
    }
    return there;
}

// Receives the fragment at `part`, of 16-bit numbers, and stores it to `out`, where its tile begins in a matrix with
// rows of `stride` elements, as far as it has `rows` and `columns`.
__device__ __forceinline__ void store_rows(
    u16* out, u64 stride, int rows, int columns, int warpgroup, const ReceiveBuffer& receive_buffer, uint4* part) {
    constexpr int AHEAD = VECTORS < 8 ? VECTORS : 8;  // of a thread, in flight at once
    const Place at = place_of_vectors(warpgroup);
    part += threadIdx.x % GROUP;
#pragma unroll 1
    for (int first = 0; first < VECTORS; first += AHEAD) {
        uint4 v[AHEAD];
        const int count = min(AHEAD, VECTORS - first);
        take(receive_buffer, v, count, [&](int i) { return part + (first + i) * GROUP; });
#pragma unroll
        for (int i = 0; i < AHEAD; i += 2) {
            if (i >= count) break;
            const Vectors both = vectors_of(
                {v[i].x, v[i].y, v[i].z, v[i].w, v[i + 1].x, v[i + 1].y, v[i + 1].z, v[i + 1].w});
            const int column = at.column + SET_COLUMNS / 2 * (first + i);
            store_vectors(
                out, stride, rows, columns, {at.row, column}, {ll_decode(both.first), ll_decode(both.second)});
        }
    }
}

}  // namespace weft
