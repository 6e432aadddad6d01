"""Mixtures of experts, whose tokens lie with ranks and whose experts are sliced by rank."""

from __future__ import annotations

import argparse

import torch
from accuracy import MAX_ERROR
from grouped_contenders import call_of, layer_forms, random_experts, wrong_by_samples
from measure import timed
from moe_combine import SHAPES, TOKENS, tail_row
from parts import HIDDEN, Bench
from suite import Run, Suite, numbers, words
from timer import Schedule

# Hidden, an expert's width of all ranks, experts, choices of a token.
MODELS = {
    "Mixtral": (4096, 14336, 8, 2),
    "Qwen3-30B": (2048, 768, 128, 8),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
    "Qwen3-235B": (4096, 1536, 128, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
SMALL = {"small": (16, 32, 4, 2)}
OPS = "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "layer"
CONTENDERS = "weft", "torch", "compiled", "product"

Row = tuple[str, str, int]  # op, model, M


class ExpertsSuite(Suite):
    """The ops of experts, a whole layer of them, forward, and the tail of decoding.

    Contenders: weft's ops; torch's grouped product with NCCL; the same with what lies between compiled. "product" is
    the time of weft's products alone. Results are sampled and compared with float64. M: tokens of all ranks.
    """

    plots = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument(
            "--ops", type=words, default=OPS, help=f"of {', '.join((*OPS, 'tail'))}; by commas"
        )
        parser.add_argument("--models", type=words, default=(), help="by commas")
        parser.add_argument("--m-sizes", type=numbers, default=(), help="by commas")

    def rows(self, given: argparse.Namespace) -> list[Row]:
        on_gpus = given.device == "cuda"
        there = MODELS if on_gpus else SMALL
        models = given.models or tuple(there)
        for option, asked, known in (("ops", given.ops, (*OPS, "tail")), ("models", models, there)):
            if wrong := [name for name in asked if name not in known]:
                raise ValueError(f"--{option}: has {', '.join(wrong)}, must be of {', '.join(known)}")
        if "tail" in given.ops and not on_gpus:
            raise ValueError("--ops: has tail, which is measured on GPUs alone")
        sizes = given.m_sizes or ((64, 512, 2048, 8192, 16384) if on_gpus else (6,))
        rows = [(op, model, m) for model in models for m in sizes for op in given.ops if op != "tail"]
        return [*rows, *(("tail", f"{h},{k}", m) for h, k in SHAPES for m in TOKENS if "tail" in given.ops)]

    def begin(self, run: Run) -> None:
        self._forms = layer_forms(run.on_gpus)
        run.say(f"{'':<44}{'M':>6}" + "".join(f"{name:>11}" for name in CONTENDERS) + "  us")

    def measure(self, row: Row, run: Run) -> None:
        op, model, m = row
        if op == "tail":
            hidden, choices = numbers(model)
            tail = tail_row(m, hidden, choices)
            run.rows.append(tail)
            run.say(tail)
            run.wrong |= not tail["weft_error"] <= MAX_ERROR[torch.bfloat16]
            return
        torch._dynamo.reset()
        if run.on_gpus:
            torch.cuda.empty_cache()
        shape = (MODELS | SMALL)[model]
        if m % run.world:
            raise ValueError(f"--m-sizes: has {m}, must be multiples of {run.world} ranks")
        p = random_experts(m, shape, torch.bfloat16 if run.on_gpus else torch.float32, run.device)
        calls = {name: call_of(form, p) for name, form in self._forms[op].items()}
        wrong = {
            name: wrong_by_samples(op, call(0)[0], p) for name, call in calls.items() if name not in HIDDEN
        }
        plan = Schedule(10 if m <= 512 else 3) if run.on_gpus else Schedule(2, 1)
        found = timed(Bench(calls, {}, 1), plan, run.mode, run.device)
        problems = [*found.problems, *(f"{name}: {text}" for name, text in wrong.items() if text)]
        times = found.medians
        cells = {f"{name}_us": times.get(name) for name in CONTENDERS if name in calls}
        sizes = dict(zip(("H", "F", "E", "k"), shape, strict=True))
        run.rows.append(
            {"op": op, "model": model, "M": m, **sizes, **cells, "limit_us": times.get("product")}
        )
        run.say(f"{op + ' ' + model:<44}{m:>6}{found.cells(list(CONTENDERS), 11)}", *problems)
        run.wrong |= bool(problems)


SUITE = ExpertsSuite()
