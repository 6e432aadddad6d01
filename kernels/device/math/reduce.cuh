// The reductions of an all-reduce, in float32 and in rank order.

#pragma once

namespace weft::reduce {

struct sum {
    __device__ static __forceinline__ float combine(float a, float b) { return a + b; }
    __device__ static __forceinline__ float finish(float total, int) { return total; }
};

struct avg : sum {
    __device__ static __forceinline__ float finish(float total, int ranks) {
        return total / static_cast<float>(ranks);
    }
};

// NaN if one of them is, as torch.maximum and torch.minimum.
struct max {
    __device__ static __forceinline__ float combine(float a, float b) {
        float larger;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
        return larger;
    }
    __device__ static __forceinline__ float finish(float total, int) { return total; }
};

struct min {
    __device__ static __forceinline__ float combine(float a, float b) {
        float smaller;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
        return smaller;
    }
    __device__ static __forceinline__ float finish(float total, int) { return total; }
};

}  // namespace weft::reduce
