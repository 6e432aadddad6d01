// Exchanges in one epoch of the slots, or by rounds: several epochs in one launch. While a thread receives what belongs
// to one, the next one is in flight. docs/protocol.md#credits has the proof.
//
// `steps` has, each for the vectors of a thread from a share on that come before `end`, `threads` of a block apart:
//   load(share, end, threads)              what is sent first, ahead
//   send(epoch, share, end, threads)       to the peers
//   answer<COUNT>(epoch, share, end, threads)    what has to be received and sent again before the next epoch is sent
//   receive<COUNT>(epoch, share, end, threads)   all else; then the slots are reset
// COUNT: vectors of each peer that a thread receives at once. One after the other, it would wait for memory and not keep
// the links busy; small exchanges are faster with fewer registers and less code.

#include "comm/credits.cuh"

namespace weft {

template <typename Steps>
__device__ __forceinline__ void in_one_epoch(const ExchangeSlots& slots, u32 vectors, Steps& steps) {
    const ThreadShare first;
    steps.load(first, vectors, blockDim.x);  // under way while the epoch's number comes
    const Epoch epoch(slots);
    steps.send(epoch, first, vectors, blockDim.x);
    steps.template receive<1>(epoch, first, vectors, blockDim.x);
    epoch.leave();
}

// `room`: slots of a sender that a block uses in one epoch.
template <int COUNT, typename Steps>
__device__ __forceinline__ void in_rounds(const ExchangeSlots& slots, u32 vectors, u32 room, Steps& steps) {
    const u32 workers = blockDim.x - 32;
    const CreditWarp credit_warp{slots};
    const u32 passes = room / workers, round = passes * workers * gridDim.x;
    const u32 epochs = (vectors + round - 1) / round;
    Epoch epoch(slots);

    if (threadIdx.x >= workers) {
        if (epochs > 1) credit_warp.serve(epoch.number, epochs);
    } else {
        ThreadShare now;
        u32 number = epoch.number, end = min(round, vectors);
        steps.load(now, end, workers);
        steps.send(epoch, now, end, workers);
        for (;;) {
            steps.template answer<COUNT>(epoch, now, end, workers);
            const bool more = end < vectors;
            const ThreadShare ahead(now.at + round, now.index);
            const u32 its_end = min(end + round, vectors);
            if (more) {
                epoch.lost |= !credit_warp.may_send();
                epoch.begin(number + 1);
                steps.load(ahead, its_end, workers);
                steps.send(epoch, ahead, its_end, workers);
                epoch.begin(number);
            }
            steps.template receive<COUNT>(epoch, now, end, workers);
            if (!more) break;
            credit_warp.emptied();
            epoch.begin(++number);
            now = ahead;
            end = its_end;
        }
    }
    epoch.leave();
}

}  // namespace weft
