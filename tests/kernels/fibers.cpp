// Runs kernels/all_reduce/kernel.cu on the CPU: every thread of every rank is a fiber, and a seeded scheduler
// decides who goes on wherever a kernel polls, stores to a peer or meets a barrier. Compiled with WORLD_SIZE,
// DTYPE and KERNEL defined, and this file's stand-ins in place of sync.cuh and numbers.cuh.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(n)

struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x;
};

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static Index threadIdx, blockIdx, blockDim, gridDim;

static void go_on_later();
static void __syncthreads();

namespace weft {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr int WAIT_DATA = 1;

struct Watch {
    u32* words;
    u64* record;
    u64 timeout_ns;
    int rank;
    int reserved;
};

// A vector arrives word by word.
static void store_payload(uint4* slot, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<u32*>(slot)[(i + v.x) % 4] = words[(i + v.x) % 4];
        if (v.y % 8 == 0) go_on_later();
    }
}
static uint4 load_payload(const uint4* slot) { return *slot; }

// Polls take the place of nanoseconds.
struct Patience {
    u64 polls = 0;
    bool expired(const Watch& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
        if (watch.words[0] != 0) return true;
        if (++polls <= watch.timeout_ns) {
            go_on_later();
            return false;
        }
        watch.words[0] = 1;
        const u64 record[8] = {1, u64(watch.rank), u64(peer), word, expected, seen, u64(kind), 0};
        std::memcpy(watch.record, record, sizeof record);
        return true;
    }
};

static float as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static u32 as_bits(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

struct float32 {
    using Storage = u32;
    static constexpr int PER_WORD = 1;
    static void unpack(u32 word, float* out) { out[0] = as_float(word); }
    static u32 pack(const float* in) { return std::isnan(in[0]) ? 0x7fffffffu : as_bits(in[0]); }
};

struct bfloat16 {
    using Storage = u16;
    static constexpr int PER_WORD = 2;
    static void unpack(u32 word, float* out) {
        out[0] = as_float(word << 16);
        out[1] = as_float(word & 0xffff0000u);
    }
    static u32 half(float value) {
        const u32 bits = as_bits(value);
        return std::isnan(value) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    }
    static u32 pack(const float* in) { return half(in[0]) | half(in[1]) << 16; }
};

}  // namespace weft

#include KERNEL

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    unsigned thread, block;
    bool at_barrier = false, done = false;
};

struct Launch {
    int form, blocks, threads, reserved;
    Params params;
};

struct Rank {
    std::vector<Launch> launches;
    size_t next = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<unsigned> waiting;  // threads of each block at its barrier
};

static ucontext_t scheduler;
static Fiber* running;
static Rank* current;

static void go_on_later() { swapcontext(&running->context, &scheduler); }

static void __syncthreads() {
    const unsigned block = running->block;
    running->at_barrier = true;
    if (++current->waiting[block] == current->launches[current->next].threads) {
        for (auto& fiber : current->fibers) {
            if (fiber->block == block) fiber->at_barrier = false;
        }
    } else {
        while (running->at_barrier) go_on_later();
    }
}

static void body() {
    const Launch& launch = current->launches[current->next];
    (launch.form ? two_shot : one_shot)(launch.params);
    running->done = true;
    go_on_later();
}

static void start(Rank& rank) {
    const Launch& launch = rank.launches[rank.next];
    rank.waiting.assign(launch.blocks, 0);
    for (int i = 0; i < launch.blocks * launch.threads; ++i) {
        auto fiber = std::make_unique<Fiber>();
        constexpr size_t STACK = 16 << 10;
        fiber->stack.reset(new char[STACK]);
        fiber->thread = i % launch.threads;
        fiber->block = i / launch.threads;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.get();
        fiber->context.uc_stack.ss_size = STACK;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, body, 0);
        rank.fibers.push_back(std::move(fiber));
    }
}

extern "C" size_t size_of_params() { return sizeof(Params); }

// Run `count` launches on each of `ranks` ranks; `launches` holds them rank after rank. Those of one rank
// follow each other, as on a stream.
extern "C" void run(const Launch* launches, int ranks, int count, unsigned seed) {
    std::vector<Rank> all(ranks);
    for (int r = 0; r < ranks; ++r) all[r].launches.assign(launches + r * count, launches + (r + 1) * count);
    std::mt19937 random(seed);
    std::vector<int> busy;
    for (int r = 0; r < ranks; ++r) busy.push_back(r);
    while (!busy.empty()) {
        // A rank runs for a while before another one does: they drift apart by whole calls.
        const size_t pick = random() % busy.size();
        Rank& rank = all[busy[pick]];
        for (int turns = random() % 2000; turns >= 0 && rank.next < rank.launches.size(); --turns) {
            if (rank.fibers.empty()) start(rank);
            const Launch& launch = rank.launches[rank.next];
            const size_t i = random() % rank.fibers.size();
            current = &rank;
            running = rank.fibers[i].get();
            threadIdx.x = running->thread;
            blockIdx.x = running->block;
            blockDim.x = launch.threads;
            gridDim.x = launch.blocks;
            swapcontext(&scheduler, &running->context);
            if (running->done) {
                std::swap(rank.fibers[i], rank.fibers.back());
                rank.fibers.pop_back();
                if (rank.fibers.empty()) ++rank.next;
            }
        }
        if (rank.next == rank.launches.size()) busy.erase(busy.begin() + pick);
    }
}
