// LL data bit by bit (ll_protocol.cuh changes one word into another). Of the two words that arrive as the same one, both
// 16-bit NaNs or small negative integers, a correction says which it was: one more word in the sender's slots, after
// the data of an epoch. It is sent and waited for only where such a word is.
//
// Who writes: the thread that sends a vector, the word `room * 4 + index` of the same slots. Who waits, and resets it:
// the thread that received the vector with such a word in it. Relaxed, system scope, as all LL data.

#include "collective/rounds.cuh"
#include "collective/slices.cuh"

namespace weft {

constexpr u32 DOUBTFUL = 0xfffffffeu;  // arrives for this word and for 0xffffffff

struct ExactEpoch {
    const Epoch& epoch;
    u32 room;  // slots of a sender that data takes; a fourth as many after them are for corrections

    __device__ __forceinline__ void send_to_all(u32 index, const uint4& v) const {
        epoch.send_to_all(index, ll_encode(v));
        if (!needs_correction(v)) return;
#pragma unroll 1
        for (int i = epoch.first_peer(); i < epoch.end_peer(); ++i) correct(peer_of(i), index, v);
    }

    __device__ __forceinline__ void send(int peer, u32 index, const uint4& v) const {
        epoch.send(peer, index, ll_encode(v));
        if (needs_correction(v)) correct(peer, index, v);
    }

    // What `sender` has sent to slot `index`, where v arrived.
    __device__ __forceinline__ uint4 corrected(int sender, u32 index, uint4 v) const {
        if (v.x != DOUBTFUL && v.y != DOUBTFUL && v.z != DOUBTFUL && v.w != DOUBTFUL) return v;
        u32* word = place(sender, index);
        Deadline deadline;
        u32 bits;
        while ((bits = load_payload_word(word)) == 0) {
            if (deadline.should_poll() && epoch.expired(deadline, sender, room + index / WORDS)) break;
        }
        reset_payload_word(word);
        v.x |= bits & 1;
        v.y |= bits >> 1 & 1;
        v.z |= bits >> 2 & 1;
        v.w |= bits >> 3 & 1;
        return v;
    }

private:
    __device__ __forceinline__ bool needs_correction(const uint4& v) const {
        return !(max(max(v.x, v.y), max(v.z, v.w)) < DOUBTFUL || epoch.lost);
    }

    __device__ __forceinline__ void correct(int peer, u32 index, const uint4& v) const {
        const u32 correction = 16 | (v.x == ~0u) | (v.y == ~0u) << 1 | (v.z == ~0u) << 2 | (v.w == ~0u) << 3;
        char* here = reinterpret_cast<char*>(place(RANK, index));
        store_payload_word(
            reinterpret_cast<u32*>(here + static_cast<long long>(epoch.s.span) * (peer - RANK)), correction);
    }

    __device__ __forceinline__ u32* place(int sender, u32 index) const {
        return reinterpret_cast<u32*>(epoch.place(sender, room)) + index;
    }
};

// Stores each peer's vectors, of a thread's from `s` on that come before `end`, as the peer's part of `out`.
template <bool WHOLE, int COUNT>
__device__ __forceinline__ void receive_parts(
    const Slices& out, const ExactEpoch& exact, ThreadShare s, u32 end, u32 threads) {
    const auto store = [&](int src, u32 at, u32 index, const uint4& v) {
        SliceVector<WHOLE>(out, at).store(src, exact.corrected(src, index, v));
    };
    if constexpr (COUNT == 1) {
        for (; s.at < end; s.skip(threads)) {
            store_all(exact.epoch, s.index, [&](int src, const uint4& v) { store(src, s.at, s.index, v); });
        }
    } else {
        const u32 stride = gridDim.x * threads;
        for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
            uint4 in[COUNT * WORLD_SIZE];
            exact.epoch.take_all<COUNT>(s.index, in, threads);
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) {
                const int src = i % WORLD_SIZE;
                const u32 k = i / WORLD_SIZE;
                if (src != RANK) store(src, s.at + k * stride, s.index + k * threads, in[i]);
            }
        }
        receive_parts<WHOLE, 1>(out, exact, s, end, threads);
    }
}

}  // namespace weft
