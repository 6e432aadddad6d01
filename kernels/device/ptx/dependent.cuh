// Programmatic dependent launch.

#pragma once

namespace weft {

// The first thing of a kernel that is launched so: the next one in the stream may start, and this one touches no memory
// before the previous one has ended and its stores are there. Without such a launch, and before Hopper, it does nothing.
__device__ __forceinline__ void begin_after_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace weft
