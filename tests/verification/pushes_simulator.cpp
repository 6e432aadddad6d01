// The part of pushes.cpp that no kernel changes: who waits for whom, and when what is stored comes.

#define SIMULATOR

#include "pushes.h"

Meeting& warp() {
    return current->warps[running->block * 32 + running->thread / 32];
}

void meet_warp() { meet(warp(), 32); }

float* warp_lanes() {
    warp().values.resize(32);
    return warp().values.data();
}

struct Late {
    void* place;
    uint4 value;
    size_t bytes;
    bool came = false;
};
using Stores = std::vector<std::shared_ptr<Late>>;
// On the way, of each rank: a thread's own, a block's before a barrier, and those that a thread's next flag comes behind.
static std::map<int, std::vector<Stores>> by_thread, by_block, ordered;
static std::map<int, std::map<const unsigned*, Stores>> counted;  // ordered before somebody added to a count
static bool all_late = false;

// For the runs that follow: not only zeros.
EXPORTED void vectors_come_late() { all_late = true; }

static Stores& stores_of(std::map<int, std::vector<Stores>>& all, unsigned which) {
    std::vector<Stores>& rank = all[current->number];
    if (which >= rank.size()) rank.resize(which + 1);
    return rank[which];
}
static Stores& own_stores() { return stores_of(by_thread, running->number); }
static Stores& stores_of_block() { return stores_of(by_block, running->block); }
static Stores& ordered_stores() { return stores_of(ordered, running->number); }

static void arrive(Stores& late) {
    for (const auto& store : late) {
        if (!store->came) std::memcpy(store->place, &store->value, store->bytes);
        store->came = true;
    }
    late.clear();
    ++stores;
}

// To `to`, of those on the way.
static void add(Stores& to, Stores& late) {
    late.erase(std::remove_if(late.begin(), late.end(), [](const auto& store) { return store->came; }), late.end());
    to.insert(to.end(), late.begin(), late.end());
}

static Late* own_store(const void* place) {
    for (const auto& store : own_stores()) {
        if (store->place == place && !store->came) return store.get();
    }
    return nullptr;
}

static void comes_to_a_barrier() { add(stores_of_block(), own_stores()); }

void __syncthreads() {
    comes_to_a_barrier();
    meet(current->blocks[running->block], launched().threads);
}
bool __syncthreads_and(bool said) {
    Meeting& block = current->blocks[running->block];
    comes_to_a_barrier();
    block.values.resize(2);
    float& against = block.values[block.round % 2];  // some may not have read that of the round before
    if (block.waiting == 0) against = 0;
    against += !said;
    meet(block, launched().threads);
    return against == 0;
}
void __threadfence_system() {
    arrive(own_stores());
    arrive(stores_of_block());
}
unsigned atomicAdd(unsigned* place, unsigned more) {
    Stores& before = counted[current->number][place];
    add(before, ordered_stores());
    add(own_stores(), before);
    const unsigned value = *place;
    *place += more;
    ++stores;
    return value;
}

unsigned __ballot_sync(unsigned, bool said) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = said;
    meet_warp();
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(lanes[i] != 0) << i;
    meet_warp();
    return bits;
}

float __shfl_sync(unsigned, float x, int from) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = x;
    meet_warp();
    const float given = lanes[from];
    meet_warp();
    return given;
}

long long __shfl_sync(unsigned, long long x, int from) {
    std::vector<float>& lanes = warp().values;
    lanes.resize(64);
    std::memcpy(&lanes[running->thread % 32 * 2], &x, sizeof x);
    meet_warp();
    std::memcpy(&x, &lanes[from * 2], sizeof x);
    meet_warp();
    return x;
}

unsigned __match_any_sync(unsigned, int word) {
    float* lanes = warp_lanes();
    std::memcpy(&lanes[running->thread % 32], &word, sizeof word);
    meet_warp();
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(std::memcmp(&lanes[i], &word, sizeof word) == 0) << i;
    meet_warp();
    return bits;
}

unsigned __reduce_max_sync(unsigned, unsigned word) {
    float* lanes = warp_lanes();
    lanes[running->thread % 32] = weft::as_float(word);
    meet_warp();
    unsigned largest = 0;
    for (int i = 0; i < 32; ++i) largest = max(largest, weft::as_bits(lanes[i]));
    meet_warp();
    return largest;
}

namespace weft {

// A vector arrives word by word.
void store_payload(uint4* slot, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) {
        store_word(reinterpret_cast<u32*>(slot) + (i + v.x) % 4, words[(i + v.x) % 4]);
        if (v.y % 8 == 0) go_on_later();
    }
}
// What does not lie at a multiple of 16 bytes a GPU refuses: nothing comes from there, and nothing goes there.
static bool is_aligned(const void* place) { return reinterpret_cast<u64>(place) % sizeof(uint4) == 0; }
uint4 load_vector(const uint4* place) {
    if (!is_aligned(place)) return make_uint4(~0u, ~0u, ~0u, ~0u);
    const Late* before = own_store(place);
    return before == nullptr ? *place : before->value;
}
void store_vector(uint4* place, uint4 v) {
    if (!is_aligned(place)) return;
    if (Late* before = own_store(place)) before->came = true;
    if ((all_late || (v.x | v.y | v.z | v.w) == 0) && dice() % 2 == 0) {
        own_stores().push_back(std::make_shared<Late>(Late{place, v, sizeof v}));
    } else {
        *place = v;
    }
    ++stores;
}
void store_vector(uint2* place, uint2 v) {
    if (reinterpret_cast<u64>(place) % sizeof v == 0) *place = v;
}
u32 load_payload_word(const u32* word) { return own_store(word) == nullptr ? *word : 0; }
void fence_system() {
    add(ordered_stores(), own_stores());
    add(ordered_stores(), stores_of_block());
}
void post_after_fence(u32* word, u32 value) {
    arrive(ordered_stores());
    store_word(word, value);
    go_on_later();
}
void store_payload_word(u32* word, u32 value) {
    if (value % 2 == 0) go_on_later();
    store_word(word, value);
}
void reset_payload_word(u32* word) {
    if (dice() % 2 == 0) {
        own_stores().push_back(std::make_shared<Late>(Late{word, {}, sizeof *word}));
    } else {
        store_word(word, 0);
    }
}

// A block's named barriers: rounds that have ended, and who has come in this one.
static Meeting& named(int id) { return current->barriers[running->block * 16 + id]; }
void barrier_sync(int id, u32 threads) {
    comes_to_a_barrier();
    meet(named(id), threads);
}
void wait_for_previous() {
    if (!running->early) return;
    go_on_when([&before = current->unfinished[0]] { return before == 0; });
}
void barrier_arrive(int id, u32 threads) {
    comes_to_a_barrier();
    if (++named(id).waiting == threads) ends(named(id));
    go_on_later();
}

// Of a cluster of so many blocks: a barrier of its first one.
void sync_cluster(u32 blocks) {
    comes_to_a_barrier();
    meet(current->barriers[running->block / blocks * blocks * 16], launched().threads * blocks);
}

// By steps between numbers, from the smallest ones on.
template <bool IS_E5M2>
u32 float8_bits(float number) {
    constexpr int MANTISSA = IS_E5M2 ? 2 : 3, LEAST = IS_E5M2 ? -14 : -6;
    constexpr float LARGEST = IS_E5M2 ? 57344 : 448;
    const u32 sign = std::signbit(number) ? 128 : 0;
    if (std::isnan(number)) return 127;
    const float size = std::min(std::fabs(number), LARGEST);
    const int exponent = std::max(size > 0 ? std::ilogb(size) : LEAST, LEAST);
    const int steps = std::nearbyint(std::ldexp(size, MANTISSA - exponent));
    return sign + ((exponent - LEAST) << MANTISSA) + steps;
}
template u32 float8_bits<false>(float);
template u32 float8_bits<true>(float);

}  // namespace weft

const weft::WaitParams& watch_of(const void* params) { return *static_cast<const weft::WaitParams*>(params); }

// One warp of each block gets few turns, or none does; and one block begins late, or none does.
static void launch_begins(Rank& rank) {
    rank.slow = dice() % (rank.launches[rank.next]->threads / 32 + 1);
    rank.late = dice() % (rank.blocks.size() + 1);
}
static bool rests(const Rank& rank, const Fiber& fiber) {
    if (!fiber.begun && fiber.block == rank.late) return dice() % 64 != 0;
    return fiber.thread / 32 == rank.slow && dice() % 32 != 0;
}
static void launch_ends(Rank& rank) {
    for (auto* all : {&by_thread, &by_block, &ordered}) {
        for (Stores& late : (*all)[rank.number]) arrive(late);
    }
    counted[rank.number].clear();
}
static void between_turns(unsigned) {}
static bool comes_later() { return false; }
static bool has_no_room(const Rank&, const Fiber&) { return false; }
