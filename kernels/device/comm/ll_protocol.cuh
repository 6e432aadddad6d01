// LL protocol, data as flag: vectors of four 32-bit words in the receiver's memory, where the word 0 is the sentinel:
// nothing has arrived.
//
// The sender inverts each word, so the sentinel would be 0xffffffff, a NaN in every dtype here. Of a store only this is
// assumed: a 32-bit word arrives whole. The receiver looks at each word; there is no flag and no fence after the data.
// It resets the slot; that no later data comes before these zeros is for its kernel to show.
// docs/protocol.md#ll-protocol

#pragma once

#include "ptx/sync.cuh"

namespace weft {

__device__ __forceinline__ bool has_sentinel(const uint4& v) {
    return v.x == 0 || v.y == 0 || v.z == 0 || v.w == 0;
}

// Any words: the one that would be the sentinel is sent as another NaN.
__device__ __forceinline__ uint4 ll_encode(const uint4& v) {
    return make_uint4(max(~v.x, 1u), max(~v.y, 1u), max(~v.z, 1u), max(~v.w, 1u));
}

__device__ __forceinline__ uint4 ll_decode(const uint4& v) { return make_uint4(~v.x, ~v.y, ~v.z, ~v.w); }

}  // namespace weft
