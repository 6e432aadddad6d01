// Rate limiters: keep what a rank's warps store to peers at the rate of the links. What is sent faster fills the egress
// queues of the SMs, where loads queue after it, and collides at the receivers.
//
// RateLimiter: for warps that send all the time; each keeps its own share. SharedTokenBucket: for warps that send at
// times; each draws the start of a burst from one clock of the rank, so few senders get the whole link rate. Nobody
// waits for another warp, nor longer than the links take for what was drawn before. docs/protocol.md#rate-limiting

#pragma once

#include "comm/double_buffer.cuh"

namespace weft {

// By each thread of a warp.
struct RateLimiter {
    u64 interval;  // nanoseconds from one burst to the next
    u64 next = 0;

    __device__ __forceinline__ void wait() {
        u64 now = nanoseconds();
        while (now < next) {
            __nanosleep(32);
            now = nanoseconds();
        }
        next = now + interval;
    }
};

// By converged warps.
struct SharedTokenBucket {
    static constexpr u64 TICKS = 4;  // of the clock in a nanosecond
    static constexpr u64 LATE = 1000 * TICKS;  // how far the clock may fall behind while nobody sends

    const WaitParams& watch;
    const BufferWords& buffer;
    u32 interval;  // of a burst
    u64 start = 0;

    // `bytes` of a burst, and of those that leave in a nanosecond.
    __device__ __forceinline__ SharedTokenBucket(const WaitParams& watch, const BufferWords& buffer, u32 bytes, u32 rate)
        : watch(watch), buffer(buffer), interval((bytes * TICKS + rate / 2) / rate) {}

    __device__ __forceinline__ u64* clock() const { return reinterpret_cast<u64*>(watch.words + buffer.limiter_clock); }

    // Draws the start of the next `bursts`; early, so that the answer is there when `wait` needs it.
    __device__ __forceinline__ void ask(u32 bursts) {
        if (threadIdx.x % 32 == 0) start = atomicAdd(clock(), u64{bursts * interval});
    }

    // Until the start that `ask` has drawn.
    __device__ __forceinline__ void wait() {
        if (threadIdx.x % 32 == 0) {
            u64 now = nanoseconds() * TICKS;
            if (start + LATE < now) atomicMax(clock(), now);
            for (; now < start; now = nanoseconds() * TICKS) __nanosleep(32);
        }
        __syncwarp();
    }
};

}  // namespace weft
