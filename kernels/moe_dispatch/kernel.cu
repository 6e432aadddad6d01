// Tokens to the ranks of their experts, and back; of each token [row] once to, and from, each rank that has one of them.
//
// dispatch: out[slots[r * T + t][j]] = token t of rank r, for each choice j that is this rank's; rows that fill an
// expert's up are zeros, those past the last expert's are not written. combine: out[t] = the sum over ranks r, in their
// order in float32, of what r's rows of the token add up to with their weights (collective/combine.cuh), rounded once.
//
// `ranks` says on both sides which ranks have an expert of a token: so a receiver waits for what is sent, and for no
// more. Slot 0 of a block is sent in every epoch, needed or not: each block hears from every peer.
//
// Who writes and who waits: LL exchange (ll_exchange.cuh, credits.cuh); dispatch with corrections (exact.cuh).
// Graph-safe. docs/protocol.md#ll-exchange, #tokens-and-experts

#include "collective/exact.cuh"
#include "collective/combine.cuh"

#if !defined(WORKERS) || !defined(AT_ONCE)
#error "WORKERS, AT_ONCE: threads of a block of rounds that send, and vectors that each takes at once"
#endif
#if WORLD_SIZE > 8 || CHOICES < 1
#error "WORLD_SIZE is 8 at most; CHOICES: of a token, 1 or more"
#endif

namespace {

using weft::Epoch;
using weft::ThreadShare;
using weft::u32;
using weft::u64;

struct Params {
    weft::ExchangeSlots slots;
    uint4* out;  // [C, row], or [T, row]
    const uint4* given;  // x [T, row], or y [C, row]
    const u32* index;  // [W * T, CHOICES]: the row of each choice
    const u32* ranks;  // [W * T]: bit r says that rank r has an expert of the token
    const void* more;  // choices [C], -1 where a row has none, or null; or weights [W * T, CHOICES]
    const u32* offs;  // [experts]: rows up to the end of each of this rank's; with choices
    const u32* ids;  // own tokens' [T, CHOICES], of `words` words each
    u32 vectors;  // of a rank's tokens
    u32 room;  // slots of a sender in one epoch, that data takes
    u32 row;  // vectors of a token
    u32 tokens;  // T
    u32 rows;  // C
    u32 experts;  // of this rank, whose rows are filled up; else 0
    u32 each;  // experts of a rank; with words
    u32 words;  // 0: who needs own tokens is known by `ranks` alone; else rows have 32 vectors or more

    // Which ranks have an expert of rank r's token whose vector `at` is.
    __device__ __forceinline__ u32 needed(int r, u32 at) const { return ranks[r * tokens + at / row]; }

    // One id of the two own tokens from `first` on that a warp's 32 vectors may be of: of the one by lanes 0 to 15, of the
    // next by the others.
    __device__ __forceinline__ u32 chosen_by_lane(u32 first) const {
        const u32 lane = threadIdx.x % 32, token = first + lane / 16, j = lane % 16;
        if (token >= tokens || j >= CHOICES) return ~0u;
        const u32* id = ids + (static_cast<u64>(token) * CHOICES + j) * words;
        const u32 expert = id[0], more = words == 2 ? id[1] : 0;
        return more == 0 ? expert : ~0u;
    }

    // Which peers have an expert of the own token whose ids lanes from `second` on have: as `ranks` will say it.
    __device__ __forceinline__ u32 peers_of(u32 second, u32 expert) const {
        u32 by = 0;
#pragma unroll
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const u32 there = __ballot_sync(~0u, expert - weft::peer_of(i) * each < each);
            by |= static_cast<u32>((there >> second & 0xffff) != 0) << weft::peer_of(i);
        }
        return by;
    }
};

__device__ __forceinline__ bool has(u32 ranks, int rank) { return ranks >> rank & 1; }

// What each peer has sent, of COUNT vectors.
template <int COUNT>
struct Sent {
    u32 by[COUNT];

    __device__ __forceinline__ bool operator()(int k, int src) const { return has(by[k], src); }
};

// The rows of a token's choices on this rank, and a column of them.
struct Places {
    u32 slot[CHOICES];
    u32 column;

    // Of rank r's token whose vector `at` is.
    __device__ __forceinline__ void load(const Params& p, int r, u32 at) {
        const u32 token = at / p.row, *slots = p.index + static_cast<u64>(r * p.tokens + token) * CHOICES;
        column = at - token * p.row;
        if constexpr (CHOICES % 4 == 0) {
#pragma unroll
            for (int j = 0; j < CHOICES; j += 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(slots + j);
                slot[j] = four.x, slot[j + 1] = four.y, slot[j + 2] = four.z, slot[j + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < CHOICES; ++j) slot[j] = slots[j];
        }
    }

    __device__ __forceinline__ void store(const Params& p, const uint4& v) const {
#pragma unroll
        for (int j = 0; j < CHOICES; ++j) {
            if (slot[j] < p.rows) weft::store_vector_once(p.out + static_cast<u64>(slot[j]) * p.row + column, v);
        }
    }
};

// HELD: vectors that a thread loads ahead.
template <int HELD>
struct Dispatch {
    static constexpr u32 SENDERS = 4;
    const Params& p;
    uint4 next[HELD];  // of x, and who needs it: loaded ahead
    u32 needed[HELD];
    u32 epochs = 0;  // whose vectors are sent
    bool cleared = false;

    __device__ __forceinline__ explicit Dispatch(const Params& params) : p(params) {}

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32 threads) {
        const u32 stride = gridDim.x * threads, lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if (s.at + k * stride < end) next[k] = weft::load_vector(p.given + s.at + k * stride);
        }
        if (epochs >= 2 && p.words != 0) weft::wait_for_previous();  // no slot is free before peers have routes, too
        if (epochs >= 2 || p.words == 0) {
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                if (s.at + k * stride < end) needed[k] = p.needed(RANK, s.at + k * stride);
            }
            return;
        }
        const u32 tokens = stride / p.row, columns = stride % p.row;  // from one vector to the next
        u32 expert[HELD], second[HELD], token = (s.at - lane) / p.row, column = (s.at - lane) % p.row;
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            expert[k] = p.chosen_by_lane(token);
            second[k] = column + lane >= p.row ? 16 : 0;
            token += tokens + (column + columns >= p.row);
            column += columns - (column + columns >= p.row ? p.row : 0);
        }
#pragma unroll
        for (int k = 0; k < HELD; ++k) needed[k] = p.peers_of(second[k], expert[k]);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        const weft::ExactEpoch exact{epoch, p.room};
        for (; s.at - threadIdx.x % 32 < end; load(s, end, threads)) {  // a warp's lanes load together
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                if (s.at + k * gridDim.x * threads >= end) break;
                const u32 index = s.index + k * threads;
#pragma unroll
                for (int i = 1; i < WORLD_SIZE; ++i) {
                    const int peer = weft::peer_of(i);
                    if (has(needed[k], peer) || index == 0) exact.send(peer, index, next[k]);
                }
            }
            s.skip(threads, HELD);
        }
        ++epochs;
    }

    // Own vectors, too.
    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        constexpr int MOST = COUNT * WORLD_SIZE, AHEAD = MOST * CHOICES <= 32 ? MOST : 2;  // as registers allow
        if (p.words != 0) weft::wait_for_previous();
        if (!cleared) clear(s.index, threads);
        cleared = true;
        const weft::ExactEpoch exact{epoch, p.room};
        const u32 stride = gridDim.x * threads;
        for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
            uint4 in[MOST];
            Sent<COUNT> sent;
            Places places[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) places[i].load(p, i % WORLD_SIZE, s.at + i / WORLD_SIZE * stride);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                in[k * WORLD_SIZE + RANK] = weft::load_vector(p.given + s.at + k * stride);
                sent.by[k] = s.index == 0 && k == 0 ? ~0u : 0;
#pragma unroll
                for (int src = 0; src < WORLD_SIZE; ++src) {
                    sent.by[k] |= (p.needed(src, s.at + k * stride) >> RANK & 1) << src;
                }
            }
            epoch.take_all<COUNT>(s.index, in, threads, sent);
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                const int src = i % WORLD_SIZE, k = i / WORLD_SIZE, more = i + AHEAD;
                if (sent(k, src)) {
                    if (src != RANK) in[i] = exact.corrected(src, s.index + k * threads, in[i]);
                    places[i % AHEAD].store(p, in[i]);
                }
                if (more < MOST) places[i % AHEAD].load(p, more % WORLD_SIZE, s.at + more / WORLD_SIZE * stride);
            }
        }
        if constexpr (COUNT > 1) receive<1>(epoch, s, end, threads);
    }

private:
    // By `threads` of a block: zeros into rows that fill experts' up, while data is under way. A warp looks at 32 rows at
    // once.
    __device__ __forceinline__ void clear(u32 thread, u32 threads) const {
        if (p.experts == 0) return;
        const u32 used = p.offs[p.experts - 1], lane = thread % 32;
        for (u32 first = (thread / 32 * gridDim.x + blockIdx.x) * 32; first < used; first += gridDim.x * threads) {
            const bool fills = first + lane < used && static_cast<const int*>(p.more)[first + lane] < 0;
            for (u32 left = __ballot_sync(~0u, fills); left != 0; left &= left - 1) {
                uint4* row = p.out + (static_cast<u64>(first) + __ffs(left) - 1) * p.row;
                for (u32 i = lane; i < p.row; i += 32) weft::store_vector(row + i, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

template <int HELD>
struct Combine {
    static constexpr u32 SENDERS = 2;
    const Params& p;
    const weft::Combine combine;
    uint4 next[WORLD_SIZE - 1][HELD];  // what this rank's rows of each peer's tokens add up to, loaded ahead

    __device__ __forceinline__ explicit Combine(const Params& params)
        : p(params), combine{p.given, p.index, p.more, nullptr, p.rows, WORLD_SIZE * p.tokens, 0, p.row} {}

    // What this rank's rows of rank r's tokens add up to, of vectors `stride` apart; zeros where it has none. All loads are
    // in flight at once.
    template <int COUNT>
    __device__ __forceinline__ void load_parts(uint4 (&parts)[COUNT], int r, u32 at, u32 end, u32 stride) const {
        using weft::Numbers;
        if (COUNT == 1 && !has(p.needed(r, at), RANK)) {
            parts[0] = make_uint4(0, 0, 0, 0);
            return;
        }
        u32 token[COUNT], column[COUNT];
        Numbers total[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const u32 v = at + k * stride < end ? at + k * stride : at;
            token[k] = v / p.row, column[k] = v - token[k] * p.row;
            total[k] = Numbers(make_uint4(0, 0, 0, 0));
        }
#pragma unroll
        for (int from = 0; from < CHOICES; from += combine.MOST) {
            weft::Combine::Chosen chosen[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) combine.find(chosen[k], r * p.tokens + token[k], from);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) combine.load(chosen[k], column[k]);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) combine.add(total[k], chosen[k]);
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) parts[k] = total[k].rounded();
    }

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32 threads) {
        if (s.at >= end) return;
        const u32 stride = gridDim.x * threads;
#pragma unroll
        for (int i = 1; i < WORLD_SIZE; ++i) {
            load_parts(next[i - 1], weft::peer_of(i), s.at, end, stride);
        }
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        for (; s.at < end; load(s, end, threads)) {
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                const u32 index = s.index + k * threads, at = s.at + k * gridDim.x * threads;
                if (at >= end) break;
#pragma unroll
                for (int i = 1; i < WORLD_SIZE; ++i) {
                    const int peer = weft::peer_of(i);
                    if (has(p.needed(peer, at), RANK) || index == 0) {
                        epoch.send(peer, index, weft::ll_encode(next[i - 1][k]));
                    }
                }
            }
            s.skip(threads, HELD);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        const u32 stride = gridDim.x * threads;
        for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
            uint4 in[COUNT * WORLD_SIZE], own[COUNT];
            Sent<COUNT> sent;
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) in[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                sent.by[k] = s.index == 0 && k == 0 ? ~0u : p.needed(RANK, s.at + k * stride);
            }
            load_parts(own, RANK, s.at, end, stride);
            epoch.take_all<COUNT>(s.index, in, threads, sent);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                const auto take = [&](int src) { return src == RANK ? own[k] : in[k * WORLD_SIZE + src]; };
                weft::store_vector(p.out + s.at + k * stride, weft::reduced<weft::reduce::sum>(take).rounded());
            }
        }
        if constexpr (COUNT > 1) receive<1>(epoch, s, end, threads);
    }
};

// A kernel that sends by ids is launched while the one that finds the routes still runs, and waits for it by itself.
template <class Steps>
__device__ __forceinline__ void at_once(const Params& p) {
    if (p.words == 0) weft::begin();
    Steps steps{p};
    weft::in_one_epoch(p.slots, p.vectors, steps);
}

template <class Steps>
__device__ __forceinline__ void by_rounds(const Params& p) {
    if (p.words == 0) weft::begin();
    Steps steps{p};
    weft::in_rounds_apart<AT_ONCE>(p.slots, p.vectors, p.room, steps);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) dispatch_one_shot(const __grid_constant__ Params p) {
    at_once<Dispatch<1>>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) dispatch_rounds(const __grid_constant__ Params p) {
    by_rounds<Dispatch<2 * AT_ONCE>>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) combine_one_shot(const __grid_constant__ Params p) {
    at_once<Combine<1>>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) combine_rounds(const __grid_constant__ Params p) {
    by_rounds<Combine<AT_ONCE>>(p);
}
