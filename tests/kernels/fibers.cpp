// Runs a .cu file of kernels that push on the CPU: every thread of every rank is a fiber, and a seeded scheduler
// decides who goes on wherever a kernel polls, stores to a peer or meets a barrier. fibers.py compiles it, with
// this file's stand-ins in place of sync.cuh, numbers.cuh, reduce.cuh and team.cuh.

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
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x;
};

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static Index threadIdx, blockIdx, blockDim, gridDim;

static void go_on_later();
static void __syncthreads();
static void __syncwarp() {}
static unsigned __ballot_sync(unsigned, bool said);
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static void __threadfence() {}

static unsigned atomicAdd(unsigned* place, unsigned more) {
    const unsigned before = *place;
    *place += more;
    return before;
}

namespace weft {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr int BROKEN = 0, WAIT_DATA = 1, WAIT_FREE = 2, FAREWELL = 3;

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
static void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) v = *slot;
}
static uint4 load_vector(const uint4* place) { return *place; }
static void store_vector(uint4* place, uint4 v) { *place = v; }
static u32 load_relaxed(const u32* word) { return *word; }
static u32 load_acquire(const u32* word) { return *word; }
static void post_flag(u32* word, u32 value) { *word = value; }
static bool is_broken(const Watch& watch) { return watch.words[BROKEN] != 0; }

static void report(const Watch& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
    if (is_broken(watch)) return;
    watch.words[BROKEN] = 1;
    const u64 record[8] = {1, u64(watch.rank), u64(peer), word, expected, seen, u64(kind), 0};
    std::memcpy(watch.record, record, sizeof record);
}

// Polls take the place of nanoseconds.
struct Patience {
    u64 polls = 0;
    bool due() { return true; }
    bool overdue(const Watch& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
        if (is_broken(watch)) return true;
        if (++polls <= watch.timeout_ns) {
            go_on_later();
            return false;
        }
        report(watch, peer, word, expected, seen, kind);
        return true;
    }
};

static bool wait_flag(const Watch& watch, int peer, u32 word, u32 expected, int kind) {
    Patience patience;
    for (;;) {
        const u32 seen = watch.words[word];
        if (static_cast<int>(seen - expected) >= 0) return true;
        if (patience.overdue(watch, peer, word, expected, seen, kind)) return false;
    }
}

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

namespace reduce {
struct sum {
    static float combine(float a, float b) { return a + b; }
    static float finish(float total, int) { return total; }
};
struct avg : sum {
    static float finish(float total, int ranks) { return total / ranks; }
};
struct max {
    static float combine(float a, float b) { return std::isnan(a) || a > b ? a : b; }
    static float finish(float total, int) { return total; }
};
struct min {
    static float combine(float a, float b) { return std::isnan(a) || a < b ? a : b; }
    static float finish(float total, int) { return total; }
};
}  // namespace reduce

// Sums over a warp and a cluster, by way of memory that the fibers of a launch share.
static float* shared_terms(int block, int count);
static float* warp_lanes();
static void meet_warp();
static void meet_blocks(int blocks);

static float warp_sum(float x) {
    float* lanes = warp_lanes();
    const int lane = threadIdx.x % 32;
    for (int mask = 16; mask > 0; mask /= 2) {
        lanes[lane] = x;
        meet_warp();
        x += lanes[lane ^ mask];
        meet_warp();
    }
    return x;
}

template <int BLOCKS, int ROUND>
struct Team {
    int round = 0;
    bool gathered = BLOCKS == 1;

    static int rank() { return blockIdx.x % BLOCKS; }
    void gather() { gathered = true; }
    void publish(int term, float value) {
        if (!gathered || term >= ROUND) std::abort();
        const int lane = threadIdx.x % 32;
        if (lane >= BLOCKS) return;
        shared_terms(blockIdx.x / BLOCKS * BLOCKS + lane, 2 * ROUND)[round % 2 * ROUND + term] = value;
        go_on_later();
    }
    void meet() {
        meet_blocks(BLOCKS);
        ++round;
    }
    float total(int first, int count) {
        const float* published = shared_terms(blockIdx.x, 2 * ROUND) + (round - 1) % 2 * ROUND + first;
        float sum = 0;
        for (int i = threadIdx.x % 32; i < count; i += 32) sum += published[i];
        return warp_sum(sum);
    }
};

}  // namespace weft

// The kernels once for each rank, whose number is a constant of the program:
// namespace rank_<r> { void call(int kernel, const void* params); }, and RANK_CALLS, a list of them.
#include "ranks.inc"

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    unsigned thread, block;
    bool at_barrier = false, done = false;
};

struct Launch {
    int kernel, blocks, threads;
    unsigned broken;  // whether a wait of this rank had expired when it ended
    char params[248];  // begins with the Watch
};

struct Warp {
    float lanes[32];
    unsigned waiting = 0;
};

struct Meeting {
    unsigned waiting = 0;  // threads at the barrier
    std::vector<float> terms;
};

struct Rank {
    std::vector<Launch*> launches;
    size_t next = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Meeting> blocks;
    std::vector<Warp> warps;
    int number = 0;
};

static ucontext_t scheduler;
static Fiber* running;
static Rank* current;

static void go_on_later() { swapcontext(&running->context, &scheduler); }

static const Launch& launched() { return *current->launches[current->next]; }

// All fibers for which `mine` holds come here before one goes on.
template <typename Mine>
static void meet(unsigned& waiting, unsigned all, const Mine& mine) {
    running->at_barrier = true;
    if (++waiting == all) {
        waiting = 0;
        for (auto& fiber : current->fibers) {
            if (mine(*fiber)) fiber->at_barrier = false;
        }
    } else {
        while (running->at_barrier) go_on_later();
    }
}

namespace weft {
static unsigned ballot(bool said);
}
static void __syncthreads() { weft::meet_blocks(1); }
static unsigned __ballot_sync(unsigned, bool said) { return weft::ballot(said); }

namespace weft {

static void meet_blocks(int blocks) {
    const unsigned first = running->block / blocks * blocks;
    meet(current->blocks[first].waiting, launched().threads * blocks,
         [&](const Fiber& f) { return f.block / blocks * blocks == first; });
}

static Warp& warp() {
    return current->warps[running->block * (launched().threads / 32) + running->thread / 32];
}

static void meet_warp() {
    const unsigned block = running->block, number = running->thread / 32;
    meet(warp().waiting, 32, [&](const Fiber& f) { return f.block == block && f.thread / 32 == number; });
}

static float* warp_lanes() { return warp().lanes; }

static unsigned ballot(bool said) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = said;
    meet_warp();
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(lanes[i] != 0) << i;
    meet_warp();
    return bits;
}

static float* shared_terms(int block, int count) {
    auto& terms = current->blocks[block].terms;
    if (terms.empty()) terms.assign(count, NAN);
    return terms.data();
}

}  // namespace weft

static void (*const calls[])(int, const void*) = {RANK_CALLS};

static void body() {
    calls[current->number](launched().kernel, launched().params);
    running->done = true;
    go_on_later();
}

static void start(Rank& rank) {
    const Launch& launch = *rank.launches[rank.next];
    rank.blocks.assign(launch.blocks, Meeting());
    rank.warps.assign(launch.blocks * ((launch.threads + 31) / 32), Warp());
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

// Rank `late` begins when the others have had so many turns, or are at their end.
static void run_all(std::vector<Rank>& all, unsigned seed, int late = -1, long wanted = 0) {
    std::mt19937 random(seed);
    std::vector<int> busy;
    for (int r = 0; r < int(all.size()); ++r) {
        if (r != late) busy.push_back(r);
    }
    bool begun = late < 0;
    while (!busy.empty() || !begun) {
        if (!begun && (wanted <= 0 || busy.empty())) {
            begun = true;
            busy.push_back(late);
        }
        // A rank runs for a while before another one does: they drift apart by whole calls.
        const size_t pick = random() % busy.size();
        Rank& rank = all[busy[pick]];
        for (int turns = random() % 2000; turns >= 0 && rank.next < rank.launches.size(); --turns) {
            if (rank.fibers.empty()) start(rank);
            Launch& launch = *rank.launches[rank.next];
            const size_t i = random() % rank.fibers.size();
            current = &rank;
            running = rank.fibers[i].get();
            threadIdx.x = running->thread;
            blockIdx.x = running->block;
            blockDim.x = launch.threads;
            gridDim.x = launch.blocks;
            swapcontext(&scheduler, &running->context);
            --wanted;
            if (running->done) {
                std::swap(rank.fibers[i], rank.fibers.back());
                rank.fibers.pop_back();
                if (rank.fibers.empty()) {
                    launch.broken = reinterpret_cast<const weft::Watch*>(launch.params)->words[weft::BROKEN];
                    ++rank.next;
                }
            }
        }
        if (rank.next == rank.launches.size()) busy.erase(busy.begin() + pick);
    }
}

// Run `count` launches on each of `ranks` ranks; `launches` holds them rank after rank. Those of one rank
// follow each other, as on a stream.
extern "C" void run(Launch* launches, int ranks, int count, unsigned seed, int late, long turns) {
    std::vector<Rank> all(ranks);
    for (int r = 0; r < ranks; ++r) {
        all[r].number = r;
        for (int i = 0; i < count; ++i) all[r].launches.push_back(launches + r * count + i);
    }
    run_all(all, seed, late, turns);
}

// Run one launch on one rank, whose waits are all over.
extern "C" void run_one(Launch* launch, int rank) {
    std::vector<Rank> all(1);
    all[0].number = rank;
    all[0].launches.push_back(launch);
    run_all(all, 0);
}
