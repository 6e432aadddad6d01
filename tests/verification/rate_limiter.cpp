// The clock of rate_limiter.cuh on the CPU: warps of one rank ask for bursts and wait, and sleeping is all that takes time. Prints
// what is wrong, or nothing.

#include <algorithm>
#include <cstdio>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace weft {
using u32 = unsigned int;
using u64 = unsigned long long;
struct WaitParams {
    u32* words;
};
struct BufferWords {
    int limiter_clock;
};
static u64 now;
static u64 nanoseconds() { return now; }
}  // namespace weft

static struct {
    unsigned x;
} threadIdx;

static void __nanosleep(unsigned nanoseconds) { weft::now += nanoseconds; }
static void __syncwarp() {}
static weft::u64 atomicAdd(weft::u64* place, weft::u64 more) {
    const weft::u64 before = *place;
    *place += more;
    return before;
}
static void atomicMax(weft::u64* place, weft::u64 least) { *place = std::max(*place, least); }

#include RATE_LIMITER

using weft::u64;

static void expect(bool good, const char* what, u64 wanted) {
    if (!good) std::printf("%s: at %llu, wanted %llu\n", what, weft::now, wanted);
}

int main() {
    constexpr unsigned WARPS = 100, BYTES = 4096, RATE = 356;
    constexpr u64 BEGIN = 1'763'000'000'000'000'000, SLACK = 100;  // ns: of sleep, and of rounding
    alignas(8) weft::u32 words[64] = {};
    const weft::WaitParams watch{words};
    const weft::BufferWords buffer{32};
    weft::now = BEGIN;
    std::vector<weft::SharedTokenBucket> warps(WARPS, weft::SharedTokenBucket(watch, buffer, BYTES, RATE));

    // The first one finds a clock that nobody has set: it goes at once, and those behind it as the links do.
    warps[0].ask(1);
    warps[0].wait();
    expect(weft::now == BEGIN, "the first burst waits", BEGIN);
    for (auto& warp : warps) warp.ask(1);
    for (unsigned i = 0; i < WARPS; ++i) {
        warps[i].wait();
        const u64 due = BEGIN + u64{i} * BYTES / RATE;
        expect(weft::now >= due && weft::now < due + SLACK, "a burst out of turn", due);
    }
    // Who asks for several at once is behind by all of them, and so is the next one.
    const u64 before = weft::now;
    warps[0].ask(300);
    warps[1].ask(1);
    warps[1].wait();
    const u64 due = before + 300 * BYTES / RATE;
    expect(weft::now >= due - SLACK && weft::now < due + SLACK, "bursts are counted once", due);

    // Behind an hour in which nobody has sent nothing is made up for, but for what LATE allows.
    weft::now += 3'600'000'000'000;
    const u64 again = weft::now, late = weft::SharedTokenBucket::LATE / weft::SharedTokenBucket::TICKS;
    warps[0].ask(1);
    warps[0].wait();
    expect(weft::now == again, "a burst behind a pause waits", again);
    for (int turn = 0; turn < 10; ++turn) {
        for (auto& warp : warps) warp.ask(1);
        for (auto& warp : warps) warp.wait();
    }
    const u64 end = again + (10 * WARPS - 1) * u64{BYTES} / RATE;
    expect(weft::now + late >= end - SLACK && weft::now < end + SLACK, "a pause is made up for", end);
}
