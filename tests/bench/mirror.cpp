// bench/mirror.cu on the CPU (../kernels/fibers.h): rank 0's sending warps store their parts at peers, word by word, and
// what then lies in rank 0's half is what each peer would have sent it, as order.cuh has it for that peer. Prints what is
// wrong, or nothing.

#include "../kernels/fibers.h"

#include <cstdio>
#include <cstdlib>

struct uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

static uint64_t now = 1'763'000'000'000'000'000;

static Meeting& warp() { return current->warps[running->block * (launched().threads / 32) + running->thread / 32]; }
static void __syncwarp() { meet(warp(), 32); }
static void __nanosleep(unsigned) { go_on_later(); }
static void __threadfence() {}
static void __threadfence_system() {}
static bool __any_sync(unsigned, bool said) {
    Meeting& lanes = warp();
    lanes.values.resize(32);
    lanes.values[running->thread % 32] = said;
    meet(lanes, 32);
    const bool any = std::count(lanes.values.begin(), lanes.values.end(), 0.0f) < 32;
    meet(lanes, 32);
    return any;
}
static bool __all_sync(unsigned, bool said) { return !__any_sync(~0u, !said); }
// Of words, whether there is one.
static unsigned __shfl_sync(unsigned, unsigned word, int from) {
    return __any_sync(~0u, running->thread % 32 == from && word != 0);
}
template <typename T, typename More>
static T atomicAdd(T* place, More more) {
    const T before = *place;
    *place += more;
    return before;
}
static void atomicMax(weft::u64* place, weft::u64 least) { *place = max(*place, least); }

namespace weft {
static u64 nanoseconds() { return now; }
static uint4 load_payload(const uint4* slot) { return *slot; }
static void store_payload(uint4* slot, uint4 v) { *slot = v; }
static void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) v = *slot;
}
static u32 load_relaxed(const u32* word) { return *word; }
static void post_behind_fence(u32* word, u32 value) { *word = value; }
}  // namespace weft

#include MIRROR
static_assert(sizeof(Params) == PARAMS_BYTES);

// Word `i` of a part that is sent.
static u32 sent(const weft::ScatterTile& t, int part, u32 i) {
    return ((t.dst * 131u + t.index) * 2 + part) * 40503u + i * 2654435761u | 1;
}

// A fiber for each warp of the op that sends.
static void send(const Params& p) {
    const Order order(p);
    const int cluster = threadIdx.x / 4, block = threadIdx.x / 2 % 2, part = threadIdx.x % 2;
    for (int step = cluster; step < order.steps(); step += p.clusters) {
        const auto t = order.tile(p, step, block);
        if (!t.inside || t.dst == 0) continue;
        auto* to = reinterpret_cast<u32*>(weft::on_rank(p.inbox, p.watch, p.half, t.dst) + (2 * t.index + part) * PART);
        for (u32 i = 0; i < 4 * PART; ++i) {
            // In no order, the last one of a burst before all others: who looks at it alone takes too much for sent.
            const u32 of_burst = 4 * BURST, word = i / of_burst * of_burst + (i * 77 + of_burst - 1) % of_burst;
            to[word] = sent(t, part, word);
            if (dice() % 2 == 0) go_on_later();
        }
    }
}

static void call(int rank, int, const void* params) {
    const Params& p = *static_cast<const Params*>(params);
    rank == 0 ? mirror(p) : send(p);
}
static const weft::Watch& watch_of(const void* params) { return static_cast<const Params*>(params)->watch; }
static void launch_begins(Rank&) {}
static void launch_ends(Rank&) {}
static bool rests(const Rank&, const Fiber&) { return false; }
static void between_turns() { ++now; }

int main(int, char** given) {
    Params p{};
    p.m = std::atoi(given[1]), p.n = std::atoi(given[2]), p.batches = std::atoi(given[3]), p.band = std::atoi(given[4]);
    p.clusters = std::atoi(given[5]);
    const bool sends = std::atoi(given[6]);
    p.rate = std::atoi(given[7]);
    const Order order(p);
    const size_t half = size_t(WORLD_SIZE - 1) * order.each() * 2 * PART;  // vectors
    std::vector<uint4> memory(WORLD_SIZE * half);
    alignas(8) u32 words[2] = {};
    u32 fault[1] = {};
    p.inbox = memory.data();
    p.half.span = half * sizeof(uint4);
    p.watch.words = words, p.watch.fault = fault, p.watch.timeout_ns = sends ? MOST_TURNS : 100;

    // Of two blocks, and no more warps than are needed.
    Launch launches[2] = {{0, 2, (p.clusters + 1) / 2 * 2 * 32}, {1, 1, 4 * p.clusters}};
    for (Launch& launch : launches) std::memcpy(launch.params, &p, sizeof p);
    turns_a_rank = 100;  // so that bursts are seen before they are whole
    const uint64_t begin = now;
    if (!run(launches, sends ? 2 : 1, 1, std::atoi(given[8]), -1, 0)) std::printf("it does not end\n");

    std::vector<uint4> wanted(half);
    u32 bursts = 0;
    for (int rank = 1; rank < WORLD_SIZE && sends; ++rank) {
        Params peer = p;
        peer.watch.rank = rank;
        for (int i = 0; i < 4 * order.steps(); ++i) {
            const auto own = order.tile(p, i / 4, i / 2 % 2), t = order.tile(peer, i / 4, i / 2 % 2);
            if (!t.inside || t.dst != 0) continue;
            auto* part = reinterpret_cast<u32*>(&wanted[((rank - 1) * order.each() + t.index) * 2 * PART + i % 2 * PART]);
            for (u32 word = 0; word < 4 * PART; ++word) part[word] = sent(own, i % 2, word);
            bursts += PART / BURST;
        }
    }
    for (size_t i = 0; i < half; ++i) {
        if (std::memcmp(&memory[i], &wanted[i], sizeof(uint4)) == 0) continue;
        std::printf("vector %zu is another\n", i);
        break;
    }
    // Each warp may draw one from a clock that nobody has set yet.
    const uint64_t paced = bursts - min<uint64_t>(bursts, launches[0].blocks * launches[0].threads / 32);
    const uint64_t least = paced * BURST * sizeof(uint4) / p.rate, took = now - begin;
    if (took + 2000 < least) std::printf("too fast: %zu ns, %zu at least\n", took, least);
}
