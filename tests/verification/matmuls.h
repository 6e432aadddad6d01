// What the kernels of matmuls.cpp have in place of hopper.cuh, sync.cuh and numbers.cuh: templates and one-liners. The rest
// is in matmuls_simulator.cpp, which is compiled once for all of them.

#ifndef MATMULS_H  // it lies in several places (fibers.py)
#define MATMULS_H

#include "boxes.h"

#include <functional>
#include <unordered_map>

using Clock = std::vector<unsigned>;

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

STATE std::vector<State> states;
STATE int strays;  // times that a block, or a copy, reached for a block that had ended

inline State& state() { return states[current->number]; }

void store(void* place, const void* value, int size, bool late_at_home = false);
void __threadfence_system();
void __threadfence();

Barrier& warp();
void __syncwarp();
void __syncthreads();
unsigned vote(bool said);
inline bool __any_sync(unsigned, bool said) { return vote(said) != 0; }
inline unsigned __ballot_sync(unsigned, bool said) { return vote(said); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline bool __all_sync(unsigned, bool said) { return vote(said) == ~0u; }
void meet_warp();
unsigned __shfl_xor_sync(unsigned, unsigned value, int mask);

template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
    static_assert(sizeof(T) == sizeof(unsigned));
    Barrier& w = warp();
    unsigned* lanes = w.lanes[w.meeting.round % 2];
    std::memcpy(lanes + running->thread % 32, &value, sizeof value);
    meet_warp();
    std::memcpy(&value, lanes + lane, sizeof value);
    return value;
}

template <typename T>
static T atomicAdd(T* place, std::common_type_t<T> more) {
    const T before = *place;
    *place += more;
    ++stores;
    return before;
}
template <typename T>
static void atomicMax(T* place, T least) {
    *place = std::max(*place, least);
    ++stores;
}

#define __expf(x) std::exp(x)
static float __fdividef(float x, float y) { return x / y; }

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
static int max(int a, int b) { return a < b ? b : a; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

namespace weft {

using u8 = unsigned char;

static uint4 load_payload(const uint4* slot) { return *slot; }
static u32 load_payload_word(const u32* word) { return *word; }
static void reload_payload(bool wanted, const uint4* slot, uint4& v) {
    if (wanted) std::memcpy(&v, slot, sizeof v);
}
static uint4 load_vector(const uint4* place) { return *place; }
static void store_vector(uint4* place, uint4 v) { store(place, &v, sizeof v, true); }
static void post_after_fence(u32* word, u32 value) { store(word, &value, sizeof value); }
static void store_word(u32* place, u32 value) { store(place, &value, sizeof value); }
static void post_flag(u32* word, u32 value) {
    __threadfence_system();
    post_after_fence(word, value);
}

// Sleep is all that takes time.
static u64 asleep;
static u64 nanoseconds() { return asleep; }

static u32 shared_address(const void* pointer) { return static_cast<u32>(reinterpret_cast<u64>(pointer)); }
inline u8* shared_base() { return reinterpret_cast<u8*>(state().shared.data() + running->block * SHARED); }
static u32 rank_in_cluster() { return running->block % CLUSTER_BLOCKS; }

template <typename T>
static T* in_block(T* mine, u32 block) {
    const u32 first = running->block - rank_in_cluster();
    strays += state().threads[first + block] == 0;
    return reinterpret_cast<T*>(reinterpret_cast<u64>(mine) + (u64(block) - rank_in_cluster()) * SHARED);
}

void set_count(u32* count, u32 value);
u32 read_count(const u32* count);
u32 wait_count(const u32* count, u32 needed);
void store_slot(u32* slot, u32 block, u32 value);
u32 wait_slot(const u32* slot, u32 parity);
void arrive_at(u64* barrier, u32 block);
void together();  // what the lanes of a warp can only do so
bool elected();
static void fence_proxy_async() {}
void sync_cluster();
void sync_warpgroup(int);
bool all_of_warpgroup(int warpgroup, bool mine);
template <int N>
static void warpgroup_reg_dealloc() {}
template <int N>
static void warpgroup_reg_alloc() {}

void tma_load(const TensorMap& map, void* to, u64* barrier, int x, int y, int z, int w = 0);
void tma_load_cluster(const TensorMap& map, void* to, u64* barrier, int x, int y, int z = 0, int w = 0);
void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w);
void tma_stores_have_read();

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

#endif
