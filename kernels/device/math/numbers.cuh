// Dtypes packed in 32-bit words, converted to float32 and back. Needs no CUDA headers.

#pragma once

namespace weft {

struct float32 {
    using Storage = unsigned int;
    static constexpr int PER_WORD = 1;

    __device__ static __forceinline__ void unpack(unsigned int word, float* out) {
        out[0] = __uint_as_float(word);
    }

    __device__ static __forceinline__ unsigned int pack(const float* in) { return __float_as_uint(in[0]); }
};

struct bfloat16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;

    __device__ static __forceinline__ void unpack(unsigned int word, float* out) {
        out[0] = __uint_as_float(word << 16);
        out[1] = __uint_as_float(word & 0xffff0000u);
    }

    // Round to nearest even.
    __device__ static __forceinline__ unsigned int pack(const float* in) {
        unsigned int word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
        return word;
    }
};

struct float16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;

    __device__ static __forceinline__ void unpack(unsigned int word, float* out) {
        asm("{ .reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
            : "=f"(out[0]), "=f"(out[1])
            : "r"(word));
    }

    // Round to nearest even; overflow becomes infinite.
    __device__ static __forceinline__ unsigned int pack(const float* in) {
        unsigned int word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
        return word;
    }
};

}  // namespace weft
