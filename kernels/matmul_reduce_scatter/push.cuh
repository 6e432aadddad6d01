// The warps that send what the compute warpgroups have staged. A part of kernel.cu, which includes it after what it uses.

#pragma once

namespace {

__device__ __forceinline__ uint4* staged(const Params& p, int warpgroup) {
    return p.staging + (2 * blockIdx.x + warpgroup) * PART;
}

// Warps 1 and 2: send to the peers what their warpgroup has staged.
__device__ __forceinline__ void push(
    const Params& p, const weft::Shared& s, const Order& order, int warpgroup, u32 epoch) {
    const int lane = threadIdx.x % 32;
    u32* sent = s.counts + SENT + warpgroup;
    if (!weft::may_send(p.watch, p.buffer, epoch)) {
        if (lane == 0) weft::set_count(sent, weft::CLOSED);
        return;
    }
    constexpr int AHEAD = 8;  // vectors of a lane, in flight at once
    static_assert(PART % (32 * AHEAD) == 0);
    const uint4* from = staged(p, warpgroup) + lane;
    weft::SharedTokenBucket limiter(p.watch, p.buffer, AHEAD * 32 * 16, RATE);
    for (;;) {
        // How many have been sent stands in `sent` alone, for want of registers.
        if (weft::wait_count(s.counts + STAGED + warpgroup, weft::read_count(sent) + 1) == weft::CLOSED) {
            if (lane == 0) weft::set_count(sent, weft::CLOSED);
            return;
        }
        const Tile t = order.tile(p, weft::read_count(s.counts + STEP + warpgroup), s.block);
        const int receivers = ALL_REDUCE && t.dst == p.watch.rank ? WORLD_SIZE - 1 : 1;
        limiter.ask(receivers);
#pragma unroll 1
        for (u32 first = 0; first < PART; first += 32 * AHEAD) {
            uint4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) v[i] = __ldcg(from + first + 32 * i);
            limiter.wait();
            if (first + 32 * AHEAD < PART) limiter.ask(receivers);
            to_receivers(p, t, [&](int dst) {
                uint4* to = at_peer(p, order, t, warpgroup, dst) + lane + first;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) to[32 * i] = v[i];
            });
        }
        // The limiter's __syncwarp came after all lanes' last loads.
        if (lane == 0) weft::set_count(sent, weft::read_count(sent) + 1);
        __syncwarp();
    }
}

// To the warp that sends for this warpgroup: `count` fragments are staged, the last one at `step`; CLOSED: no more
// will be.
__device__ __forceinline__ void tell(const weft::Shared& s, int warpgroup, u32 count, int step = 0) {
    weft::sync_warpgroup(warpgroup);
    if (threadIdx.x % weft::GROUP != 0) return;
    weft::set_count(s.counts + STEP + warpgroup, step);
    weft::set_count(s.counts + STAGED + warpgroup, count);
}

// After the last tile: the warp that sends for this warpgroup may end when all has been sent.
__device__ __forceinline__ void end_sending(const weft::Shared& s, int warpgroup, u32 sent) {
    if (sent == weft::CLOSED) return;
    weft::wait_count(s.counts + SENT + warpgroup, sent);
    tell(s, warpgroup, weft::CLOSED);
}

}  // namespace
