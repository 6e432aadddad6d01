// Exchanges of vectors between all ranks by the LL protocol (ll_protocol.cuh): no flag, no barrier. The all-reduces and
// the one-shot kernels for cuBLAS matmuls are built on it.
//
// Who writes: thread t of block b on rank r, slot (buffer, r, i) of block b on a peer. Who waits: thread t of block b
// on that peer, until no word of the slot is the sentinel; it then resets the slot. Relaxed, system scope. Epoch e of
// block b takes buffer e & 1 and is counted in EPOCH[b], in device memory: graph-safe.
// Who calls: all ranks, with equal grids in equal order, one kernel after the other; no block goes without a vector.
// Blocks need not be resident at once. docs/protocol.md#ll-exchange has the proof; credits.cuh is for several epochs in
// one launch.
//
// RANK is a compile-time constant: it costs no register and no branch.

#include "math/numbers.cuh"
#include "math/reduce.cuh"
#include "comm/ll_protocol.cuh"
#include "ptx/dependent.cuh"

#if !defined(WORLD_SIZE) || !defined(RANK)
#error "WORLD_SIZE, RANK: ranks of the group, 2 or more, and which of them this is"
#endif
#ifndef DTYPE
#error "DTYPE: float32, bfloat16 or float16"
#endif
#ifndef IN_TURN
#define IN_TURN 0  // 1: a thread sends all that it has to one peer before it sends to the next one
#endif

namespace weft {

using Number = DTYPE;

constexpr int WORDS = 4;  // of a vector
constexpr int ELEMENTS = WORDS * Number::PER_WORD;
constexpr bool FEW = WORLD_SIZE <= 8;  // a vector of each rank fits into a thread's registers

// A workspace of slots; the host's twin is `ExchangeSlots` in ll_exchange.py.
struct ExchangeSlots {
    WaitParams watch;
    u64 span;  // bytes from this rank's copy of an address to the next rank's
    u32 capacity;  // slots of a block, for each buffer and sender
    u32 epochs;  // index of EPOCH[0] in words
    u32 first;  // index of the first slot in words
    u32 emptied;  // index of EMPTIED[0][0] in words
};

// With DEPENDENT a kernel may start while the one before it in its stream still runs. It touches no memory before that
// one has ended, which gives the order that the proof needs, and lets the next one start as early.
__device__ __forceinline__ void begin() {
#if DEPENDENT
    begin_after_previous();
#endif
}

__device__ __forceinline__ u32& word(uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The i-th peer to send to, i from 1 on: no two ranks send to the same one at the same time.
__device__ __forceinline__ constexpr int peer_of(int i) { return (RANK + i) % WORLD_SIZE; }

// Of a receive: every peer sends.
struct All {
    __device__ __forceinline__ constexpr bool operator()(int, int) const { return true; }
};

// One epoch of a block's slots.
struct Epoch {
    const ExchangeSlots& s;
    u32 number;
    u32 mine;  // slot 0 of sender 0 in this epoch's buffer
    // A wait of this thread, or of an earlier kernel of the group, has expired. Nothing is sent then: a peer misses the
    // data and reports it, instead of taking a wrong number for a right one.
    mutable bool lost;
#if IN_TURN
    mutable int turn = 1;  // the one i of peer_of(i) that is sent to
#endif

    __device__ __forceinline__ explicit Epoch(const ExchangeSlots& slots) : s(slots), lost(is_broken(slots.watch)) {
        begin(load_relaxed(s.watch.words + s.epochs + blockIdx.x) + 1);
    }

    __device__ __forceinline__ void begin(u32 count) {
        number = count;
        mine = (2 * blockIdx.x + (number & 1)) * (WORLD_SIZE * s.capacity);
    }

    __device__ __forceinline__ uint4* place(int sender, u32 index) const {
        return reinterpret_cast<uint4*>(s.watch.words + s.first) + (mine + sender * s.capacity + index);
    }

    // What is sent now goes to peer_of(i) for i from first_peer() to end_peer() - 1: to all, or with IN_TURN to one.
#if IN_TURN
    __device__ __forceinline__ int first_peer() const { return turn; }
    __device__ __forceinline__ int end_peer() const { return turn + 1; }
#else
    __device__ __forceinline__ static constexpr int first_peer() { return 1; }
    __device__ __forceinline__ static constexpr int end_peer() { return WORLD_SIZE; }
#endif

    // After all is sent: whether the same has to be sent again, to the next peer. After the last one it is the first's
    // turn.
    __device__ __forceinline__ bool next_turn() const {
#if IN_TURN
        turn = turn % (WORLD_SIZE - 1) + 1;
        return turn > 1;
#else
        return false;
#endif
    }

    __device__ __forceinline__ void send(int peer, u32 index, const uint4& wire) const {
        if (lost) return;
        char* here = reinterpret_cast<char*>(place(RANK, index));
        store_payload(reinterpret_cast<uint4*>(here + static_cast<long long>(s.span) * (peer - RANK)), wire);
    }

    __device__ __forceinline__ void send_to_all(u32 index, const uint4& wire) const {
#pragma unroll(FEW ? 8 : 4)
        for (int i = first_peer(); i < end_peer(); ++i) send(peer_of(i), index, wire);
    }

    // After a failed poll for slot `index` of `sender`. True: go on without it.
    __device__ __forceinline__ bool expired(Deadline& deadline, int sender, u32 index) const {
        const u32 slot = s.first + (mine + sender * s.capacity + index) * WORDS;
        if (!deadline.overdue(s.watch, sender, slot, number, number - 1, WAIT_DATA)) return false;
        lost = true;
        return true;
    }

    // Receives slot `index` of one sender, and resets it.
    __device__ __forceinline__ uint4 take(int sender, u32 index) const {
        uint4 v = load_payload(place(sender, index));
        Deadline deadline;
        while (has_sentinel(v)) {
            if (deadline.should_poll() && expired(deadline, sender, index)) break;
            v = load_payload(place(sender, index));
        }
        // Data of a later epoch cannot come before these zeros: docs/protocol.md#ll-exchange.
        store_vector(place(sender, index), make_uint4(0, 0, 0, 0));
        return ll_decode(v);
    }

    // The same of every peer at once, from COUNT slots that lie `step` apart: in[k * WORLD_SIZE + sender], where what
    // stands for this rank stays, and for peers that have not sent the k-th (`sent(k, sender)`).
    template <int COUNT = 1, typename Sent = All>
    __device__ __forceinline__ void take_all(u32 index, uint4* in, u32 step = 0, const Sent& sent = {}) const {
        const auto each = [&](const auto& what) {
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
#pragma unroll
                for (int src = 0; src < WORLD_SIZE; ++src) {
                    if (src != RANK && sent(k, src)) what(in[k * WORLD_SIZE + src], src, index + k * step);
                }
            }
        };
        each([&](uint4& v, int src, u32 slot) { v = load_payload(place(src, slot)); });
        Deadline deadline;
        for (;;) {
            bool missing = false;
            each([&](const uint4& v, int, u32) { missing |= has_sentinel(v); });
            if (!missing) break;
            if (deadline.should_poll()) {
                int sender = RANK;
                u32 missed = index;
                each([&](const uint4& v, int src, u32 slot) {
                    if (has_sentinel(v)) sender = src, missed = slot;
                });
                if (expired(deadline, sender, missed)) break;
            }
            each([&](uint4& v, int src, u32 slot) { reload_payload(has_sentinel(v), place(src, slot), v); });
        }
        each([&](uint4& v, int src, u32 slot) {
            store_vector(place(src, slot), make_uint4(0, 0, 0, 0));
            v = ll_decode(v);
        });
    }

    // After the last thing that a thread of the block sends or takes.
    __device__ __forceinline__ void leave() const {
        __syncthreads();  // every thread has read the epoch
        if (threadIdx.x == 0) s.watch.words[s.epochs + blockIdx.x] = number;
    }
};

// A thread's vectors: `at` in the input, `index` among the block's slots. Warps' vectors go to the blocks round-robin,
// so that a small input is sent by many SMs.
struct ThreadShare {
    u32 at, index;

    __device__ __forceinline__ ThreadShare() {
        at = ((threadIdx.x / 32) * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
        index = threadIdx.x;
    }

    __device__ __forceinline__ ThreadShare(u32 at, u32 index) : at(at), index(index) {}

    __device__ __forceinline__ void next() { skip(blockDim.x); }

    // To the `count`-th next one, where so many threads of a block have vectors.
    __device__ __forceinline__ void skip(u32 threads, u32 count = 1) {
        at += count * gridDim.x * threads;
        index += count * threads;
    }
};

// One vector for every peer, in the order of peer_of; with many ranks, or in turn, each is loaded when it is sent.
// `load(peer, at)` returns it.
struct Parts {
    static constexpr bool AHEAD = FEW && !IN_TURN;
    uint4 of[AHEAD ? WORLD_SIZE : 1];

    template <typename Load>
    __device__ __forceinline__ void load_all(const Load& load, u32 at) {
        if constexpr (AHEAD) {
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) of[i] = load(peer_of(i), at);
        }
    }

    template <typename Load, typename Send>
    __device__ __forceinline__ void each(const Load& load, const Epoch& epoch, u32 at, const Send& send) const {
#pragma unroll(FEW ? 8 : 1)
        for (int i = epoch.first_peer(); i < epoch.end_peer(); ++i) {
            const int peer = peer_of(i);
            send(peer, AHEAD ? of[AHEAD ? i : 0] : load(peer, at));
        }
    }

    template <typename Load>
    __device__ __forceinline__ void send_all(const Load& load, const Epoch& epoch, const ThreadShare& s) const {
        each(load, epoch, s.at, [&](int peer, const uint4& v) { epoch.send(peer, s.index, ll_encode(v)); });
    }
};

// `store(src, v)` of every peer's vector in slot `index`.
template <typename Store>
__device__ __forceinline__ void store_all(const Epoch& epoch, u32 index, const Store& store) {
    if constexpr (FEW) {
        uint4 in[WORLD_SIZE];
        epoch.take_all(index, in);
#pragma unroll
        for (int src = 0; src < WORLD_SIZE; ++src) {
            if (src != RANK) store(src, in[src]);
        }
    } else {
#pragma unroll 1
        for (int i = 1; i < WORLD_SIZE; ++i) {
            const int src = peer_of(i);
            store(src, epoch.take(src, index));
        }
    }
}

// A vector's numbers in float32.
struct Numbers {
    float of[ELEMENTS];

    Numbers() = default;

    __device__ __forceinline__ explicit Numbers(uint4 v) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            float pair[Number::PER_WORD];
            Number::unpack(word(v, i), pair);
#pragma unroll
            for (int k = 0; k < Number::PER_WORD; ++k) of[i * Number::PER_WORD + k] = pair[k];
        }
    }

    __device__ __forceinline__ uint4 rounded() const {
        uint4 v;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word(v, i) = Number::pack(of + i * Number::PER_WORD);
        return v;
    }
};

// The reduction of all ranks' vectors, in rank order; `take(src)` returns that of a rank.
template <typename Reduce, typename Take>
__device__ __forceinline__ Numbers reduced(const Take& take) {
    Numbers total(take(0));
#pragma unroll(FEW ? 8 : 1)
    for (int src = 1; src < WORLD_SIZE; ++src) {
        const Numbers next(take(src));
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) total.of[i] = Reduce::combine(total.of[i], next.of[i]);
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) total.of[i] = Reduce::finish(total.of[i], WORLD_SIZE);
    return total;
}

// The same of this rank's `own` and of what the peers send to slot `index`.
template <typename Reduce>
__device__ __forceinline__ Numbers take_reduced(const Epoch& epoch, u32 index, const uint4& own) {
    if constexpr (FEW) {
        uint4 in[WORLD_SIZE];
        in[RANK] = own;
        epoch.take_all(index, in);
        return reduced<Reduce>([&](int src) { return in[src]; });
    } else {
        return reduced<Reduce>([&](int src) { return src == RANK ? own : epoch.take(src, index); });
    }
}

}  // namespace weft
