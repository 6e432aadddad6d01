"""The kernels whose sums are in tensor memory: compiled for sm_100a and sm_103a, and how their operands are described.

None was ever run. What their threads do with tiles is in tests/verification/test_tensor_memory_protocols.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import test_gemm_compile
from cubins import KERNELS, compiled, disassembled, usage
from weft.kernels.device.gemm.gemm_tiles import tiles_of
from weft.kernels.device.jit.program import Program

ARCHS = ("sm_100a", "sm_103a")
TILES = {(tile.block_m, tile.block_n) for tile in tiles_of(True)}
PROGRAMS = {
    name: program
    for name, program in test_gemm_compile.PROGRAMS.items()
    if (program.defines["BM"], program.defines["BN"]) in TILES and not name.endswith("racecheck")
}
#: In every run these, some of each file; with -m slow all.
SOME = ("all_gather_matmul-rows", "all_gather_matmul-returned-128x192", "matmul_reduce_scatter-columns-2")
SOME += ("matmul_reduce_scatter-float32", "matmul_reduce_scatter-to-all-4", "grouped_matmul-128x128")
BUILDS = [
    pytest.param(name, arch, marks=() if name in SOME else pytest.mark.slow)
    for name in PROGRAMS
    for arch in ARCHS
]
_FEW = 16  # bytes of stack, in the epilogue that adds the widest tiles' parts
# Bits from the first one on, by the tables of the PTX manual: of the descriptor of an operand in shared memory,
# and of an instruction of kind f16.
OPERAND = {0: 14, 14: 2, 16: 14, 30: 2, 32: 14, 46: 3, 49: 3, 52: 1, 53: 8, 61: 3}
INSTRUCTION = {
    0: 2,
    2: 1,
    3: 1,
    4: 2,
    6: 1,
    7: 3,
    10: 3,
    13: 1,
    14: 1,
    15: 1,
    16: 1,
    17: 6,
    23: 1,
    24: 5,
    29: 1,
    30: 2,
}
PROGRAM = """
#include <cstdint>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using u32 = uint32_t;
using u64 = uint64_t;
#include "descriptors.cuh"
int main() {
    for (u32 address = 1024; address < 232448; address += 50032) {
        std::printf("operand %u %llu\\n", address, (unsigned long long)weft::operand_descriptor(address, 4096, 1024));
    }
    for (int i = 0; i < 4; ++i) {
        std::printf("instruction %d %u\\n", i, weft::instruction_descriptor(128, 192, i % 2, i / 2));
    }
}
"""


def built(name: str, arch: str) -> Program:
    return Program(PROGRAMS[name].path, arch, PROGRAMS[name].defines)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            compiled(built(item.callspec.params["name"], item.callspec.params["arch"]))


@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_registers_spills_and_products(name: str, arch: str, tmp_path: Path) -> None:
    program = built(name, arch)
    ((kernel, numbers),) = usage(program, tmp_path)
    assert kernel == name.split("-")[0]
    print(f"{name} for {arch}: {numbers}")
    # A block of 512 threads; its warpgroups trade registers when it runs.
    assert numbers["REG"] <= 65536 // 512 and numbers["LOCAL"] == 0
    spills = kernel == "matmul_reduce_scatter" and program.defines["BN"] == 256
    assert numbers["STACK"] <= (_FEW if spills else 0), f"{name} spills or indexes an array: {numbers}"
    if arch != ARCHS[0]:  # triton's disassembler knows no later one
        return
    code = disassembled(program, tmp_path)
    assert len(re.findall(r"UTCHMMA gdesc", code)) == 4, "a stage's products, in one loop"
    issued = code[code.index("UTCHMMA") : code.rindex("UTCBAR")]
    assert not re.search(r"STL|LDL|LDTM|WARPSYNC", issued), "nothing between products but descriptors"
    assert len(re.findall(r"LDTM\.x16", code)) == PROGRAMS[name].defines["BN"] // 32
    assert "MULTIMEM" not in code.upper() and "HGMMA" not in code


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, int]]:
    """What descriptors.cuh makes of addresses, and of instructions."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("descriptors")
    (folder / "main.cpp").write_text(PROGRAM)
    header = KERNELS / "device" / "gemm" / "sm100"
    subprocess.run(["g++", "-std=c++17", f"-I{header}", "-o", "main", "main.cpp"], cwd=folder, check=True)
    found: dict[str, dict[int, int]] = {"operand": {}, "instruction": {}}
    for line in subprocess.run(
        [folder / "main"], check=True, capture_output=True, text=True
    ).stdout.splitlines():
        kind, of, bits = line.split()
        found[kind][int(of)] = int(bits)
    return found


def test_operands_by_the_table_of_the_manual(described: dict[str, dict[int, int]]) -> None:
    for address, bits in described["operand"].items():
        fields = {first: bits >> first & (1 << width) - 1 for first, width in OPERAND.items()}
        want = {
            0: address >> 4,
            14: 0,
            16: 4096 >> 4,
            30: 0,
            32: 1024 >> 4,
            46: 1,
            49: 0,
            52: 0,
            53: 0,
            61: 2,
        }
        assert fields == want and sum(OPERAND.values()) == 64


def test_instructions_by_the_table_of_the_manual(described: dict[str, dict[int, int]]) -> None:
    for kind, bits in described["instruction"].items():
        fields = {first: bits >> first & (1 << width) - 1 for first, width in INSTRUCTION.items()}
        is_bfloat16, n_contiguous = kind % 2, kind // 2
        want = dict.fromkeys(INSTRUCTION, 0)
        want |= {4: 1, 7: is_bfloat16, 10: is_bfloat16, 16: n_contiguous, 17: 192 // 8, 24: 128 // 16}
        assert fields == want and sum(INSTRUCTION.values()) == 32


def written_by_tma(row: int, byte: int) -> int:
    """Where a box of rows of 128 bytes has a byte, with the 128-byte swizzle: 16-byte units of a row trade places."""
    return row * 128 + ((byte // 16) ^ (row % 8)) * 16 + byte % 16


def read_by_products(start: int, far: int, near: int, byte: int) -> int:
    """Where tcgen05.mma looks for a byte of a row of 128: the address without a swizzle, whose bits 4 to 6 are changed
    by bits 7 to 9. ``far`` and ``near``: groups of 8 rows, a row in a group."""
    address = start + far * 1024 + near * 128 + byte
    return address ^ (address >> 7 & 7) << 4


def test_products_look_where_tma_has_written() -> None:
    """Of a stage at a multiple of 1024, for each of its four steps of 16 k."""
    for step in range(4):
        for row in range(128):  # K contiguous: 16 k are 32 bytes of a row
            for k in range(16):
                at = read_by_products(step * 32, row // 8, row % 8, 2 * k)
                assert at == written_by_tma(row, 2 * (16 * step + k))
        half, inside = divmod(step, 2)  # N contiguous: halves of 32 k, each of groups of 64 columns
        for column in range(256):
            for k in range(16):
                start = half * 4 * 4096 + inside * 2048 + column // 64 * 4096
                at = read_by_products(start, k // 8, k % 8, 2 * (column % 64))
                box = half * 4 * 4096 + column // 64 * 4096
                assert at == box + written_by_tma(16 * inside + k, 2 * (column % 64))
