"""Every .cu compiled for sm_90a: registers, spills, and what the machine code holds. No GPU is needed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import test_gemm_compile
import torch
from cubins import ARGUMENTS, KERNELS, compile_ahead, disassembled, names_of, usage
from weft.kernels.all_gather import cuda_kernel as all_gather_kernel
from weft.kernels.all_gather_matmul import one_shot_kernel as gather
from weft.kernels.all_reduce import cuda_kernel
from weft.kernels.all_reduce_rms_norm import cuda_kernel as norm_kernel
from weft.kernels.all_reduce_rms_norm.configs import CLUSTERS, most_per_thread
from weft.kernels.all_reduce_rms_norm.quant import QuantKind
from weft.kernels.all_reduce_rms_norm.reference import NormKind
from weft.kernels.all_to_all import cuda_kernel as all_to_all_kernel
from weft.kernels.async_collectives import cuda_kernel as async_kernel
from weft.kernels.device.collective.combine import CombineShape
from weft.kernels.device.collective.launch import CollectiveParams
from weft.kernels.device.comm import acquire
from weft.kernels.device.comm.ll_exchange import exchange_program, in_turn
from weft.kernels.device.jit.program import Program
from weft.kernels.float8_cast import cuda_kernel as float8_cast
from weft.kernels.grouped_matmul import take_rows
from weft.kernels.matmul_all_reduce import configs as few_rows_configs
from weft.kernels.matmul_all_reduce import cuda_kernel as few_rows
from weft.kernels.matmul_reduce_scatter import one_shot_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue
from weft.kernels.moe_dispatch import cuda_kernel as moe_kernel
from weft.kernels.moe_route import cuda_kernel as moe_route
from weft.kernels.reduce_scatter import cuda_kernel as reduce_scatter_kernel
from weft.kernels.transfer import cuda_kernel as transfer

DTYPES = ("float32", "bfloat16", "float16")
TORCH = {name: dtype for dtype, name in cuda_kernel.DTYPES.items()}
# From nine ranks on, the code is another.
ALL_REDUCE = [(2, "float32", "sum"), (4, "bfloat16", "sum"), (8, "float16", "sum"), (8, "float32", "sum")]
ALL_REDUCE += [(3, "float32", "avg"), (4, "bfloat16", "max"), (4, "float16", "min"), (9, "bfloat16", "sum")]
# The widest rows that fit into registers, in clusters of all sizes.
NORM = [
    (size, "bfloat16", cluster, most_per_thread(size))
    for size, cluster in [(2, 1), *((4, cluster) for cluster in CLUSTERS), (8, 8)]
]
NORM += [(4, "float32", 8, 1)]
EPS = 1e-6
USUAL = NormKind(EPS)
NORM_KINDS = {
    "unrounded": NormKind(EPS, round_sum=False),
    "gemma": NormKind(EPS, 1.0, wide_weight=True),
    "all": NormKind(EPS, 1.0, round_sum=False, wide_weight=True),
    "alone": NormKind(EPS, residual=False, wide_weight=True),
    "layer": NormKind(EPS, subtract_mean=True, bias=True),
    "layer-wide": NormKind(EPS, 1.0, wide_weight=True, subtract_mean=True, bias=True),
    "layer-bare": NormKind(EPS, residual=False, subtract_mean=True, weight=False),
    "static": NormKind(EPS, quant=QuantKind(torch.float8_e4m3fn, "reciprocal")),
    "static-all": NormKind(
        EPS, 1.0, round_sum=False, wide_weight=True, quant=QuantKind(torch.float8_e4m3fn, "divide")
    ),
    "rows": NormKind(EPS, quant=QuantKind(torch.float8_e4m3fn, "reciprocal", EPS)),
    "rows-divided": NormKind(EPS, residual=False, quant=QuantKind(torch.float8_e4m3fn, "divide", EPS)),
    "rows-all": NormKind(
        EPS, 1.0, round_sum=False, wide_weight=True, quant=QuantKind(torch.float8_e5m2, "multiply", EPS)
    ),
}
# Choices, whether their weights are float32, and whether there is a shared expert.
CHOICES = [
    (2, "bfloat16", (8, True, True)),
    (4, "float16", (2, False, False)),
    (8, "float32", (1, False, True)),
]
CHOICES += [(9, "bfloat16", (10, False, True))]
ONE_SHOT = (2, 3, 4, 8, 9)
FEW_ROWS = [
    (size, dtype, reduce_op, n, b_rows)
    for size, dtype, reduce_op, n in [
        (2, "bfloat16", "sum", 4096),
        (4, "bfloat16", "sum", 8192),
        (8, "float16", "avg", 8192),
        (9, "bfloat16", "sum", 4096),
    ]
    for b_rows in (True, False)
]
EPILOGUES = {
    "rounded": (torch.float16, Epilogue(torch.float16)),
    "terms": (torch.bfloat16, Epilogue(torch.bfloat16, average=True, bias=True, residual=True)),
    "float32": (torch.bfloat16, Epilogue(torch.float32, bias=True, residual=True)),
    "sent-float32": (torch.float32, Epilogue(torch.float32, average=True)),
}


def early(program: Program) -> Program:
    """The same with WEFT_PDL=1."""
    return Program(program.path, defines=program.defines | {"DEPENDENT": 1})


def few_rows_program(size: int, dtype: str, reduce_op: str, n: int, b_rows: bool) -> Program:
    config = few_rows_configs.choose_matmul_all_reduce(16, n, 132)
    assert config is not None
    b = torch.empty(8, 16, dtype=TORCH[dtype])
    return few_rows.few_rows_program(b, b if b_rows else b.t(), reduce_op, config, (size, size - 1))


def norm_program(size: int, dtype: torch.dtype, share: tuple[int, int], kind: NormKind = USUAL) -> Program:
    return exchange_program(norm_kernel.SOURCE, 1, norm_kernel.norm_defines(size, dtype, share, kind))


PROGRAMS: dict[str, Program] = {
    "acquire": Program(KERNELS / "device" / "comm" / "acquire.cu"),
    **{f"async-{size}": async_kernel.async_program(size) for size in (2, 3, 8)},
    "transfer": Program(KERNELS / "transfer" / "kernel.cu"),
    "take": take_rows.PROGRAM,
    **{
        f"cast-{dtype}-{to}": float8_cast.cast_program(dtype, to)
        for dtype in TORCH.values()
        for to in (torch.float8_e4m3fn, torch.float8_e5m2)
    },
    **{f"route-{dtype}": moe_route.route_program(dtype) for dtype in (torch.int32, torch.int64)},
    **{
        f"dispatch_route-{size}-{dtype}": moe_route.dispatch_route_program(size, size - 1, dtype)
        for size, dtype in ((2, torch.int64), (8, torch.int32))
    },
    **{
        f"all_reduce-{size}-{dtype}-{reduce_op}": cuda_kernel.all_reduce_program(
            size, size - 1, TORCH[dtype], reduce_op
        )
        for size, dtype, reduce_op in ALL_REDUCE
    },
    **{
        f"norm-{size}-{dtype}-{cluster}-{held}": norm_program(size, TORCH[dtype], (cluster, held))
        for size, dtype, cluster, held in NORM
    },
    **{
        f"norm-{size}-{name}-{cluster}": norm_program(
            size, torch.bfloat16, (cluster, most_per_thread(size)), kind
        )
        for i, (name, kind) in enumerate(NORM_KINDS.items())
        for size, cluster in [((2, 1), (4, 8))[i % 2], (8, 8)]
    },
    **{
        f"combine_{op}-{size}-{dtype}-{choices[0]}": program(
            size, size - 1, TORCH[dtype], ("sum", "avg")[choices[0] % 2], choices
        )
        for op, program in (
            ("all_reduce", cuda_kernel.all_reduce_program),
            ("scatter", reduce_scatter_kernel.reduce_scatter_program),
        )
        for size, dtype, choices in CHOICES
    },
    **{
        f"combine_norm-{size}-{choices}-{held}-{rounded}": norm_program(
            size,
            torch.bfloat16,
            (4, held),
            NormKind(EPS, round_sum=rounded, combine=CombineShape(1, choices, rounded, choices == 8)),
        )
        for size, choices, held, rounded in [
            (2, 8, 1, True),
            (2, 2, 2, False),
            (4, 8, 2, True),
            (8, 1, 1, True),
        ]
    },
    **{f"few_rows-{'-'.join(map(str, case))}": few_rows_program(*case) for case in FEW_ROWS},
    "all_reduce-early": early(cuda_kernel.all_reduce_program(4, 3, torch.bfloat16, "sum")),
    "norm-early": early(norm_program(4, torch.bfloat16, (2, 1))),
    **{
        f"alone_gather-{size}-bytes": all_gather_kernel.all_gather_program(size, size - 1)
        for size in ONE_SHOT
    },
    **{f"all_to_all-{size}-bytes": all_to_all_kernel.all_to_all_program(size, size - 1) for size in ONE_SHOT},
    **{
        f"moe-{size}-{dtype}-{choices}": moe_kernel.moe_program(size, size - 1, (TORCH[dtype], choices, wide))
        for size, dtype, choices, wide in [
            (2, "bfloat16", 8, True),
            (3, "float32", 1, False),
            (4, "float16", 2, False),
            (8, "bfloat16", 8, True),
        ]
    },
    "all_reduce-4-in-turn": in_turn(cuda_kernel.all_reduce_program(4, 3, torch.bfloat16, "sum")),
    "alone_gather-4-in-turn": in_turn(all_gather_kernel.all_gather_program(4, 3)),
    "alone_scatter-4-in-turn": in_turn(
        reduce_scatter_kernel.reduce_scatter_program(4, 3, torch.bfloat16, "sum")
    ),
    "all_to_all-4-in-turn": in_turn(all_to_all_kernel.all_to_all_program(4, 3)),
    "alone_gather-4-early": early(all_gather_kernel.all_gather_program(4, 3)),
    **{
        f"alone_gather-{size}-to-{root}": all_gather_kernel.all_gather_program(size, 1, root=root)
        for size, root in ((2, 0), (4, 1), (9, 8))
    },
    **{
        f"alone_scatter-{size}-{dtype}-{reduce_op}": reduce_scatter_kernel.reduce_scatter_program(
            size, size - 1, TORCH[dtype], reduce_op
        )
        for size, dtype, reduce_op in ALL_REDUCE
    },
    **{f"gather-{size}": gather.AllGatherMatmulOneShot.program(size, size - 1) for size in ONE_SHOT},
    **{
        f"scatter-{size}-{name}": scatter.MatmulReduceScatterOneShot.program(dtype, epilogue, (size, 1))
        for i, size in enumerate(ONE_SHOT)
        for j, (name, (dtype, epilogue)) in enumerate(EPILOGUES.items())
        if (i + j) % 4 < 2
    },
}
COLLECTIVE = {f"{form}{kind}" for form in ("one_shot", "rounds") for kind in ("", "_any")}
KINDS: dict[str, tuple[set[str], type[ctypes.Structure]]] = {
    "acquire": ({"acquire", "leave", "arrive"}, acquire._Params),
    "async": (
        {"arrive", "gather", *(f"{op}_{dtype}" for op in ("sum", "avg") for dtype in TORCH)},
        async_kernel._Params,
    ),
    "transfer": ({"post", "await", "move", "post_all", "await_all", "move_all"}, transfer._Params),
    "all_reduce": (
        {f"{form}{kind}" for form in ("one_shot", "two_shot", "two_shot_rounds") for kind in ("", "_any")},
        cuda_kernel._Params,
    ),
    "alone_gather": (COLLECTIVE, CollectiveParams),
    "alone_scatter": (COLLECTIVE, CollectiveParams),
    "all_to_all": (COLLECTIVE, CollectiveParams),
    "norm": ({"one_shot", "two_shot"}, norm_kernel._Params),
    "route": ({"moe_route"}, moe_route.RouteParams),
    "dispatch_route": ({"moe_dispatch_route"}, moe_route.DispatchRouteParams),
    "cast": ({"largest", "cast"}, float8_cast.CastParams),
    "take": ({"take_rows"}, take_rows.TakeParams),
    "combine_all_reduce": (
        {f"{form}{kind}" for form in ("one_shot", "two_shot", "two_shot_rounds") for kind in ("", "_any")},
        cuda_kernel._CombineParams,
    ),
    "combine_scatter": (COLLECTIVE, reduce_scatter_kernel._CombineParams),
    "combine_norm": ({"one_shot", "two_shot"}, norm_kernel._CombineParams),
    "moe": (
        {f"{way}_{form}" for way in ("dispatch", "combine") for form in ("one_shot", "rounds")},
        moe_kernel.MoeParams,
    ),
    "few_rows": ({"matmul_all_reduce"}, few_rows._Params),
    "gather": ({"all_gather_one_shot"}, gather._Params),
    "scatter": ({"reduce_scatter_one_shot"}, scatter._Params),
}
OTHER_PARAMS: dict[str, type[ctypes.Structure]] = dict.fromkeys(
    ("post_all", "await_all", "move_all"), transfer._Batch
)
ONCE = ("norm", "combine", "moe", "few_rows", "gather", "scatter")  # blocks of theirs have an SM each


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    compile_ahead(request, PROGRAMS)


def test_every_cu_file_is_compiled_here() -> None:
    programs = [*PROGRAMS.values(), *test_gemm_compile.PROGRAMS.values()]
    assert {program.path for program in programs} == set(KERNELS.rglob("*.cu"))


@pytest.mark.parametrize("name", names_of(PROGRAMS))
def test_registers_spills_and_the_size_of_the_argument(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = dict(usage(PROGRAMS[name], tmp_path))
    kernels, params = KINDS[name.split("-")[0]]
    assert set(found) == kernels
    for kernel, numbers in found.items():
        record_property(f"{name}.{kernel}.registers", numbers["REG"])
        print(f"{name} {kernel}: {numbers['REG']} registers")
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{kernel} spills or indexes an array: {numbers}"
        # A block of 512 threads fits once on an SM with 128, twice with 64.
        once = name.startswith(ONCE) or "-8-" in name or "rounds" in kernel
        assert numbers["REG"] <= (128 if once else 64)
        assert numbers["CONSTANT[0]"] == ARGUMENTS + ctypes.sizeof(OTHER_PARAMS.get(kernel, params)), kernel


@pytest.mark.parametrize("name", ["all_reduce-4-bfloat16-max", "acquire"])
def test_machine_code(name: str, tmp_path: Path) -> None:
    code = disassembled(PROGRAMS[name], tmp_path)
    assert "MULTIMEM" not in code.upper()
    if name == "acquire":
        assert re.search(r"LD\S*\.E\.STRONG\.SYS", code), "the flag is acquired at system scope"
    else:
        # To and from three peers, once in one_shot and twice in two_shot, 16 bytes at a time.
        assert len(re.findall(r"ST\S*\.E\.128\.STRONG\.SYS", code)) >= 9
        assert len(re.findall(r"LD\S*\.E\.128\.STRONG\.SYS", code)) >= 9


def test_the_launchers_know_the_same_dtypes_as_the_source() -> None:
    assert set(DTYPES) == set(cuda_kernel.DTYPES.values()) == set(norm_kernel.DTYPES.values())
    assert set(cuda_kernel.DTYPES) == {torch.float32, torch.bfloat16, torch.float16}
