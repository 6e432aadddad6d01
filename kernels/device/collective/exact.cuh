// LL data bit by bit (ll_protocol.cuh changes one word into another). Of the two words that arrive as the same one, both
// 16-bit NaNs or small negative integers, a correction says which it was: one more word in the sender's slots, after
// the data of an epoch. It is sent and waited for only where such a word is.
//
// Who writes: the thread that sends a vector, the word `room * 4 + index` of the same slots. Who waits, and resets it:
// the thread that received the vector with such a word in it. Relaxed, system scope, as all LL data.

#include "collective/rounds.cuh"

namespace weft {

constexpr u32 DOUBTFUL = 0xfffffffeu;  // arrives for this word and for 0xffffffff

struct ExactEpoch {
    const Epoch& epoch;
    u32 room;  // slots of a sender that data takes; a fourth as many after them are for corrections

    __device__ __forceinline__ void send_to_all(u32 index, const uint4& v) const {
        epoch.send_to_all(index, ll_encode(v));
        if (max(max(v.x, v.y), max(v.z, v.w)) < DOUBTFUL || epoch.lost) return;
        const u32 correction = 16 | (v.x == ~0u) | (v.y == ~0u) << 1 | (v.z == ~0u) << 2 | (v.w == ~0u) << 3;
#pragma unroll 1
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int peer = peer_of(i);
            char* here = reinterpret_cast<char*>(place(RANK, index));
            store_payload_word(
                reinterpret_cast<u32*>(here + static_cast<long long>(epoch.s.span) * (peer - RANK)), correction);
        }
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
    __device__ __forceinline__ u32* place(int sender, u32 index) const {
        return reinterpret_cast<u32*>(epoch.place(sender, room)) + index;
    }
};

}  // namespace weft
