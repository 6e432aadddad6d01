// The part of matmuls.cpp that no kernel changes: who waits for whom, when stores become visible, tensor copies.

#define SIMULATOR

#include "matmuls.h"

static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

static char *memory, *memory_end;  // of all workspaces
static unsigned turns_a_store;

// For the runs that follow: the workspaces, how long what is stored there takes, and how far ranks drift apart.
EXPORTED void use(char* first, uint64_t bytes, int ranks, unsigned a_store, unsigned a_rank) {
    memory = first;
    memory_end = first + bytes;
    states.assign(ranks, State());
    turns_a_store = a_store;
    turns_a_rank = a_rank;
    strays = 0;
}
EXPORTED int reached_for_ended_blocks() { return strays; }

static void arrive_late(const Late& store) {
    std::memcpy(store.to, store.bytes, store.size);
    ++stores;
}

static bool is_own(const char* place) {
    const auto each = (memory_end - memory) / static_cast<std::ptrdiff_t>(states.size());
    return (place - memory) / each == current->number;
}

void store(void* place, const void* value, int size, bool late_at_home) {
    char* to = static_cast<char*>(place);
    if (to < memory || to >= memory_end || (!late_at_home && is_own(to))) {
        std::memcpy(to, value, size);
        ++stores;
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

// How often in so many turns something happens that happens once in `turns_each`, on average.
static unsigned times(unsigned passed, unsigned turns_each) { return (passed + dice.below(turns_each)) / turns_each; }

static State& any_rank() { return states[dice.below(states.size())]; }

static void between_turns(unsigned passed) {
    // So late that a block which does not wait for its copies may have ended before them.
    for (unsigned n = times(passed, turns_a_store * turns_a_store); n != 0; --n) {
        State& s = any_rank();
        if (s.copies.empty()) continue;
        const State::Copy copy = taken(s.copies);
        strays += s.threads[copy.block] == 0;
        copy.run();
        ++stores;
    }
    for (unsigned n = times(passed, turns_a_store); n != 0; --n) {
        if (auto& late = any_rank().late; !late.empty()) arrive_late(taken(late));
    }
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
void __threadfence_system() { fence(true); }
void __threadfence() { fence(false); }

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

// For the runs that follow: how many clusters of a launch find room at once; 0: all.
static unsigned room;
EXPORTED void leave_room(unsigned clusters) { room = clusters; }

static bool has_no_room(const Rank& rank, const Fiber& fiber) {
    if (room == 0 || fiber.begun) return false;
    const std::vector<int>& threads = states[rank.number].threads;
    unsigned ended = 0;
    for (size_t block = 0; block < threads.size(); block += CLUSTER_BLOCKS) {
        ended += threads[block] == 0 && threads[block + 1] == 0;
    }
    return fiber.block / CLUSTER_BLOCKS >= room + ended;
}
static bool rests(const Rank& rank, const Fiber& fiber) { return has_no_room(rank, fiber); }
static bool comes_later() {
    const auto comes = [](const State& s) { return !s.copies.empty() || !s.late.empty(); };
    return std::any_of(states.begin(), states.end(), comes);
}

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

Barrier& warp() { return group(state().warps, 32); }
void __syncwarp() { meet_and_tell(warp(), 32); }

unsigned vote(bool said) {
    Barrier& w = warp();
    w.saying |= unsigned(said) << running->thread % 32;
    meet(w.meeting, 32, [&] {
        w.said = w.saying;
        w.saying = 0;
    });
    return w.said;
}

void meet_warp() { meet(warp().meeting, 32); }

unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    Barrier& w = warp();
    const unsigned lane = running->thread % 32;
    unsigned* lanes = w.lanes[w.meeting.round % 2];
    lanes[lane] = value;
    meet(w.meeting, 32);
    return lanes[lane ^ mask];
}

void __syncthreads() { meet_and_tell(group(state().blocks, launched().threads), launched().threads); }

namespace weft {

void set_count(u32* count, u32 value) {
    state().counts[count] = running->knows;
    *count = value;
    if (dice() % 2 == 0) go_on_later();
}
u32 read_count(const u32* count) {
    join(running->knows, state().counts[count]);
    return *count;
}
u32 wait_count(const u32* count, u32 needed) {
    go_on_when([&] { return *count >= needed; });
    return read_count(count);
}

void store_slot(u32* slot, u32 block, u32 value) {
    *in_block(slot, block) = value;
    if (dice() % 2 == 0) go_on_later();
}
u32 wait_slot(const u32* slot, u32 parity) {
    go_on_when([&] { return (*slot & 1) != parity; });
    return *slot;
}

void arrive_at(u64* barrier, u32 block) {
    --phases(in_block(barrier, block)).pending;
    phases(in_block(barrier, block)).settle();
}
void together() { meet_warp(); }

bool elected() {
    together();
    return running->thread % 32 == 0;
}
void sync_cluster() {
    meet_and_tell(state().clusters[running->block / CLUSTER_BLOCKS], launched().threads * CLUSTER_BLOCKS);
}
void sync_warpgroup(int) { meet_and_tell(group(state().warpgroups, 128), 128); }
bool all_of_warpgroup(int warpgroup, bool mine) {
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

static void copy_box(const TensorMap& map, void* place, u64* barrier, const int (&first)[4]) {
    u16* to = static_cast<u16*>(place);
    each_of_box(map, first, [&](const u16* from) { *to++ = from ? *from : 0; });
    phases(barrier).bytes -= map.box[0] * map.box[1] * map.box[2] * map.box[3] * sizeof(u16);
    phases(barrier).settle();
}
void tma_load(const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w) {
    state().copies.push_back({running->block, [=] { copy_box(map, to, barrier, {x, y, z, w}); }});
    go_on_later();
}
void tma_load_cluster(const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w) {
    for (int block = 0; block < CLUSTER_BLOCKS; ++block) {
        void* there = in_block(to, block);
        u64* arrives = in_block(barrier, block);
        const unsigned target = running->block - rank_in_cluster() + block;
        state().copies.push_back({target, [=] { copy_box(map, there, arrives, {x, y, z, w}); }});
        go_on_later();
    }
}

void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w) {
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
void tma_stores_have_read() {
    int& unread = state().unread[running->number];
    go_on_when([&] { return unread == 0; });
}

}  // namespace weft
