// What else is on a stream: a copy engine's copies, which come in pieces of any order, and events. Of fibers alone.

#include "ptx/sync.cuh"

struct Params {
    weft::WaitParams watch;
    char* to;
    const char* from;
    weft::u64 bytes;
    weft::u32* passed;  // times that an event was recorded
    weft::u64 times;
};

extern "C" __global__ void copy(const __grid_constant__ Params p) {
    for (weft::u64 at = 16 * threadIdx.x; at < p.bytes; at += 16 * blockDim.x) {
        std::memcpy(p.to + at, p.from + at, std::min<weft::u64>(p.bytes - at, 16));
        ++stores;
        if (dice() % 4 == 0) go_on_later();
    }
}

extern "C" __global__ void record(const __grid_constant__ Params p) {
    if (threadIdx.x != 0) return;
    *p.passed = p.times;
    ++stores;
}

extern "C" __global__ void wait_event(const __grid_constant__ Params p) {
    if (threadIdx.x == 0) go_on_when([&p] { return *p.passed >= p.times; });
}
