"""The CUDA all-reduce and its launcher on the CPU, threads as fibers: slots, epochs, deadlines, special bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fibers import PATIENT, TORCH, Library, Ranks, build, defines_of, inputs, mistakes, same
from weft.kernels.all_reduce import configs, cuda_kernel
from weft.kernels.all_reduce.configs import (
    MAX_BYTES,
    AllReduceConfig,
    all_reduce_grid,
    all_reduce_layout,
    choose_all_reduce,
    vectors,
)
from weft.kernels.device.comm.ll_exchange import BLOCKS, VECTOR, ExchangeLayout
from weft.kernels.device.jit.program import Program

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

FORMS = ("one_shot", "two_shot")
KERNELS = tuple(form + suffix for form in (*FORMS, "two_shot_rounds") for suffix in ("", "_any"))


def compiled(
    folder: Path,
    world_size: int,
    dtype: str,
    reduce_op: str,
    instead: tuple[str, str] | None = None,
    way: Callable[[Program], Program] = lambda program: program,
) -> Library:
    defines = defines_of(way(cuda_kernel.all_reduce_program(world_size, 0, TORCH[dtype], reduce_op)))
    return build(folder, cuda_kernel.SOURCE, KERNELS, cuda_kernel._Params, defines, instead=instead)


def launch(
    monkeypatch: pytest.MonkeyPatch,
    ranks: Ranks,
    rank: int,
    x: torch.Tensor,
    out: torch.Tensor,
    reduce_op: str,
    config: AllReduceConfig,
    polls: int = PATIENT,
) -> None:
    monkeypatch.setattr(cuda_kernel, "_function", lambda program, name, device: ranks.function(name))
    kernel = cuda_kernel.AllReduceLauncher(
        ranks.places[rank], x.numel(), x.dtype, reduce_op, x.device, config
    )
    kernel.launch(0, (x.data_ptr(),), (out.data_ptr(),), polls, rank)


def reference(xs: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        if reduce_op in ("sum", "avg"):
            total = total + x.float()
        else:
            total = (torch.maximum if reduce_op == "max" else torch.minimum)(total, x.float())
    return (total / len(xs) if reduce_op == "avg" else total).to(xs[0].dtype)


@pytest.mark.parametrize(
    ("world_size", "dtype", "reduce_op", "slots"),
    [
        (2, "bfloat16", "avg", 512),
        (3, "float32", "sum", 512),
        # So few slots that a thread of two_shot has one vector in an epoch, and most calls several epochs.
        (3, "bfloat16", "sum", 128),
        (4, "bfloat16", "sum", 512),
        (8, "float32", "sum", 512),
        (9, "bfloat16", "sum", 128),  # one sender's vector after the other
    ],
)
def test_calls_of_changing_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, dtype: str, reduce_op: str, slots: int
) -> None:
    library = compiled(tmp_path, world_size, dtype, reduce_op)
    calls_of_changing_size(monkeypatch, library, ExchangeLayout(world_size, slots), dtype, reduce_op)


def calls_of_changing_size(
    monkeypatch: pytest.MonkeyPatch, library: Library, layout: ExchangeLayout, dtype: str, reduce_op: str
) -> None:
    seed, world_size = random.randrange(1 << 30), layout.world_size
    print(f"seed {seed}")
    torch.manual_seed(seed)
    choice = random.Random(seed)
    ranks, calls = Ranks(library, layout), []
    for call in range(100 // world_size):
        whole = 16 * choice.randrange(1, 100) * world_size
        numel = choice.choice([1, 3, 31, 127, 129, 500, choice.randrange(1, 3000), 5000, whole, whole])
        if call < 6:  # each kernel at least once
            numel = (16 * world_size, 16 * world_size, 31, 31, 2000 * world_size, 2000 * world_size + 1)[call]
        form = FORMS[call % 2 or call >= 4] if call < 6 else choice.choice(FORMS)
        config = AllReduceConfig(
            form, *((1, 32) if call < 6 else (choice.choice([1, 3, 5]), choice.choice([32, 64])))
        )
        if form == "one_shot":
            numel = min(numel, vectors(layout, config) * VECTOR // TORCH[dtype].itemsize)
        xs = inputs(numel, TORCH[dtype], world_size)
        outs = []
        for rank in range(world_size):
            # Any address: a rank's own input may be aligned where another's is not.
            shift = choice.randrange(2) if call >= 6 else 0
            x = torch.cat([xs[rank][:1].expand(shift), xs[rank]])[shift:]
            out = torch.full((numel + shift + 1,), float("nan"), dtype=x.dtype)
            out[-1] = 1.5
            launch(monkeypatch, ranks, rank, x, out[shift : shift + numel], reduce_op, config)
            outs.append((out, shift, x))
        calls.append((xs, outs, config))
    ranks.run(seed)
    assert not ranks.records.any(), f"a wait has expired: {ranks.records.tolist()}"
    launched = {KERNELS[n.kernel] for place in ranks.places for n in place.launches}
    assert launched == set(KERNELS)
    for xs, outs, config in calls:
        expected = reference(xs, reduce_op)
        for rank, (out, shift, _) in enumerate(outs):
            assert same(out[shift:-1], expected), (rank, len(expected), reduce_op, config)
            assert out[-1] == 1.5, "written past the end"
    assert ranks.slots_are_empty()


@pytest.mark.parametrize("reduce_op", ["max", "min"])
def test_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduce_op: str) -> None:
    ranks = Ranks(compiled(tmp_path, 4, "bfloat16", reduce_op), ExchangeLayout(4, 128))
    xs = [torch.randn(1999).bfloat16() for _ in range(4)]
    expected = reference(xs, reduce_op)
    for rank, x in enumerate(xs):
        launch(monkeypatch, ranks, rank, x, x, reduce_op, AllReduceConfig("two_shot", 3, 32))
    ranks.run(1)
    assert all(torch.equal(x, expected) for x in xs)


MISTAKES = {
    "buffer": ("++epoch;\n", "epoch += 2;\n"),
    "one-chunk": ("passes / 2", "passes"),
    "beginning-unsaid": ("say(epoch - 1);\n        for", "for"),
    "not-heard": ("hear(epoch - 1);\n            barrier_sync", "barrier_sync"),
    "said-early": (
        "barrier_sync(EMPTY, receivers);\n            say(epoch);",
        "say(epoch);\n            barrier_sync(EMPTY, receivers);",
    ),
    "no-fence": ("__threadfence_system();\n        if (is_broken", "if (is_broken"),
    "end-not-heard": ("hear(epoch - 1);\n    }", "}"),
}


@pytest.mark.parametrize("mistake", [None, *mistakes(MISTAKES, 7)])
def test_many_epochs_in_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None
) -> None:
    """Launches of one and of many epochs, one after the other, by blocks of changing sizes."""
    library = compiled(tmp_path, 2, "float32", "sum", MISTAKES.get(mistake or ""))
    layout = ExchangeLayout(2, 128)
    wrong = 0
    for seed in range(30):
        choice, ranks, calls, epochs = random.Random(seed), Ranks(library, layout), [], 0
        for _ in range(5):
            config = AllReduceConfig(choice.choice(FORMS), choice.choice([1, 2]), choice.choice([32, 64]))
            most = vectors(layout, config)
            count = choice.choice([most, choice.randrange(1, most)])
            if config.form == "two_shot":
                count += most * choice.randrange(4)
            xs = [torch.randint(1, 9, (8 * count,)).float() for _ in range(2)]
            if config.form == "one_shot":
                xs = [x[: 4 * count] for x in xs]
            outs = [torch.full_like(x, float("nan")) for x in xs]
            for rank in range(2):
                launch(monkeypatch, ranks, rank, xs[rank], outs[rank], "sum", config, 2000)
            calls.append((xs, outs))
            epochs += configs.launch(count, layout, config).epochs
        ended = ranks.ends(seed)
        right = ended and all(torch.equal(out, reference(xs, "sum")) for xs, outs in calls for out in outs)
        right &= ranks.epochs_of_the_first_block() == [epochs] * 2
        wrong += not right or bool(ranks.records.any())
        if wrong and mistake is not None:
            break
    assert bool(wrong) == (mistake is not None), f"{wrong} of 30 went wrong"


def test_nothing_is_sent_to_slots_that_are_not_known_to_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ExchangeLayout(2, 128)
    ranks = Ranks(compiled(tmp_path, 2, "float32", "sum"), layout)
    config = AllReduceConfig("two_shot", 1, 32)
    part = 4 * vectors(layout, config)  # elements, in an epoch
    x = torch.cat([torch.full((part,), float(epoch)) for epoch in (10, 20, 30)] * 2)
    out = torch.empty_like(x)
    launch(monkeypatch, ranks, 0, x, out, "sum", config, polls=50)
    sent = ranks.check_that_two_epochs_are_sent()
    assert (sent == 10 + 1).any() and (sent == 20 + 1).any(), "their sums, too"


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    ranks = Ranks(compiled(tmp_path, 3, "float32", "sum"), ExchangeLayout(3, 128))
    xs = [torch.randn(200) for _ in range(3)]
    outs = [torch.empty_like(x) for x in xs]
    for rank in range(3):
        launch(monkeypatch, ranks, rank, xs[rank], outs[rank], "sum", AllReduceConfig(form), polls=2000)
    ranks.check_that_rank_1_is_missed(cuda_kernel._Params)
    assert ranks.records[0, 4:7].tolist() == [1, 0, 1], "expected, seen, kind"


@pytest.mark.parametrize("num_sms", [2, 64, 132, 144])
def test_no_more_blocks_than_sms_to_be_had(num_sms: int) -> None:
    for nbytes in (16, 4096, 1 << 20, 7 << 20, MAX_BYTES, 1 << 27):
        for world_size in (2, 4, 8):
            config = choose_all_reduce(nbytes, world_size, num_sms)
            assert config.blocks == min(num_sms, BLOCKS)
            layout = all_reduce_layout(nbytes, world_size, config)
            most = vectors(layout, config)
            parts = world_size if config.form == "two_shot" else 1
            assert most * VECTOR * parts >= min(nbytes, MAX_BYTES)
            assert all_reduce_grid(most, layout, config)[0] <= num_sms


def test_the_layout_takes_what_it_was_made_for() -> None:
    for nbytes in (1, 16, 4096, 1 << 20, 2 << 20, 7 << 20, MAX_BYTES):
        for world_size in (2, 4, 8, 12):
            config = choose_all_reduce(nbytes, world_size)
            layout = all_reduce_layout(nbytes, world_size, config)
            parts = world_size if config.form == "two_shot" else 1
            assert vectors(layout, config) * VECTOR * parts >= nbytes
            assert (
                layout.emptied == ExchangeLayout.FIRST + BLOCKS * 2 * world_size * layout.slots * VECTOR // 4
            )
            assert layout.bytes == 4 * (layout.emptied + BLOCKS * world_size)
            for few in (3, 16, 100):  # as many bytes for fewer blocks, which take them in whole passes
                smaller = all_reduce_layout(nbytes, world_size, choose_all_reduce(nbytes, world_size, few))
                assert smaller.blocks == few and smaller.bytes < 2 * layout.bytes + (1 << 20)
            copies = world_size if config.form == "one_shot" else 1
            assert layout.bytes <= 5 * nbytes * copies + (3 << 20) * world_size
    for slots in (64, 192, 1024, 8192):
        layout = ExchangeLayout(8, slots)
        for config in (
            AllReduceConfig("one_shot"),
            AllReduceConfig("two_shot"),
            AllReduceConfig("one_shot", 7, 96),
        ):
            room = slots if config.form == "one_shot" else slots // 2
            most = vectors(layout, config)
            for count in {1, 31, 33, 4224, 4225, most - 1, most}:
                blocks, threads = all_reduce_grid(min(count, most), layout, config)
                passes = -(-min(count, most) // (blocks * threads))
                assert blocks <= config.blocks
                assert threads <= config.threads
                assert passes * threads <= room
                assert (blocks - 1) * 32 < count, "a block without a vector"
