// Numbers as fp8. A file of its own: CPU tests have a stand-in for it.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

// Four numbers as float8_e5m2 or float8_e4m3fn, the first in the lowest byte. To nearest even; what is beyond the largest
// number becomes that, also what is infinite, and a NaN stays one.
template <bool IS_E5M2>
__device__ __forceinline__ u32 pack_float8(const float (&in)[4]) {
    u16 low, high;
    if constexpr (IS_E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(in[1]), "f"(in[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(in[3]), "f"(in[2]));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(in[1]), "f"(in[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(in[3]), "f"(in[2]));
    }
    return static_cast<u32>(high) << 16 | low;
}

}  // namespace weft
