// Runs a kernel around gemm.cuh on the CPU (fibers.h): matmuls.py compiles it as it is, with this file's stand-ins in
// place of hopper.cuh, sync.cuh and numbers.cuh. Tensor copies and products of warpgroups are done by plain arithmetic.
//
// What a thread stores at a peer becomes visible late, in any order, unless a fence of system scope orders it: that of
// a thread which knows of the store, because it is its own or because barriers or counts lie between. (Votes and shuffles
// tell nothing of memory.) So do the zeros that empty a place at home, for which any fence will do. Loads are never early: a
// reader that looks at data before its flag is found by what it reads only if the program's order is wrong, not if merely
// an acquire is missing. Tensor copies are done late, too, in any order.

#include "boxes.h"

#include <functional>
#include <unordered_map>

using Clock = std::vector<unsigned>;

static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Late {
    char* to;
    char bytes[16];
    int size;
    unsigned by, number;  // of the fiber's stores
};

// A meeting behind which each knows what all have done.
struct Barrier {
    Meeting meeting;
    Clock gathering, gathered;
    unsigned saying = 0, said = 0;  // a bit of each lane, or how many are against it
    unsigned lanes[2][32];
};

constexpr size_t SHARED = 128 << 10;
constexpr int CLUSTER_BLOCKS = 2;

struct State {
    std::vector<char> shared;
    std::vector<Barrier> warps, warpgroups, blocks, clusters;
    std::unordered_map<const unsigned*, Clock> counts;
    std::vector<Late> late;
    std::vector<int> threads;  // of each block that have not ended
    struct Copy {
        unsigned block;  // whose memory it fills
        std::function<void()> run;
    };
    std::vector<Copy> copies;  // that are under way
    std::unordered_map<unsigned, int> unread;  // of each fiber's stores of boxes, those that have not read theirs
};

static std::vector<State> states;
static char *memory, *memory_end;  // of all workspaces
static unsigned turns_a_store;
static int strays;  // times that a block, or a copy, reached for a block that had ended

// For the runs that follow: the workspaces, how long what is stored there takes, and how far ranks drift apart.
extern "C" void use(char* first, uint64_t bytes, int ranks, unsigned a_store, unsigned a_rank) {
    memory = first;
    memory_end = first + bytes;
    states.assign(ranks, State());
    turns_a_store = a_store;
    turns_a_rank = a_rank;
    strays = 0;
}
extern "C" int reached_for_ended_blocks() { return strays; }

static State& state() { return states[current->number]; }

static void arrive_late(const Late& store) { std::memcpy(store.to, store.bytes, store.size); }

static bool is_own(const char* place) {
    const auto each = (memory_end - memory) / static_cast<std::ptrdiff_t>(states.size());
    return (place - memory) / each == current->number;
}

static void store(void* place, const void* value, int size, bool late_at_home = false) {
    char* to = static_cast<char*>(place);
    if (to < memory || to >= memory_end || (!late_at_home && is_own(to))) {
        std::memcpy(to, value, size);
        return;
    }
    Clock& knows = running->knows;
    if (knows.size() <= running->number) knows.resize(running->number + 1);
    Late late{to, {}, size, running->number, ++knows[running->number]};
    std::memcpy(late.bytes, value, size);
    state().late.push_back(late);
    if (dice() % 16 == 0) go_on_later();
}

template <typename T>
static T taken(std::vector<T>& all) {
    std::swap(all[dice.below(all.size())], all.back());
    T one = std::move(all.back());
    all.pop_back();
    return one;
}

static void between_turns() {
    State& s = states[dice.below(states.size())];
    // So late that a block which does not wait for its copies may have ended before them.
    if (!s.copies.empty() && dice.below(turns_a_store * turns_a_store) == 0) {
        const State::Copy copy = taken(s.copies);
        strays += s.threads[copy.block] == 0;
        copy.run();
    }
    auto& late = s.late;
    if (late.empty() || dice.below(turns_a_store) != 0) return;
    arrive_late(taken(late));
}

static void fence(bool at_peers) {
    const Clock& knows = running->knows;
    auto& late = state().late;
    const auto behind = std::partition(late.begin(), late.end(), [&](const Late& store) {
        return store.by >= knows.size() || knows[store.by] < store.number || (!at_peers && !is_own(store.to));
    });
    std::for_each(behind, late.end(), arrive_late);
    late.erase(behind, late.end());
}
static void __threadfence_system() { fence(true); }
static void __threadfence() { fence(false); }

static void launch_begins(Rank& rank) {
    const Launch& launch = *rank.launches[rank.next];
    State& s = states[rank.number];
    s.shared.assign(launch.blocks * SHARED, -1);  // NaNs, and counts far ahead
    s.warps.assign(launch.blocks * launch.threads / 32, Barrier());
    s.warpgroups.assign(launch.blocks * launch.threads / 128, Barrier());
    s.blocks.assign(launch.blocks, Barrier());
    s.clusters.assign(launch.blocks / CLUSTER_BLOCKS, Barrier());
    s.counts.clear();
    s.unread.clear();
    s.threads.assign(launch.blocks, launch.threads);
}

static bool rests(const Rank&, const Fiber&) { return false; }
static void launch_ends(Rank& rank) {
    strays += states[rank.number].copies.size();
    states[rank.number].copies.clear();
    auto& late = states[rank.number].late;
    std::for_each(late.begin(), late.end(), arrive_late);
    late.clear();
}

static Barrier& group(std::vector<Barrier>& barriers, unsigned threads) {
    return barriers[(running->block * launched().threads + running->thread) / threads];
}

static void meet_and_tell(Barrier& barrier, unsigned all) {
    join(barrier.gathering, running->knows);
    meet(barrier.meeting, all, [&] {
        barrier.gathered.swap(barrier.gathering);
        barrier.gathering.clear();
    });
    join(running->knows, barrier.gathered);
}

static Barrier& warp() { return group(state().warps, 32); }
static void __syncwarp() { meet_and_tell(warp(), 32); }

static unsigned vote(bool said) {
    Barrier& w = warp();
    w.saying |= unsigned(said) << running->thread % 32;
    meet(w.meeting, 32, [&] {
        w.said = w.saying;
        w.saying = 0;
    });
    return w.said;
}
static bool __any_sync(unsigned, bool said) { return vote(said) != 0; }
static bool __all_sync(unsigned, bool said) { return vote(said) == ~0u; }

template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
    static_assert(sizeof(T) == sizeof(unsigned));
    Barrier& w = warp();
    unsigned* lanes = w.lanes[w.meeting.round % 2];
    std::memcpy(lanes + running->thread % 32, &value, sizeof value);
    meet(w.meeting, 32);
    std::memcpy(&value, lanes + lane, sizeof value);
    return value;
}

static unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    Barrier& w = warp();
    const unsigned lane = running->thread % 32;
    unsigned* lanes = w.lanes[w.meeting.round % 2];
    lanes[lane] = value;
    meet(w.meeting, 32);
    return lanes[lane ^ mask];
}

static void __syncthreads() { meet_and_tell(group(state().blocks, launched().threads), launched().threads); }

template <typename T>
static T atomicAdd(T* place, std::common_type_t<T> more) {
    const T before = *place;
    *place += more;
    return before;
}
template <typename T>
static void atomicMax(T* place, T least) {
    *place = std::max(*place, least);
}

struct uint4 {
    unsigned x, y, z, w;
    // Its words arrive in no order.
    uint4& operator=(const uint4& other) {
        const unsigned words[4] = {other.x, other.y, other.z, other.w};
        for (int i = 0; i < 4; ++i) store(&x + i, words + i, sizeof words[i]);
        return *this;
    }
};
struct float2 {
    float x, y;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
template <typename T>
static T __ldg(const T* place) {
    return *place;
}
template <typename T>
static T __ldcg(const T* place) {
    return *place;
}
static int min(int a, int b) { return a < b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

namespace weft {

using u8 = unsigned char;

static uint4 load_payload(const uint4* slot) { return *slot; }
static void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) std::memcpy(&v, slot, sizeof v);
}
static uint4 load_vector(const uint4* place) { return *place; }
static void store_vector(uint4* place, uint4 v) { store(place, &v, sizeof v, true); }
static void post_behind_fence(u32* word, u32 value) { store(word, &value, sizeof value); }
static void store_word(u32* place, u32 value) { store(place, &value, sizeof value); }
static void post_flag(u32* word, u32 value) {
    __threadfence_system();
    post_behind_fence(word, value);
}

// Sleep is all that takes time.
static u64 asleep;
static u64 nanoseconds() { return asleep; }

static u32 shared_address(const void* pointer) { return static_cast<u32>(reinterpret_cast<u64>(pointer)); }
static u8* shared_base() { return reinterpret_cast<u8*>(state().shared.data() + running->block * SHARED); }
static u32 rank_in_cluster() { return running->block % CLUSTER_BLOCKS; }

template <typename T>
static T* in_block(T* mine, u32 block) {
    const u32 first = running->block - rank_in_cluster();
    strays += state().threads[first + block] == 0;
    return reinterpret_cast<T*>(reinterpret_cast<u64>(mine) + (u64(block) - rank_in_cluster()) * SHARED);
}

static void set_count(u32* count, u32 value) {
    state().counts[count] = running->knows;
    *count = value;
    if (dice() % 2 == 0) go_on_later();
}
static u32 read_count(const u32* count) {
    join(running->knows, state().counts[count]);
    return *count;
}
static u32 wait_count(const u32* count, u32 needed) {
    go_on_when([&] { return *count >= needed; });
    return read_count(count);
}

static void arrive_at(u64* barrier, u32 block) {
    --phases(in_block(barrier, block)).pending;
    phases(in_block(barrier, block)).settle();
}
// What the lanes of a warp can only do together.
static void together() { meet(warp().meeting, 32); }

static bool elected() {
    together();
    return running->thread % 32 == 0;
}
static void fence_proxy_async() {}
static void sync_cluster() {
    meet_and_tell(state().clusters[running->block / CLUSTER_BLOCKS], launched().threads * CLUSTER_BLOCKS);
}
static void sync_warpgroup(int) { meet_and_tell(group(state().warpgroups, 128), 128); }
static bool all_of_warpgroup(int warpgroup, bool mine) {
    Barrier& w = group(state().warpgroups, 128);
    w.saying += !mine;
    meet(w.meeting, 128, [&] {
        w.said = w.saying;
        w.saying = 0;
    });
    const bool all = w.said == 0;
    sync_warpgroup(warpgroup);
    return all;
}
template <int N>
static void warpgroup_reg_dealloc() {}
template <int N>
static void warpgroup_reg_alloc() {}

static void copy_box(const TensorMap& map, void* place, u64* barrier, const int (&first)[4]) {
    u16* to = static_cast<u16*>(place);
    each_of_box(map, first, [&](const u16* from) { *to++ = from ? *from : 0; });
    phases(barrier).bytes -= map.box[0] * map.box[1] * map.box[2] * map.box[3] * sizeof(u16);
    phases(barrier).settle();
}
static void tma_load(const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w) {
    state().copies.push_back({running->block, [=] { copy_box(map, to, barrier, {x, y, z, w}); }});
    go_on_later();
}
static void tma_load_cluster(const TensorMap& map, void* to, u64* barrier, int x, int y, int z = 0, int w = 0) {
    for (int block = 0; block < CLUSTER_BLOCKS; ++block) {
        void* there = in_block(to, block);
        u64* arrives = in_block(barrier, block);
        const unsigned target = running->block - rank_in_cluster() + block;
        state().copies.push_back({target, [=] { copy_box(map, there, arrives, {x, y, z, w}); }});
        go_on_later();
    }
}

static void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w) {
    const unsigned number = running->number;
    ++state().unread[number];
    auto run = [=, rank = &state()] {
        const u16* next = static_cast<const u16*>(from);
        each_of_box(map, {x, y, z, w}, [&](u16* to) {
            if (to) *to = *next;
            ++next;
        });
        --rank->unread[number];
    };
    state().copies.push_back({running->block, run});
    go_on_later();
}
static void tma_stores_have_read() {
    int& unread = state().unread[running->number];
    go_on_when([&] { return unread == 0; });
}

static void warpgroup_arrive() { together(); }
static void warpgroup_commit_batch() {}
template <int N>
static void warpgroup_wait() {
    together();
}

// Boxes are not swizzled here, and an operand is its address, in units of 16 bytes. Where N is contiguous, groups of 64
// columns lie 4096 bytes apart.
static u64 smem_descriptor(const void* at, u32, u32) { return reinterpret_cast<u64>(at) >> 4; }

}  // namespace weft

#ifdef FP8_TYPES
#include "float8.h"
#else
#include "bfloat16.h"
#endif

static void __nanosleep(unsigned nanoseconds) {
    weft::asleep += nanoseconds;
    go_on_later();
}

#include SOURCE

static_assert(sizeof(Params) == PARAMS_BYTES);
static void call(int, int, const void* params) {
    KERNEL(*static_cast<const Params*>(params));
    --state().threads[running->block];
}
static const weft::WaitParams& watch_of(const void* params) { return static_cast<const Params*>(params)->watch; }
