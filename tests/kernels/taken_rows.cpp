// take_rows.cu on the CPU, one block after the other.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::max, std::min;

struct Index {
    unsigned x;
};
struct uint4 {
    unsigned x, y, z, w;
};

static thread_local Index threadIdx;
static Index blockIdx, blockDim, gridDim;
static std::barrier<>* threads_of_block;
static std::atomic<bool> one_is;

static int __ldg(const int* place) { return *place; }

static void __syncthreads() { threads_of_block->arrive_and_wait(); }

static bool __syncthreads_or(bool is) {
    if (is) one_is = true;
    __syncthreads();
    const bool found = one_is;
    __syncthreads();
    one_is = false;
    __syncthreads();
    return found;
}

static void atomicMin(int* place, int value) {
    std::atomic_ref<int> least(*place);
    for (int seen = least; value < seen && !least.compare_exchange_weak(seen, value);) {
    }
}

#include KERNELS

// Its threads do not wait for each other.
extern "C" void run_take_rows(unsigned blocks, unsigned threads, const TakeParams* params) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) take_rows(*params);
    }
}

extern "C" void run_split_experts(unsigned blocks, unsigned threads, const SplitParams* params) {
    std::barrier<> all(threads);
    threads_of_block = &all;
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::vector<std::thread> running;
        for (unsigned i = 0; i < threads; ++i) {
            running.emplace_back([=] {
                threadIdx.x = i;
                split_experts(*params);
            });
        }
        for (auto& thread : running) thread.join();
    }
}
