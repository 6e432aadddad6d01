// Tokens to the ranks of their experts, and back; of each token [row] once to, and from, each rank that has one of them.
//
// dispatch: out[slots[r * T + t][j]] = token t of rank r, for each choice j that is this rank's; rows of no choice are
// zeros. combine: out[t] = the sum over ranks r, in their order in float32, of what r's rows of the token add up to
// with their weights (collective/combine.cuh), rounded once.
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
    const uint4* given;  // x [T, row], or y [C, row]
    const u32* index;  // [W * T, CHOICES]: the row of each choice
    const void* more;  // choices [C], -1 where a row has none; or weights [W * T, CHOICES]
    const u32* ranks;  // [W * T]: bit r says that rank r has an expert of the token
    uint4* out;  // [C, row], or [T, row]
    u32 vectors;  // of a rank's tokens
    u32 room;  // slots of a sender in one epoch, that data takes
    u32 row;  // vectors of a token
    u32 tokens;  // T
    u32 rows;  // C

    // Which ranks have an expert of rank r's token whose vector `at` is.
    __device__ __forceinline__ u32 needed(int r, u32 at) const { return ranks[r * tokens + at / row]; }
};

__device__ __forceinline__ bool has(u32 ranks, int rank) { return ranks >> rank & 1; }

// What each peer has sent, of COUNT vectors.
template <int COUNT>
struct Sent {
    u32 by[COUNT];

    __device__ __forceinline__ bool operator()(int k, int src) const { return has(by[k], src); }
};

struct Dispatch {
    static constexpr u32 TRIPS = 1;
    const Params& p;
    uint4 next;  // of x, loaded ahead
    u32 cleared = 0;  // rows, by all blocks

    __device__ __forceinline__ explicit Dispatch(const Params& params) : p(params) {}

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) next = weft::load_vector(p.given + s.at);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        const weft::ExactEpoch exact{epoch, p.room};
        while (s.at < end) {
            const u32 needed = p.needed(RANK, s.at);
#pragma unroll
            for (int i = 1; i < WORLD_SIZE; ++i) {
                const int peer = weft::peer_of(i);
                if (has(needed, peer) || s.index == 0) exact.send(peer, s.index, next);
            }
            store(RANK, s.at, next);
            s.skip(threads);
            load(s, end, threads);
        }
        clear(end, threads);
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        const weft::ExactEpoch exact{epoch, p.room};
        const u32 stride = gridDim.x * threads;
        for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
            uint4 in[COUNT * WORLD_SIZE];
            Sent<COUNT> sent;
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                sent.by[k] = s.index == 0 && k == 0 ? ~0u : 0;
#pragma unroll
                for (int src = 0; src < WORLD_SIZE; ++src) {
                    if (src != RANK) sent.by[k] |= (p.needed(src, s.at + k * stride) >> RANK & 1) << src;
                }
            }
            epoch.take_all<COUNT>(s.index, in, threads, sent);
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) {
                const int src = i % WORLD_SIZE, k = i / WORLD_SIZE;
                if (src == RANK || !sent(k, src)) continue;
                store(src, s.at + k * stride, exact.corrected(src, s.index + k * threads, in[i]));
            }
        }
        if constexpr (COUNT > 1) receive<1>(epoch, s, end, threads);
    }

private:
    // Vector `at` of rank r's tokens, to the rows of its choices here.
    __device__ __forceinline__ void store(int r, u32 at, const uint4& v) const {
        const u32 token = at / p.row, column = at - token * p.row;
        const u32* slots = p.index + static_cast<u64>(r * p.tokens + token) * CHOICES;
#pragma unroll
        for (int j = 0; j < CHOICES; ++j) {
            const u32 slot = slots[j];
            if (slot < p.rows) weft::store_vector(p.out + static_cast<u64>(slot) * p.row + column, v);
        }
    }

    // Zeros into rows of no choice, a share of them with each chunk, while data is under way.
    __device__ __forceinline__ void clear(u32 end, u32 threads) {
        const u32 until = static_cast<u32>(static_cast<u64>(p.rows) * end / p.vectors), warps = threads / 32;
        for (u32 r = cleared + blockIdx.x * warps + threadIdx.x / 32; r < until; r += gridDim.x * warps) {
            if (static_cast<const int*>(p.more)[r] >= 0) continue;
            for (u32 i = threadIdx.x % 32; i < p.row; i += 32) {
                weft::store_vector(p.out + static_cast<u64>(r) * p.row + i, make_uint4(0, 0, 0, 0));
            }
        }
        cleared = until;
    }
};

struct Combine {
    static constexpr u32 TRIPS = 1;
    const Params& p;
    const weft::Combine combine;
    weft::Parts next;  // loaded ahead

    __device__ __forceinline__ explicit Combine(const Params& params)
        : p(params), combine{p.given, p.index, p.more, nullptr, p.rows, WORLD_SIZE * p.tokens, 0, p.row} {}

    // What this rank's rows of a rank's token add up to; zeros where it has none.
    __device__ __forceinline__ uint4 load_part(int r, u32 at) const {
        if (!has(p.needed(r, at), RANK)) return make_uint4(0, 0, 0, 0);
        const u32 token = at / p.row;
        return combine.load(r * p.tokens + token, at - token * p.row);
    }

    __device__ __forceinline__ void load(const ThreadShare& s, u32 end, u32) {
        if (s.at < end) next.load_all([&](int r, u32 at) { return load_part(r, at); }, s.at);
    }

    __device__ __forceinline__ void send(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) {
        while (s.at < end) {
            next.each([&](int r, u32 at) { return load_part(r, at); }, s.at, [&](int peer, const uint4& v) {
                if (has(p.needed(peer, s.at), RANK) || s.index == 0) epoch.send(peer, s.index, weft::ll_encode(v));
            });
            s.skip(threads);
            load(s, end, threads);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void receive(const Epoch& epoch, ThreadShare s, u32 end, u32 threads) const {
        const u32 stride = gridDim.x * threads;
        for (; s.at + (COUNT - 1) * stride < end; s.skip(threads, COUNT)) {
            uint4 in[COUNT * WORLD_SIZE];
            Sent<COUNT> sent;
#pragma unroll
            for (int i = 0; i < COUNT * WORLD_SIZE; ++i) in[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                sent.by[k] = s.index == 0 && k == 0 ? ~0u : p.needed(RANK, s.at + k * stride);
                in[k * WORLD_SIZE + RANK] = load_part(RANK, s.at + k * stride);
            }
            epoch.take_all<COUNT>(s.index, in, threads, sent);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                const auto take = [&](int src) { return in[k * WORLD_SIZE + src]; };
                weft::store_vector(p.out + s.at + k * stride, weft::reduced<weft::reduce::sum>(take).rounded());
            }
        }
        if constexpr (COUNT > 1) receive<1>(epoch, s, end, threads);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) dispatch_one_shot(const __grid_constant__ Params p) {
    weft::one_epoch_of<Dispatch>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) dispatch_rounds(const __grid_constant__ Params p) {
    weft::rounds_of<Dispatch, AT_ONCE>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) combine_one_shot(const __grid_constant__ Params p) {
    weft::one_epoch_of<Combine>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) combine_rounds(const __grid_constant__ Params p) {
    weft::rounds_of<Combine, AT_ONCE>(p);
}
