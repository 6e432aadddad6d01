// Runs a kernel around gemm.cuh on the CPU (fibers.h): matmuls.py compiles it as it is, with this file's stand-ins in
// place of hopper.cuh, blackwell.cuh, sync.cuh and numbers.cuh. Tensor copies and products of warpgroups are done by plain arithmetic.
//
// What a thread stores at a peer becomes visible late, in any order, unless a fence of system scope orders it: that of
// a thread which knows of the store, because it is its own or because barriers or counts lie between. (Votes and shuffles
// tell nothing of memory.) So do the zeros that empty a place at home, for which any fence will do. Loads are never early: a
// reader that looks at data before its flag is found by what it reads only if the program's order is wrong, not if merely
// an acquire is missing. Tensor copies are done late, too, in any order.

#include "matmuls.h"

#ifdef FP8_TYPES
#include "float8.h"
#else
#include "bfloat16.h"
#endif
#ifdef __CUDA_ARCH__
#include "tensor_memory.h"
#endif

static void __nanosleep(unsigned nanoseconds) {
    weft::asleep += nanoseconds;
    go_on_later();
}

#include SOURCE

static_assert(sizeof(Params) == PARAMS_BYTES);
void call(int, int, const void* params) {
    KERNEL(*static_cast<const Params*>(params));
    --state().threads[running->block];
}
// Of a kernel that waits for no rank there is none.
template <typename P>
static auto watch_in(const P& p, int) -> decltype((p.watch)) {
    return p.watch;
}
template <typename P>
static const weft::WaitParams& watch_in(const P&, long) {
    static const weft::WaitParams nobody{};
    return nobody;
}
const weft::WaitParams& watch_of(const void* params) { return watch_in(*static_cast<const Params*>(params), 0); }
