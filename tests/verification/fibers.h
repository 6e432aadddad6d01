// Runs kernels on the CPU: every thread of every rank is a fiber, and a seeded scheduler decides who goes on wherever
// one waits. pushes.h and matmuls.h include it, each with its own stand-ins for what a kernel includes; what both
// have in common of sync.cuh and numbers.cuh is here.

#ifndef FIBERS_H  // it lies in several places (fibers.py)
#define FIBERS_H

// A program is linked to the scheduler and its state, which one source of each kind defines as SIMULATOR.
#ifdef SIMULATOR
#define STATE
#else
#define STATE extern
#endif

// What Python calls. Nothing else of a library is seen from outside.
#define EXPORTED extern "C" __attribute__((visibility("default")))

#undef _FORTIFY_SOURCE  // its longjmp refuses another stack

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct Index {
    unsigned x;
};

STATE Index threadIdx, blockIdx, blockDim, gridDim;

struct Rank;

struct Fiber {
    Rank* rank;
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it goes on
    bool begun = false;
    std::unique_ptr<char[]> stack;
    unsigned thread, block, number;
    std::vector<unsigned> knows;  // matmuls.cpp: how many stores of each fiber of the launch lie before what it does next
    bool done = false;
    bool early = false;    // of the second of two launches that run at once
    size_t place_in_rank;  // among those that are ready
};

// What a fiber that is ready waits for: while it is not so, its turns are not worth a switch. Many turns end here, so
// that is looked at without a look at the fiber.
struct Wait {
    bool (*over)(const void*) = nullptr;
    const void* condition;
    bool has_deadline = false;
};

struct Launch {
    int kernel, blocks, threads;
    unsigned broken;  // whether a wait of this rank had expired when it ended
    char params[2624];
    int early;  // whether it begins with the one before it, and waits for that by itself
};

struct Meeting {
    unsigned waiting = 0, round = 0;
    std::vector<float> values;  // of those who meet
    std::vector<Fiber*> parked;
};

struct Rank {
    alignas(64) char params[2][sizeof(Launch::params)];  // of the launch that runs, and of one that began with it
    std::vector<Launch*> launches;
    size_t next = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    size_t unfinished[2] = {};  // of them, of each of these launches
    std::vector<Fiber*> ready;  // neither parked nor at their end
    std::vector<Wait> waits;    // of those
    std::vector<Meeting> blocks, warps, barriers;
    std::vector<char> shared;     // pushes_simulator.cpp: memory of the blocks of this launch
    std::vector<unsigned> begun;  // pushes_simulator.cpp: threads of each cluster
    unsigned slow = 0;  // a warp of each block
    unsigned late = 0;  // pushes_simulator.cpp: a block
    int number = 0;
};

constexpr long FEW_TURNS = 100'000;  // without a switch: it is asked whether there will be one
STATE jmp_buf scheduler;
STATE Fiber* running;
STATE Rank* current;
STATE std::unordered_map<const void*, std::vector<Fiber*>> parked_at;  // mbarriers

// xorshift64*: a turn takes three numbers and little else.
struct Dice {
    uint64_t state;
    void seed(unsigned seed) { state = (uint64_t{seed} + 1) * 0x9e3779b97f4a7c15; }
    unsigned operator()() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545f4914f6cdd1d >> 32;
    }
    // A number less than `end`; a remainder takes ten times as long.
    unsigned below(uint64_t end) { return (*this)() * end >> 32; }
};
STATE Dice dice;
STATE unsigned long stores;  // to memory in which somebody may poll

// Jumps, not swapcontext: that asks the kernel for the signal mask, which takes longer than all else in a turn.
static void go_on_later() {
    if (_setjmp(running->place) == 0) _longjmp(scheduler, 1);
}

static void go_on(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

template <typename Condition>
static void go_on_when(const Condition& condition) {
    const auto over = [](const void* c) { return (*static_cast<const Condition*>(c))(); };
    current->waits[running->place_in_rank] = {over, &condition};
    while (!condition()) go_on_later();
    current->waits[running->place_in_rank].over = nullptr;
}

static void is_ready(Fiber* fiber) {
    fiber->place_in_rank = fiber->rank->ready.size();
    fiber->rank->ready.push_back(fiber);
    fiber->rank->waits.emplace_back();
}

static void is_not_ready(Fiber* fiber) {
    Rank& rank = *fiber->rank;
    rank.ready.back()->place_in_rank = fiber->place_in_rank;
    rank.ready[fiber->place_in_rank] = rank.ready.back();
    rank.waits[fiber->place_in_rank] = rank.waits.back();
    rank.ready.pop_back();
    rank.waits.pop_back();
}

// Until somebody calls for them, fibers that are parked are not asked: most wait so.
static void park(std::vector<Fiber*>& parked) {
    parked.push_back(running);
    is_not_ready(running);
    go_on_later();
}

static void go_on_all(std::vector<Fiber*>& parked) {
    std::for_each(parked.begin(), parked.end(), is_ready);
    parked.clear();
}

static const Launch& launched() { return *current->launches[current->next + running->early]; }

static void ends(Meeting& meeting) {
    meeting.waiting = 0;
    ++meeting.round;
    go_on_all(meeting.parked);
}

// All fibers of a meeting come here before one goes on. The last one does `what` first.
template <typename What>
static void meet(Meeting& meeting, unsigned all, const What& what) {
    if (++meeting.waiting == all) {
        what();
        ends(meeting);
    } else {
        park(meeting.parked);
    }
}

static void meet(Meeting& meeting, unsigned all) {
    meet(meeting, all, [] {});
}

namespace weft {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr int BROKEN = 0, WAIT_DATA = 1, WAIT_FREE = 2, ABORTED = 3;

struct WaitParams {
    u32* words;
    u32* fault;
    u64* record;
    u64 timeout_ns;
    int rank;
    int reserved;
};

static u32 load_acquire(const u32* word) { return *word; }
static u32 broken_by(const WaitParams& watch) { return watch.fault[BROKEN]; }
static bool is_broken(const WaitParams& watch) { return broken_by(watch) != 0; }

static void report(const WaitParams& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
    if (is_broken(watch)) return;
    watch.fault[BROKEN] = kind == ABORTED ? seen : 1 + peer;
    ++stores;
    const u64 record[8] = {1, reinterpret_cast<u64>(watch.words), u64(peer), word, expected, seen, u64(kind), 0};
    std::memcpy(watch.record, record, sizeof record);
}

// Polls take the place of nanoseconds.
struct Deadline {
    u64 polls = 0;
    unsigned long seen;
    bool should_poll() { return true; }
    bool overdue(const WaitParams& watch, int peer, u32 word, u32 expected, u32 seen, int kind) {
        if (is_broken(watch)) return true;
        if (!has_passed(watch)) return false;
        report(watch, peer, word, expected, seen, kind);
        return true;
    }
    bool has_passed(const WaitParams& watch) {
        if (++polls > watch.timeout_ns) return true;
        seen = stores;
        current->waits[running->place_in_rank] = {shows_something, this, true};
        go_on_later();
        current->waits[running->place_in_rank].over = nullptr;
        return false;
    }
    // Until something is stored a turn counts as a poll and is not worth a switch. Some have one all the same.
    static bool shows_something(const void* deadline) {
        Deadline& mine = *static_cast<Deadline*>(const_cast<void*>(deadline));
        return stores != mine.seen || ++mine.polls % 64 == 0;
    }
};

static bool wait_flag(const WaitParams& watch, int peer, u32 word, u32 expected, int kind) {
    Deadline deadline;
    for (;;) {
        const u32 seen = load_acquire(watch.words + word);
        if (kind == WAIT_DATA ? seen == expected : static_cast<int>(seen - expected) >= 0) return true;
        if (deadline.overdue(watch, peer, word, expected, seen, kind)) return false;
    }
}

// Of arrivals and bytes, as barriers.cuh has it.
struct Phases {
    unsigned char count, pending, parity;
    int bytes;
    void settle() {
        if (pending != 0 || bytes != 0) return;
        pending = count;
        parity ^= 1;
        if (const auto found = parked_at.find(this); found != parked_at.end()) go_on_all(found->second);
    }
};
static_assert(sizeof(Phases) == sizeof(u64));
static Phases& phases(u64* barrier) { return *reinterpret_cast<Phases*>(barrier); }

static void init_barrier(u64* barrier, u32 count) {
    const auto all = static_cast<unsigned char>(count);
    phases(barrier) = {all, all, 0, 0};
}
static void publish_barriers() {}
static void arrive_expecting(u64* barrier, u32 bytes) {
    phases(barrier).bytes += bytes;
    --phases(barrier).pending;
    phases(barrier).settle();
}
static void wait(u64* barrier, u32 parity) {
    while (phases(barrier).parity == parity) park(parked_at[barrier]);
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
    static u32 buffer(float value) {
        const u32 bits = as_bits(value);
        // All bits set, if it is negative: the worst that a rounding could make of it.
        if (std::isnan(value)) return 0x7fffu | (bits >> 16 & 0x8000u);
        return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    }
    static u32 pack(const float* in) { return buffer(in[0]) | buffer(in[1]) << 16; }
};

}  // namespace weft

// What the file that includes this one adds: the kernels, and what happens to memory.
void call(int rank, int kernel, const void* params);
const weft::WaitParams& watch_of(const void* params);

#ifdef SIMULATOR
#include "scheduler.h"
#endif
#endif
