// Exchanges in one epoch of the slots, or by rounds: chunk by chunk, in as many epochs of one launch as it takes. While a
// thread receives one chunk, the next one is in flight, so one chunk of each trip is left after the last send. An
// epoch has two chunks or more: credits for the next one come while the last ones are under way. docs/protocol.md#credits
// has the proof.
//
// `steps` has, each for the vectors of a thread from a share on that come before `end`, `threads` of a block apart:
//   load(share, end, threads)              what is sent first, ahead
//   send(epoch, share, end, threads)       to the peers
//   answer<COUNT>(epoch, share, end, threads)    with TRIPS = 2: what is received to be sent again, one chunk later
//   receive<COUNT>(epoch, share, end, threads)   all else, TRIPS chunks later; then the slots are reset
// COUNT: vectors of each peer that a thread receives at once, and of a chunk. One after the other, it would wait for
// memory and not keep the links busy; small exchanges are faster with fewer registers and less code.

#include "comm/credits.cuh"

#if !defined(WORKERS) || !defined(AT_ONCE)
#error "WORKERS, AT_ONCE: threads of a block of rounds that send, and vectors that each takes at once"
#endif

namespace weft {

// How vectors are cut; the host's twin is `_epochs` in rounds.py.
struct Chunks {
    u32 vectors;  // of all blocks
    u32 slots;  // of a sender, of a block, that a chunk takes
    u32 of_epoch;  // all of them, if one epoch has room for all

    // `passes`: vectors of each of `workers` threads that fit into an epoch, 2 or more.
    __device__ __forceinline__ Chunks(u32 vectors, u32 workers, u32 passes, u32 most)
        : vectors(vectors), slots(min(most, passes / 2) * workers) {
        of_epoch = vectors <= passes * workers * gridDim.x ? count() : passes * workers / slots;
    }

    __device__ __forceinline__ u32 count() const { return (vectors + slots * gridDim.x - 1) / (slots * gridDim.x); }

    __device__ __forceinline__ u32 epochs() const { return (count() + of_epoch - 1) / of_epoch; }

    // After the last vector of chunk i.
    __device__ __forceinline__ u32 end(u32 i) const { return min((i + 1) * slots * gridDim.x, vectors); }
};

// A thread's vectors of one chunk.
struct Chunk {
    u32 epoch;
    ThreadShare share;

    __device__ __forceinline__ bool begins_epoch(const Chunks& chunks) const { return share.index < chunks.slots; }

    __device__ __forceinline__ void next(const Chunks& chunks) {
        share.skip(chunks.slots);
        if (share.index < chunks.of_epoch * chunks.slots) return;
        share.index -= chunks.of_epoch * chunks.slots;
        ++epoch;
    }
};

// All that `steps` sends, the first of it loaded already.
template <typename Steps>
__device__ __forceinline__ void send_in_turn(
    Steps& steps, const Epoch& epoch, const ThreadShare& s, u32 end, u32 threads) {
    steps.send(epoch, s, end, threads);
#if IN_TURN
    while (epoch.next_turn()) {
        steps.load(s, end, threads);
        steps.send(epoch, s, end, threads);
    }
#endif
}

template <typename Steps>
__device__ __forceinline__ void in_one_epoch(const ExchangeSlots& slots, u32 vectors, Steps& steps) {
    const ThreadShare first;
    steps.load(first, vectors, blockDim.x);  // under way while the epoch's number comes
    const Epoch epoch(slots);
    send_in_turn(steps, epoch, first, vectors, blockDim.x);
    steps.template receive<1>(epoch, first, vectors, blockDim.x);
    epoch.leave();
}

// `room`: slots of a sender that a block uses in one epoch, 2 or more for each worker.
template <int COUNT, typename Steps>
__device__ __forceinline__ void in_rounds(const ExchangeSlots& slots, u32 vectors, u32 room, Steps& steps) {
    const u32 workers = blockDim.x - 32;
    const CreditWarp credit_warp{slots, blockDim.x, blockDim.x};
    const Chunks chunks(vectors, workers, room / workers, COUNT);
    const u32 count = chunks.count(), epochs = chunks.epochs();
    Epoch epoch(slots);

    if (threadIdx.x >= workers) {
        if (epochs > 1) credit_warp.serve(epoch.number, epochs);
    } else {
        Chunk sent{epoch.number}, received = sent;
        [[maybe_unused]] Chunk answered = sent;
        steps.load(sent.share, chunks.end(0), workers);
        for (u32 i = 0; i < count + Steps::TRIPS; ++i) {
            if (i < count) {
                if (i > 0 && sent.begins_epoch(chunks)) epoch.lost |= !credit_warp.may_send();
                epoch.begin(sent.epoch);
                send_in_turn(steps, epoch, sent.share, chunks.end(i), workers);
                sent.next(chunks);
                steps.load(sent.share, chunks.end(i + 1), workers);
            }
            if constexpr (Steps::TRIPS == 2) {
                if (i > 0 && i <= count) {
                    epoch.begin(answered.epoch);
                    steps.template answer<COUNT>(epoch, answered.share, chunks.end(i - 1), workers);
                    answered.next(chunks);
                }
            }
            if (i >= Steps::TRIPS) {
                epoch.begin(received.epoch);
                steps.template receive<COUNT>(epoch, received.share, chunks.end(i - Steps::TRIPS), workers);
                received.next(chunks);
                if (received.begins_epoch(chunks) && i + 1 < count + Steps::TRIPS) credit_warp.emptied();
            }
        }
    }
    epoch.leave();
}

// The same, but some threads send and the others receive, so that neither waits for the other's memory or peers: who
// sends is two epochs ahead at most. `workers`: 64 or more. Steps::SENDERS: one thread of so many sends.
template <int COUNT, typename Steps>
__device__ __forceinline__ void in_rounds_apart(const ExchangeSlots& slots, u32 vectors, u32 room, Steps& steps) {
    const u32 workers = blockDim.x - 32, senders = max(workers / Steps::SENDERS / 32, 1u) * 32;
    const CreditWarp credit_warp{slots, senders + 32, blockDim.x - senders};
    const Chunks chunks(vectors, workers, room / workers, COUNT);
    const u32 epochs = chunks.epochs(), of_epoch = chunks.of_epoch * chunks.slots;
    Epoch epoch(slots);
    // `what(i, share, end)` of each epoch, of the `index`-th thread of those who send or receive.
    const auto each = [&](u32 index, const auto& what) {
        for (u32 i = 0; i < epochs; ++i) {
            const u32 first = i * of_epoch * gridDim.x;
            if (i > 0) epoch.begin(epoch.number + 1);
            what(i, ThreadShare(first + (index / 32 * gridDim.x + blockIdx.x) * 32 + index % 32, index),
                 min(first + of_epoch * gridDim.x, vectors));
        }
    };

    if (threadIdx.x >= workers) {
        if (epochs > 1) credit_warp.serve(epoch.number, epochs);
    } else if (threadIdx.x < senders) {
        each(threadIdx.x, [&](u32 i, const ThreadShare& share, u32 end) {
            steps.load(share, end, senders);
            if (i > 0) epoch.lost |= !credit_warp.may_send();
            steps.send(epoch, share, end, senders);
        });
    } else {
        each(threadIdx.x - senders, [&](u32 i, const ThreadShare& share, u32 end) {
            steps.template receive<COUNT>(epoch, share, end, workers - senders);
            if (i + 1 < epochs) credit_warp.all_emptied();
        });
    }
    epoch.leave();
}

// A whole kernel by steps that are made of its parameters.
template <class Steps, class Params>
__device__ __forceinline__ void one_epoch_of(const Params& p) {
    begin();
    Steps steps{p};
    in_one_epoch(p.slots, p.vectors, steps);
}

template <class Steps, int COUNT, class Params>
__device__ __forceinline__ void rounds_of(const Params& p) {
    begin();
    Steps steps{p};
    in_rounds<COUNT>(p.slots, p.vectors, p.room, steps);
}

}  // namespace weft
