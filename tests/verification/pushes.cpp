// Runs a .cu file of kernels that push on the CPU (fibers.h): fibers.py compiles it, with the stand-ins of pushes.h.

#include "pushes.h"

namespace weft {

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
    if (shared.empty()) shared.assign(current->blocks.size() * SHARED, -1);  // NaNs
    return *reinterpret_cast<T*>(shared.data() + running->block * SHARED + place);
}

static unsigned& begun() { return current->begun[running->block / CLUSTER_BLOCKS]; }
static unsigned of_cluster() { return launched().threads * CLUSTER_BLOCKS; }
static void arrive_at_cluster() { ++begun(); }
static void wait_for_cluster() {
    go_on_when([&now = begun(), all = of_cluster()] { return now == all; });
}

static void sync_cluster() { sync_cluster(CLUSTER_BLOCKS); }

// In place of memory whose size a launch says.
struct Dynamic {
    int words[20000];
};

static int load_from(const int* place, u32 block) {
    const auto there = (block - static_cast<long>(rank_in_cluster())) * static_cast<long>(SHARED);
    return *reinterpret_cast<const int*>(reinterpret_cast<const char*>(place) + there);
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

template <size_t BYTES, typename Params>
static void call_with(void (*kernel)(Params), const void* params) {
    static_assert(sizeof(Params) == BYTES);
    kernel(*static_cast<const Params*>(params));
}

// The kernels, and call(rank, kernel, params).
#include "kernels.inc"
