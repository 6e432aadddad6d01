// Vectors that announce themselves: 16 bytes of 32-bit words in the receiver's memory, where a word that is 0 is empty.
//
// The sender inverts each word, so empty would be 0xffffffff, a NaN in every dtype here. Nothing is assumed of a store but
// that a 32-bit word of it arrives whole: who waits for a vector looks at each word, and there is no flag and no fence
// behind it. It empties the slot again; that no data comes before these zeros is for its kernel to show.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

__device__ __forceinline__ bool has_sentinel(const uint4& v) {
    return v.x == 0 || v.y == 0 || v.z == 0 || v.w == 0;
}

// Of any words: the one that would be empty is sent as another NaN.
__device__ __forceinline__ uint4 ll_encode(const uint4& v) {
    return make_uint4(max(~v.x, 1u), max(~v.y, 1u), max(~v.z, 1u), max(~v.w, 1u));
}

__device__ __forceinline__ uint4 ll_decode(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }

}  // namespace weft
