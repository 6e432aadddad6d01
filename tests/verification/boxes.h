// Boxes of tensor maps, element by element.

#pragma once

#include "fibers.h"

namespace weft {

// As matmuls.py encodes it, the innermost dimension first; strides in elements.
struct alignas(64) TensorMap {
    u64 address, extents[4], strides[4], box[4], unused[3];
};

// `each` gets the elements of a box in the order in which they lie in shared memory: inside of the tensor, or null.
template <typename Each>
static void each_of_box(const TensorMap& map, const int (&first)[4], const Each& each) {
    u16* tensor = reinterpret_cast<u16*>(map.address);
    u64 i[4];
    for (i[3] = first[3]; i[3] < first[3] + map.box[3]; ++i[3])
        for (i[2] = first[2]; i[2] < first[2] + map.box[2]; ++i[2])
            for (i[1] = first[1]; i[1] < first[1] + map.box[1]; ++i[1])
                for (i[0] = first[0]; i[0] < first[0] + map.box[0]; ++i[0]) {
                    bool inside = true;
                    u64 at = 0;
                    for (int d = 0; d < 4; ++d) {
                        inside = inside && i[d] < map.extents[d];
                        at += i[d] * map.strides[d];
                    }
                    each(inside ? tensor + at : nullptr);
                }
}

}  // namespace weft
