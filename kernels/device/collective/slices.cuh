// Contiguous tensors [rows, parts, row] in bytes, of which each rank has a part [rows, row]: the dimension before
// `row` is gathered or scattered. A part is seen as vectors of 16 bytes, one row after the other, as it travels.

#pragma once

#include "ptx/sync.cuh"

namespace weft {

// The host's twin is `Slices` in launch.py.
struct Slices {
    char* first;
    u32 row;  // bytes of a row of a part
    u32 bytes;  // of a part, all its rows
    u32 parts;
    u32 unit;  // bytes at once where a vector is not whole, 1, 2 or 4: it divides `row` and the address
};

// The vector `at` of each part, less what is after the part's end. WHOLE: `first` and `row` are multiples of 16.
template <bool WHOLE>
struct SliceVector {
    const Slices& s;
    u32 start, row = 0, column;

    __device__ __forceinline__ SliceVector(const Slices& slices, u32 at) : s(slices), start(at * 16), column(start) {
        if (s.row == s.bytes) return;
        row = start / s.row;
        column = start - row * s.row;
    }

    // Bytes from the first part's first row.
    __device__ __forceinline__ u64 offset(int part) const {
        return (static_cast<u64>(row) * s.parts + part) * s.row + column;
    }

    __device__ __forceinline__ uint4 load(int part) const {
        char* at = place(part);
        if (WHOLE || is_whole(at)) return load_vector(reinterpret_cast<const uint4*>(at));
        uint4 v;
        u32 there = column;
        v.x = load_word(at, there, 0);
        v.y = load_word(at, there, 4);
        v.z = load_word(at, there, 8);
        v.w = load_word(at, there, 12);
        return v;
    }

    __device__ __forceinline__ void store(int part, const uint4& v) const {
        char* at = place(part);
        if (WHOLE || is_whole(at)) {
            store_vector(reinterpret_cast<uint4*>(at), v);
            return;
        }
        u32 there = column;
        store_word(at, there, 0, v.x);
        store_word(at, there, 4, v.y);
        store_word(at, there, 8, v.z);
        store_word(at, there, 12, v.w);
    }

private:
    __device__ __forceinline__ char* place(int part) const { return s.first + offset(part); }

    __device__ __forceinline__ bool is_whole(const char* at) const {
        return column + 16 <= s.row && reinterpret_cast<u64>(at) % 16 == 0;
    }

    // Of the word that begins `from` bytes into the vector, `what(byte)` of each unit before the part's end.
    template <typename What>
    __device__ __forceinline__ void each_unit(char*& at, u32& there, u32 from, const What& what) const {
        for (u32 byte = 0; byte < 4 && start + from + byte < s.bytes; byte += s.unit) {
            if (there == s.row) {
                there = 0;
                at += static_cast<u64>(s.parts - 1) * s.row;
            }
            what(8 * byte);
            there += s.unit;
            at += s.unit;
        }
    }

    __device__ __forceinline__ u32 load_word(char*& at, u32& there, u32 from) const {
        u32 word = 0;
        each_unit(at, there, from, [&](u32 shift) {
            const u32 bits = s.unit == 4   ? *reinterpret_cast<const u32*>(at)
                             : s.unit == 2 ? *reinterpret_cast<const u16*>(at)
                                           : *reinterpret_cast<const unsigned char*>(at);
            word |= bits << shift;
        });
        return word;
    }

    __device__ __forceinline__ void store_word(char*& at, u32& there, u32 from, u32 word) const {
        each_unit(at, there, from, [&](u32 shift) {
            const u32 bits = word >> shift;
            if (s.unit == 4) {
                *reinterpret_cast<u32*>(at) = bits;
            } else if (s.unit == 2) {
                *reinterpret_cast<u16*>(at) = static_cast<u16>(bits);
            } else {
                *reinterpret_cast<unsigned char*>(at) = static_cast<unsigned char>(bits);
            }
        });
    }
};

}  // namespace weft
