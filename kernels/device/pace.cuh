// Keeps what the warps of a rank store at peers at the pace of the links, all of them together. What is sent faster fills
// the ways out of the multiprocessors, where loads wait behind it, and meets at the receivers, which then take less than
// their links could.
//
// Who sends a burst draws its time from a clock that all warps of the rank share, which goes on by as long as the links
// take for it: however many send at a time, they share what the links give. Nobody waits for another one: times that were
// drawn and not used pass by.

#pragma once

#include "half.cuh"

namespace weft {

struct Pace {
    static constexpr u64 TICKS = 4;  // of the clock in a nanosecond
    static constexpr u64 LATE = 1000 * TICKS;  // that the clock may be behind when nobody has sent for a while

    const Watch& watch;
    const Half& half;
    u32 interval;  // of a burst
    u64 turn = 0;

    // `bytes` of a burst, and of those that leave in a nanosecond.
    __device__ __forceinline__ Pace(const Watch& watch, const Half& half, u32 bytes, u32 rate)
        : watch(watch), half(half), interval((bytes * TICKS + rate / 2) / rate) {}

    __device__ __forceinline__ u64* clock() const { return reinterpret_cast<u64*>(watch.words + half.pace); }

    // By a warp, early enough for the answer to come: the time of its next `bursts`.
    __device__ __forceinline__ void ask(u32 bursts = 1) {
        if (threadIdx.x % 32 == 0) turn = atomicAdd(clock(), u64{bursts * interval});
    }

    // By a warp that has asked: until that time.
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
