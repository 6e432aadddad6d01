// Tensor memory and its products, as plain arithmetic, for matmuls.cpp: what kernels use of blackwell.cuh. Descriptors are
// read as the PTX manual's tables have them, not as sm100/descriptors.cuh writes them. Products are done late, one after
// the other. Loads arrive when they are waited for. What the hardware would not take counts as a stray access.

#pragma once

#include "matmuls.h"

#include <deque>

namespace weft {

constexpr int LANES = 128, TENSOR_WIDTH = 512;

struct TensorMemory {
    std::vector<float> numbers;
    std::deque<std::function<void()>> products;
    u32 first = 0, end = 0;  // columns that are allocated
};
static std::map<std::pair<int, unsigned>, TensorMemory> tensor_memories;
static TensorMemory& tensor_memory() { return tensor_memories[{current->number, running->block}]; }

struct TensorLoad {
    u32 address;
    float* to;
};
static std::map<std::pair<int, unsigned>, std::vector<TensorLoad>> tensor_loads;  // of each fiber

static void check(bool holds) { strays += !holds; }

template <int COLUMNS>
static void allocate_tensor_memory(u32* address) {
    together();
    if (running->thread % 32 != 0) return;
    check(COLUMNS >= 32 && (COLUMNS & (COLUMNS - 1)) == 0 && COLUMNS <= TENSOR_WIDTH);
    TensorMemory& memory = tensor_memory();
    memory.numbers.assign(LANES * TENSOR_WIDTH, NAN);
    memory.first = *address = TENSOR_WIDTH - COLUMNS;
    memory.end = TENSOR_WIDTH;
}
template <int COLUMNS>
static void free_tensor_memory(u32 address) {
    together();
    if (running->thread % 32 != 0) return;
    TensorMemory& memory = tensor_memory();
    check(address == memory.first && memory.end - memory.first == COLUMNS && memory.products.empty());
    memory.end = memory.first;
}

static void order_before_sync() {}
static void order_after_sync() {}

// Of 16 k, and as many rows of A or columns of B as there are.
struct TensorOperand {
    const char* start;
    u64 leading, stride;

    TensorOperand(u64 bits, const char* shared)
        : start(shared + (((bits & 0x3fff) * 16 - reinterpret_cast<u64>(shared)) & 0x3ffff)),
          leading((bits >> 16 & 0x3fff) * 16), stride((bits >> 32 & 0x3fff) * 16) {
        check((bits >> 46 & 7) == 1 && (bits >> 49 & 0xfff) == 0 && bits >> 61 == 2);  // a constant, no offset, 128 bytes
        check(start >= shared && start < shared + SHARED);
    }
    float at(int row, int k, bool k_contiguous) const {
        const char* place = k_contiguous ? start + row / 8 * stride + row % 8 * 128 + k * 2
                                         : start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128;
        u16 bits;
        std::memcpy(&bits, place, sizeof bits);
        const u32 word = u32{bits} << 16;  // bfloat16
        float number;
        std::memcpy(&number, &word, sizeof number);
        return number;
    }
};

// Puts it behind those that this block has issued before.
static void issue_late(std::function<void()> work) {
    TensorMemory& memory = tensor_memory();
    memory.products.push_back(std::move(work));
    state().copies.push_back({running->block, [&memory] {
                                  const auto next = std::move(memory.products.front());
                                  memory.products.pop_front();
                                  next();
                              }});
    go_on_later();
}

static void multiply_in_tensor_memory(u32 d, u64 a, u64 b, u32 instruction, int add) {
    const int n = (instruction >> 17 & 63) * 8, m = (instruction >> 24 & 31) * 16;
    const bool b_k_contiguous = !(instruction >> 16 & 1);
    check((instruction & 0xffff) == (1 << 4 | 1 << 7 | 1 << 10));  // bfloat16 and bfloat16 to float32, A's K contiguous
    TensorMemory& memory = tensor_memory();
    check(m == LANES && d >= memory.first && d + n <= memory.end);
    const char* shared = reinterpret_cast<const char*>(shared_base());
    const TensorOperand left(a, shared), right(b, shared);
    issue_late([=, &memory] {
        std::vector<float> as(m * 16), bs(16 * n);
        for (int i = 0; i < m; ++i)
            for (int k = 0; k < 16; ++k) as[i * 16 + k] = left.at(i, k, true);
        for (int j = 0; j < n; ++j)
            for (int k = 0; k < 16; ++k) bs[k * n + j] = right.at(j, k, b_k_contiguous);
        for (int i = 0; i < m; ++i) {
            float* sums = memory.numbers.data() + i * TENSOR_WIDTH + d;
            if (!add) std::fill_n(sums, n, 0.f);
            for (int k = 0; k < 16; ++k)
                for (int j = 0; j < n; ++j) sums[j] += as[i * 16 + k] * bs[k * n + j];
        }
    });
}

static void arrive_late(u64* barrier) {
    --phases(barrier).pending;
    phases(barrier).settle();
}
static void arrive_after_products(u64* barrier) {
    issue_late([=] { arrive_late(barrier); });
}
static void arrive_after_products_at_both(u64* barrier) {
    u64* barriers[] = {in_block(barrier, 0), in_block(barrier, 1)};
    issue_late([=] {
        for (u64* each : barriers) arrive_late(each);
    });
}

static void load_from_tensor_memory(u32 address, float* v) {
    std::fill_n(v, 16, NAN);
    tensor_loads[{current->number, running->number}].push_back({address, v});
}
template <int N>
static void tensor_loads_done(float (&v)[N]) {
    together();
    for (unsigned turns = dice.below(8); turns != 0; --turns) go_on_later();
    const TensorMemory& memory = tensor_memory();
    for (const TensorLoad& load : tensor_loads[{current->number, running->number}]) {
        const u32 lane = load.address >> 16, column = load.address & 0xffff;
        check(lane == running->thread % 128 / 32 * 32);  // a warp reaches those of its place in its warpgroup
        check(column >= memory.first && column + 16 <= memory.end && load.to >= v && load.to + 16 <= v + N);
        std::copy_n(memory.numbers.data() + (lane + running->thread % 32) * TENSOR_WIDTH + column, 16, load.to);
    }
    tensor_loads[{current->number, running->number}].clear();
}

}  // namespace weft
