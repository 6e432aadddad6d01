// The main loop of a tile on Blackwell, by tcgen05: warp 0 of warpgroup 3 issues the products of a whole tile, which add
// up in tensor memory. Warpgroups 0 and 1 get the sums of a tile while those of the next one add up.
//
// Who writes and who waits, besides the ring of stages: `summed` of an accumulator is over when a tile's last product is
// done; the issuer waits for `taken`, at which the eight warps arrive that have read it.

#pragma once

#include "gemm/sm100/accumulator.cuh"
#include "gemm/sm100/descriptors.cuh"
#include "gemm/stages.cuh"

#ifdef FP8_TYPES
#error "FP8_TYPES: scales.cuh is for Hopper"
#endif

namespace weft {

using MultiplyState = PipelineState<ACCUMULATORS>;

struct Accumulators {
    u64* summed;  // [ACCUMULATORS]
    u64* taken;  // [ACCUMULATORS]
    u32* address;

    __device__ __forceinline__ explicit Accumulators(const Shared& s)
        : summed(s.accumulators), taken(summed + ACCUMULATORS), address(reinterpret_cast<u32*>(taken + ACCUMULATORS)) {}
};

__device__ __forceinline__ void begin_accumulators(const Shared& s) {
    const Accumulators all(s);
    if (threadIdx.x == 0) {
        for (int i = 0; i < ACCUMULATORS; ++i) {
            init_barrier(all.summed + i, 1);
            init_barrier(all.taken + i, 8);
        }
    }
    if (warp_of_block() == 12) allocate_tensor_memory<TENSOR_COLUMNS>(all.address);
}

// Warp 0 of warpgroup 3, converged. One thread, always the same, issues.
struct Issuer {
    const Shared& s;
    Accumulators all;
    PipelineState<STAGES> stages;
    MultiplyState state;

    __device__ __forceinline__ explicit Issuer(const Shared& s) : s(s), all(s) {}

    // The products of a tile, when its accumulator has been read. A hook gets the number of a stage and 64 rows of A,
    // and has done with them at its end.
    template <typename MainloopHook = NoMainloopHook>
    __device__ __forceinline__ void multiply(int depth, const MainloopHook& upper = {}, const MainloopHook& lower = {}) {
        constexpr u32 INSTRUCTION = instruction_descriptor(BM, BN, PRODUCT_TYPE[0] == 'b', B_ROWS);
        wait(all.taken + state.at, state.parity ^ 1);
        const u32 sums = *all.address + state.at * BN;
        for (int i = 0; i < depth; ++i) {
            const u8* stage = s.stages + stages.at * STAGE_BYTES;
            wait(s.full + stages.at, stages.parity);
            order_after_sync();
            upper.begin(i, stage);
            lower.begin(i, stage + A_BYTES / 2);
            if (elected()) {
                const u64 a = operand_descriptor(shared_address(stage), 0, 1024);
                const u64 b = operand_descriptor(shared_address(stage + A_BYTES), B_ROWS ? 4096 : 0, 1024);
#pragma unroll
                for (int k = 0; k < BK / 16; ++k) {
                    const int b_at = B_ROWS ? k / 2 * (B_BYTES / 2) + k % 2 * 2048 : k * 32;
                    multiply_in_tensor_memory(sums, a + k * 2, b + (b_at >> 4), INSTRUCTION, i + k);
                }
            }
            upper.end();
            lower.end();
            if (elected()) arrive_after_products_at_both(s.empty + stages.at);
            stages.next();
        }
        if (elected()) arrive_after_products(all.summed + state.at);
        state.next();
    }

    // After the last tile.
    __device__ __forceinline__ void end() {
        for (int i = 0; i < ACCUMULATORS; ++i) {
            wait(all.taken + state.at, state.parity ^ 1);
            state.next();
        }
        order_after_sync();
        free_tensor_memory<TENSOR_COLUMNS>(*all.address);
    }
};

// Gets the sums of a tile, by warpgroup 0 or 1: in registers, so that the accumulator is free again before the epilogue.
template <typename MainloopHook = NoMainloopHook>
__device__ __forceinline__ void multiply(
    const Shared& s, MultiplyState& state, int warpgroup, int, float (&sums)[ACC_REGS], const MainloopHook& = {}) {
    const Accumulators all(s);
    const u32 lane = threadIdx.x % GROUP / 32 * 32;  // its warp's first one
    wait(all.summed + state.at, state.parity);
    order_after_sync();
    const u32 from = *all.address + (lane << 16) + state.at * BN + warpgroup * WN;
#pragma unroll
    for (int i = 0; i < ACC_REGS; i += 16) load_from_tensor_memory(from + i, sums + i);
    tensor_loads_done(sums);
    order_before_sync();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at(all.taken + state.at, s.block);
    state.next();
}

}  // namespace weft
