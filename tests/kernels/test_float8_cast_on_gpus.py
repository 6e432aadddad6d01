"""The CUDA cast to fp8 on a GPU: the bits of torch's operators, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from opcommon import graph_of
from quantised import E4M3, E5M2, check_casts, matrices
from weft.kernels.float8_cast.cuda_kernel import Float8Cast
from weft.kernels.float8_cast.reference import Float8, reference_cast, reference_maxima

pytestmark = pytest.mark.gpu(1)
DTYPES = torch.float32, torch.bfloat16, torch.float16


def check_on_gpu(given: list[torch.Tensor], to: torch.dtype) -> None:
    across = [t.numel() // t.shape[-1] % 16 == 0 for t in given]
    cast = Float8Cast(given, to, across)
    found, want = cast.maxima(), reference_maxima(given)
    assert torch.equal(found.nan_to_num(-1), want.nan_to_num(-1))
    maxima = want * 1.7  # of all ranks
    check_casts(cast.numbers(maxima), reference_cast(given, maxima, to, across))


@pytest.mark.parametrize("to", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_torch_on_a_gpu(dtype: torch.dtype, to: torch.dtype) -> None:
    for given in matrices(dtype):
        check_on_gpu([t.cuda() for t in given], to)
    large = torch.randn(5008, 4112, device="cuda").to(
        dtype
    )  # several tiles of a block, and loads of a thread
    check_on_gpu([large, large.t(), large[:, 16:48], large.new_zeros(48, 4096), large[:37]], to)


def test_a_graph_casts_what_is_new() -> None:
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 256), (512, 256)))

    def cast() -> list[Float8]:
        now = Float8Cast([x, w], E4M3, [False, True])
        return now.numbers(now.maxima())

    cast()
    graph, made = graph_of(cast)
    for factor in (1.0, 0.01, 100.0):
        x.normal_().mul_(factor), w.normal_().mul_(factor)
        graph.replay()
        check_casts(made, reference_cast([x, w], reference_maxima([x, w]), E4M3, [False, True]))
