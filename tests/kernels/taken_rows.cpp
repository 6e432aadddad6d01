// take_rows.cu on the CPU, one block after the other.

#include <algorithm>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::max, std::min;

struct Index {
    unsigned x;
};
struct uint4 {
    unsigned x, y, z, w;
};

static thread_local Index threadIdx;
static Index blockIdx;

static int __ldg(const int* place) { return *place; }

#include KERNELS

// Its threads do not wait for each other.
extern "C" void run_take_rows(unsigned blocks, unsigned threads, const TakeParams* params) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) take_rows(*params);
    }
}
