// Runs a .cu file of kernels that push on the CPU (fibers.h). fibers.py compiles it, with this file's stand-ins in place of
// sync.cuh, barriers.cuh, float8.cuh, mma.cuh, numbers.cuh and reduce.cuh. They give up the processor wherever a kernel
// polls, stores to a peer or meets a barrier. What is stored is there at once, but for half of the zeros, with which slots
// are emptied: they come when the thread has a fence, or another one of its block with a barrier before it, or when the
// kernel ends.

#include "fibers.h"

struct uint4 {
    unsigned x, y, z, w;
};

struct uint2 {
    unsigned x, y;
};

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static unsigned __float_as_uint(float x) { return weft::as_bits(x); }
static float __uint_as_float(unsigned bits) { return weft::as_float(bits); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selected) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return chosen;
}

static Meeting& warp() {
    return current->warps[running->block * (launched().threads / 32) + running->thread / 32];
}

static void meet_warp() { meet(warp(), 32); }

// What each lane of the warp holds, by way of memory.
static float* warp_lanes() {
    warp().values.resize(32);
    return warp().values.data();
}

struct Zero {
    void* place;
    bool came = false;
    size_t bytes = sizeof(uint4);
};
using Zeros = std::vector<std::shared_ptr<Zero>>;
static std::map<int, std::vector<Zeros>> by_thread, by_block;  // on the way, of each rank; behind a barrier

static Zeros& zeros_of(std::map<int, std::vector<Zeros>>& all, unsigned which) {
    std::vector<Zeros>& rank = all[current->number];
    if (which >= rank.size()) rank.resize(which + 1);
    return rank[which];
}
static Zeros& own_zeros() { return zeros_of(by_thread, running->number); }
static Zeros& zeros_of_block() { return zeros_of(by_block, running->block); }

static void arrive(Zeros& zeros) {
    for (const auto& zero : zeros) {
        if (!zero->came) std::memset(zero->place, 0, zero->bytes);
        zero->came = true;
    }
    zeros.clear();
}

static Zero* own_zero(const void* place) {
    for (const auto& zero : own_zeros()) {
        if (zero->place == place && !zero->came) return zero.get();
    }
    return nullptr;
}

static void comes_to_a_barrier() {
    Zeros& own = own_zeros();
    own.erase(std::remove_if(own.begin(), own.end(), [](const auto& zero) { return zero->came; }), own.end());
    zeros_of_block().insert(zeros_of_block().end(), own.begin(), own.end());
}

static void __syncthreads() {
    comes_to_a_barrier();
    meet(current->blocks[running->block], launched().threads);
}
static void __syncwarp() { meet_warp(); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static void __threadfence() {}
static void __threadfence_system() {
    arrive(own_zeros());
    arrive(zeros_of_block());
}

static unsigned __ballot_sync(unsigned, bool said) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = said;
    meet_warp();
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(lanes[i] != 0) << i;
    meet_warp();
    return bits;
}

static float __shfl_sync(unsigned, float x, int from) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = x;
    meet_warp();
    const float given = lanes[from];
    meet_warp();
    return given;
}
static float __shfl_xor_sync(unsigned, float x, int mask) { return __shfl_sync(0, x, running->thread % 32 ^ mask); }

static unsigned __reduce_max_sync(unsigned, unsigned word) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = weft::as_float(word);
    meet_warp();
    unsigned largest = 0;
    for (int i = 0; i < 32; ++i) largest = max(largest, weft::as_bits(lanes[i]));
    meet_warp();
    return largest;
}

static unsigned atomicAdd(unsigned* place, unsigned more) {
    const unsigned before = *place;
    *place += more;
    return before;
}

namespace weft {

// A vector arrives word by word.
static void store_payload(uint4* slot, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<u32*>(slot)[(i + v.x) % 4] = words[(i + v.x) % 4];
        if (v.y % 8 == 0) go_on_later();
    }
}
// What does not lie at a multiple of 16 bytes a GPU refuses: nothing comes from there, and nothing goes there.
static bool is_aligned(const void* place) { return reinterpret_cast<u64>(place) % sizeof(uint4) == 0; }
static uint4 load_vector(const uint4* place) {
    if (!is_aligned(place)) return make_uint4(~0u, ~0u, ~0u, ~0u);
    return own_zero(place) == nullptr ? *place : make_uint4(0, 0, 0, 0);
}
static uint4 load_payload(const uint4* slot) { return load_vector(slot); }
static void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) v = load_vector(slot);
}
static void store_vector(uint4* place, uint4 v) {
    if (!is_aligned(place)) return;
    if (Zero* before = own_zero(place)) before->came = true;
    if ((v.x | v.y | v.z | v.w) == 0 && dice() % 2 == 0) {
        own_zeros().push_back(std::make_shared<Zero>(Zero{place}));
    } else {
        *place = v;
    }
}
static void store_vector(uint2* place, uint2 v) {
    if (reinterpret_cast<u64>(place) % sizeof v == 0) *place = v;
}
static void store_word(u32* place, u32 value) { *place = value; }
static u32 load_relaxed(const u32* word) { return *word; }
static u32 load_payload_word(const u32* word) { return own_zero(word) == nullptr ? *word : 0; }
static void store_payload_word(u32* word, u32 value) {
    if (value % 2 == 0) go_on_later();
    *word = value;
}
static void reset_payload_word(u32* word) {
    if (dice() % 2 == 0) {
        own_zeros().push_back(std::make_shared<Zero>(Zero{word, false, sizeof *word}));
    } else {
        *word = 0;
    }
}

template <typename T>
static T load_once(const T* place) {
    return *place;
}

static void post_flag(u32* word, u32 value) {
    __threadfence_system();
    *word = value;
}
static void post_behind_fence(u32* word, u32 value) {
    *word = value;
    go_on_later();
}

// A block's named barriers: rounds that have ended, and who has come in this one.
static Meeting& named(int id) { return current->barriers[running->block * 16 + id]; }
static void barrier_sync(int id, u32 threads) {
    comes_to_a_barrier();
    meet(named(id), threads);
}
static void barrier_arrive(int id, u32 threads) {
    comes_to_a_barrier();
    if (++named(id).waiting == threads) {
        named(id).waiting = 0;
        ++named(id).round;
    }
    go_on_later();
}

struct float32 {
    using Storage = u32;
    static constexpr int PER_WORD = 1;
    static void unpack(u32 word, float* out) { out[0] = as_float(word); }
    static u32 pack(const float* in) { return std::isnan(in[0]) ? 0x7fffffffu : as_bits(in[0]); }
};

// By steps between numbers, from the smallest ones on.
template <bool IS_E5M2>
static u32 float8_bits(float number) {
    constexpr int MANTISSA = IS_E5M2 ? 2 : 3, LEAST = IS_E5M2 ? -14 : -6;
    constexpr float LARGEST = IS_E5M2 ? 57344 : 448;
    const u32 sign = std::signbit(number) ? 128 : 0;
    if (std::isnan(number)) return 127;
    const float size = std::min(std::fabs(number), LARGEST);
    const int exponent = std::max(size > 0 ? std::ilogb(size) : LEAST, LEAST);
    const int steps = std::nearbyint(std::ldexp(size, MANTISSA - exponent));
    return sign + ((exponent - LEAST) << MANTISSA) + steps;
}
template <bool IS_E5M2>
static u32 pack_float8(const float (&in)[4]) {
    u32 word = 0;
    for (int i = 0; i < 4; ++i) word |= float8_bits<IS_E5M2>(in[i]) << 8 * i;
    return word;
}

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

#ifdef DTYPE
// As mma.cuh has it, of what the lanes of the warp hold.
static void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    std::vector<float>& lanes = warp().values;
    lanes.resize(32 * 6);
    const int lane = running->thread % 32;
    const u32 own[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(&lanes[lane * 6], own, sizeof own);
    meet_warp();
    const auto number = [&](int lane, int word, int k) {
        float pair[2];
        DTYPE::unpack(as_bits(lanes[lane * 6 + word]), pair);
        return pair[k % 2];
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int q = k % 8 / 2, right = k / 8;
            d[i] += number(row % 8 * 4 + q, row / 8 + 2 * right, k) * number(column * 4 + q, 4 + right, k);
        }
    }
    meet_warp();
}
#endif

#ifdef CLUSTER
constexpr u32 CLUSTER_BLOCKS = CLUSTER;
#else
constexpr u32 CLUSTER_BLOCKS = 1;
#endif
constexpr size_t SHARED = 96 << 10;  // bytes of a block, for the kinds of memory of all ranks

static u32 rank_in_cluster() { return running->block % CLUSTER_BLOCKS; }

// Of kinds of memory, each at its place in every block's.
static size_t taken = 0;
template <typename T>
static T& of_block() {
    static const size_t place = std::exchange(taken, taken + (sizeof(T) + 7) / 8 * 8);
    if (taken > SHARED) std::abort();
    std::vector<char>& shared = current->shared;
    if (shared.empty()) shared.assign(launched().blocks * SHARED, -1);  // NaNs
    return *reinterpret_cast<T*>(shared.data() + running->block * SHARED + place);
}

static unsigned& begun() { return current->begun[running->block / CLUSTER_BLOCKS]; }
static unsigned of_cluster() { return launched().threads * CLUSTER_BLOCKS; }
static void arrive_at_cluster() { ++begun(); }
static void wait_for_cluster() {
    go_on_when([&now = begun(), all = of_cluster()] { return now == all; });
}

// To a block that may not have begun comes nothing of worth.
static void tell(float* place, u64* barrier, int block, float value) {
    const auto there = (block - static_cast<long>(rank_in_cluster())) * static_cast<long>(SHARED);
    *reinterpret_cast<float*>(reinterpret_cast<char*>(place) + there) = begun() == of_cluster() ? value : NAN;
    Phases& phases_there = phases(reinterpret_cast<u64*>(reinterpret_cast<char*>(barrier) + there));
    phases_there.bytes -= sizeof value;
    phases_there.settle();
    go_on_later();
}

}  // namespace weft

// The kernels, and call(rank, kernel, params).
#include "kernels.inc"

static const weft::WaitParams& watch_of(const void* params) { return *static_cast<const weft::WaitParams*>(params); }

// One warp of each block gets few turns, or none does; and one block begins late, or none does.
static void launch_begins(Rank& rank) {
    rank.slow = dice() % (rank.launches[rank.next]->threads / 32 + 1);
    rank.late = dice() % (rank.launches[rank.next]->blocks + 1);
}
static bool rests(const Rank& rank, const Fiber& fiber) {
    if (!fiber.begun && fiber.block == rank.late) return dice() % 64 != 0;
    return fiber.thread / 32 == rank.slow && dice() % 32 != 0;
}
static void launch_ends(Rank& rank) {
    for (auto* all : {&by_thread, &by_block}) {
        for (Zeros& zeros : (*all)[rank.number]) arrive(zeros);
    }
}
static void between_turns() {}
