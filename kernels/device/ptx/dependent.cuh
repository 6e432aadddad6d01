// Programmatic dependent launch.

#pragma once

namespace weft {

// The next kernel in the stream may start, once all blocks have come here or ended, if it is launched so. Before Hopper
// none of this does anything.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the previous kernel has ended and its stores are there, in one that is launched so.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The first thing of a kernel that is launched so, and touches no memory before the previous one has ended.
__device__ __forceinline__ void begin_after_previous() {
    let_next_begin();
    wait_for_previous();
}

}  // namespace weft
