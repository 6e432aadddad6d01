"""Whole Llamas."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from llama_rows import CONTENDERS, losses, measure_case, table
from llama_steps import Case
from suite import Run, Suite

TRAIN_SEQS, PREFILL_SEQS, BATCHES = (1024, 2048, 4096, 8192), (2048, 8192), (1, 16, 64, 256)
MODES = ("train", "prefill", "decode")


class LlamaSteps(Suite):
    """Llama-3 8B, 8 layers: training, prefill and decoding by torch.compile as it is, with torch's and weft's pass.

    Between CPU ranks a small one. A row has milliseconds of a step, its forward and its backward, what of the
    communication is exposed, how many times as fast as "plain" it is, the peak of memory and the votes of the pass;
    llama_rows.py says how they are measured. The file of --results has also the kernels of a layer, for the picture.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
        parser.add_argument("--compile", nargs="+", default=["whole", "blocks"], choices=("whole", "blocks"))
        parser.add_argument("--seqs", nargs="+", type=int, help="of training and prefill")
        parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of decoding")
        parser.add_argument("--context", type=int, default=1024, help="tokens in the cache while decoding")
        parser.add_argument("--weights", choices=("dtensor", "local"), default="dtensor", help="of decoding")
        parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS[:4]), choices=CONTENDERS)
        parser.add_argument("--steps", type=int, default=10, help="timed ones of each")
        parser.add_argument(
            "--losses", type=int, default=0, help="updates of each contender, whose losses are kept"
        )

    def rows(self, given: argparse.Namespace) -> list[Case]:
        return list(self._cases(given))

    def _cases(self, given: argparse.Namespace) -> Iterator[Case]:
        for mode in given.modes:
            if mode == "decode":
                for batch in given.batches:
                    yield Case("decode", "whole", given.context, batch, graphs=True, weights=given.weights)
                continue
            for seq in given.seqs or (TRAIN_SEQS if mode == "train" else PREFILL_SEQS):
                for how in given.compile if mode == "train" else ("whole",):
                    yield Case(mode, how, seq, 1)

    def measure(self, row: Case, run: Run) -> None:
        begun = time.perf_counter()
        found = measure_case(row, run.given.contenders, run.device, run.given.steps, run.say)
        run.rows += found.rows
        layers: dict[str, Any] = run.more.setdefault("layers", {})
        layers.update(found.layers)
        run.say(*table(found.rows), f"    ({time.perf_counter() - begun:.0f} s)")

    def end(self, run: Run) -> None:
        if run.given.losses:
            run.more["losses"] = losses(run.given.contenders, run.device, run.given.losses)
        torch.compiler.reset()  # NCCL waits for the graphs that were captured with it
        gc.collect()


SUITE = LlamaSteps()
