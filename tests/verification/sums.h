// What products of warpgroups end with. For bfloat16.h and float8.h.

#pragma once

#include "fibers.h"

namespace weft {

using Floats = float __attribute__((vector_size(64)));
using Words = u32 __attribute__((vector_size(64)));

// The sum of each of four, at 0, 4, 8 and 12.
static Floats sums(Floats a, Floats b, Floats c, Floats d) {
    const Words low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const Floats ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 8);
    const Floats cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, low + 8);
    const Words quarters = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    Floats all = __builtin_shuffle(ab, cd, quarters) + __builtin_shuffle(ab, cd, quarters + 4);
    const Words place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    all += __builtin_shuffle(all, place ^ 2);
    return all + __builtin_shuffle(all, place ^ 1);
}

}  // namespace weft
