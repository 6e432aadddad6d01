"""Threads that launch one kernel at the same time: each launch takes its own addresses and deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.kernels.all_reduce import cuda_kernel as all_reduce
from weft.kernels.all_reduce.configs import all_reduce_layout, choose_all_reduce
from weft.kernels.all_reduce_rms_norm import cuda_kernel as rms_norm
from weft.kernels.all_reduce_rms_norm.configs import all_reduce_rms_norm_layout, choose_all_reduce_rms_norm
from weft.kernels.all_reduce_rms_norm.reference import NormKind
from weft.kernels.device.comm import ll_exchange
from weft.kernels.matmul_all_reduce import cuda_kernel as matmul_all_reduce
from weft.kernels.matmul_all_reduce.configs import choose_matmul_all_reduce

SIZE, ROWS, HIDDEN, N = 2, 4, 1024, 512
BF16 = torch.bfloat16
Launched = dict[int, list[tuple[int, ...]]]  # by stream: what the driver took


def launches(launched: Launched, fields: tuple[str, ...]) -> Any:
    """Stands for a program and its function: the driver looks at the struct a moment after it is called."""

    def bound(blocks: int, threads: int, params: Any, **_: Any) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            time.sleep(0.002)
            taken = (*(getattr(params, name) for name in fields), params.slots.watch.timeout_ns)
            launched.setdefault(stream, []).append(taken)

        return launch

    function = SimpleNamespace(bound=bound)
    return lambda *_, **__: SimpleNamespace(function=lambda name: function, bound=bound)


def workspace(layout: Any) -> Any:
    fault = SimpleNamespace(address=1 << 19, record=0)
    place = SimpleNamespace(rank=1, world_size=SIZE, span=1 << 30, address=1 << 20, fault=fault)
    return SimpleNamespace(**vars(place), layout=layout)


def of_all_reduce(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> Callable[[int], None]:
    nbytes = ROWS * HIDDEN * 2
    config = choose_all_reduce(nbytes, SIZE)
    monkeypatch.setattr(all_reduce, "_function", launches(launched, ("x", "out")))
    place = workspace(all_reduce_layout(nbytes, SIZE, config))
    kernel = all_reduce.AllReduceLauncher(place, ROWS * HIDDEN, BF16, "sum", torch.device("cuda", 0), config)
    return lambda own: kernel.launch(0, (own << 20,), (own << 21,), own, own)


def of_rms_norm(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> Callable[[int], None]:
    vectors = HIDDEN * 2 // ll_exchange.VECTOR
    config = choose_all_reduce_rms_norm(ROWS, vectors, SIZE)
    monkeypatch.setattr(rms_norm, "norm_program", launches(launched, ("x", "sums")))
    place = workspace(all_reduce_rms_norm_layout(ROWS, vectors, SIZE, config))
    kernel = rms_norm.AllReduceRmsNormLauncher(place, ROWS, HIDDEN, BF16, NormKind(1e-5), config)
    return lambda own: kernel.launch(0, (own << 20, 16, 16), (16, own << 21), own, own)


def of_few_rows(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> Callable[[int], None]:
    config = choose_matmul_all_reduce(ROWS, N, 132)
    assert config is not None
    program = launches(launched, ("a", "out"))
    monkeypatch.setattr(matmul_all_reduce, "few_rows_program", program)
    a, b = torch.empty(ROWS, HIDDEN, dtype=BF16), torch.empty(HIDDEN, N, dtype=BF16)
    place = workspace(config.layout(ROWS, SIZE))
    kernel = matmul_all_reduce.MatmulAllReduceLauncher(place, a, b, "sum", config)
    return lambda own: kernel.launch(0, (own << 20, 16), (own << 21,), own, own)


@pytest.mark.parametrize("made", [of_all_reduce, of_rms_norm, of_few_rows])
def test_each_launch_takes_what_its_thread_gave(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    launched: Launched = {}
    monkeypatch.setattr(ll_exchange, "dependent", lambda: False)
    launch, owns, count = made(monkeypatch, launched), (1, 2, 3), 5
    begin = threading.Barrier(len(owns))

    def launch_often(own: int) -> None:
        begin.wait()
        for _ in range(count):
            launch(own)

    threads = [threading.Thread(target=launch_often, args=(own,)) for own in owns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for own in owns:
        assert len(launched[own]) % count == 0
        assert set(launched[own]) == {(own << 20, own << 21, own)}
