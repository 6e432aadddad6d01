// Keeps what the warps of a rank store at peers at the pace of the links. What is sent faster fills the ways out of the
// multiprocessors, where loads wait behind it, and meets at the receivers, which then take less than their links could.
//
// Where all warps that send do so all the time, each keeps its share by itself: RateLimiter. Where they have something to
// send at times only, they keep one pace together: SharedTokenBucket. Who sends a burst draws its time from a clock of the
// rank, which goes on by as long as the links take for it: however few send at a time, they have all that the links give.
// Nobody waits for another one: times that were drawn and not used pass by. The clock is ahead of now by what warps have
// drawn and not sent, a burst of each or one for each receiver: no wait is longer than the links take for these.

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

// By a warp that is together.
struct SharedTokenBucket {
    static constexpr u64 TICKS = 4;  // of the clock in a nanosecond
    static constexpr u64 LATE = 1000 * TICKS;  // that the clock may be behind when nobody has sent for a while

    const WaitParams& watch;
    const BufferWords& buffer;
    u32 interval;  // of a burst
    u64 turn = 0;

    // `bytes` of a burst, and of those that leave in a nanosecond.
    __device__ __forceinline__ SharedTokenBucket(const WaitParams& watch, const BufferWords& buffer, u32 bytes, u32 rate)
        : watch(watch), buffer(buffer), interval((bytes * TICKS + rate / 2) / rate) {}

    __device__ __forceinline__ u64* clock() const { return reinterpret_cast<u64*>(watch.words + buffer.pace); }

    // Early enough for the answer to come: the time of the next `bursts`.
    __device__ __forceinline__ void ask(u32 bursts) {
        if (threadIdx.x % 32 == 0) turn = atomicAdd(clock(), u64{bursts * interval});
    }

    // Who has asked: until that time.
    __device__ __forceinline__ void wait() {
        if (threadIdx.x % 32 == 0) {
            u64 now = nanoseconds() * TICKS;
            if (turn + LATE < now) atomicMax(clock(), now);
            for (; now < turn; now = nanoseconds() * TICKS) __nanosleep(32);
        }
        __syncwarp();
    }
};

}  // namespace weft
