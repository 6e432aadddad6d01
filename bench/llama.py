"""Llama-3 8B, 8 layers: training, prefill and decoding by torch.compile as it is, with torch's and with weft's pass.

python bench/llama.py                                       every row, one rank a GPU, or two small CPU ranks
python bench/llama.py --modes train --seqs 2048 --compile blocks
torchrun --nproc-per-node 4 bench/llama.py

Rank 0 prints the rows, writes ``bench/results/<device>-x<world>-llama.json``, and beside it a page with charts and the
timeline of a block. What a row has, and how exposed communication is measured: llama_rows.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama_page import page
from llama_rows import CONTENDERS, losses, measure_case, table
from llama_steps import Case
from machine import described, device_name
from report import keep_under_its_date

ROOT = Path(__file__).resolve().parent.parent
TRAIN_SEQS, PREFILL_SEQS, BATCHES = (1024, 2048, 4096, 8192), (2048, 8192), (1, 16, 64, 256)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """In the order in which they are measured."""
    for mode in args.modes:
        if mode == "decode":
            for batch in args.batches:
                yield Case("decode", "whole", args.context, batch, graphs=True, weights=args.weights)
            continue
        for seq in args.seqs or (TRAIN_SEQS if mode == "train" else PREFILL_SEQS):
            for how in args.compile if mode == "train" else ("whole",):
                yield Case(mode, how, seq, 1)


def run_report(args: argparse.Namespace) -> None:
    """On this rank; rank 0 prints and writes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    on = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    device = torch.device(on, torch.cuda.current_device()) if on == "cuda" else torch.device("cpu")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    rows: list[dict[str, Any]] = []
    timelines: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    for case in cases(args):
        begun = time.perf_counter()
        found = measure_case(case, args.contenders, device, args.steps, say)
        rows += found.rows
        timelines.update(found.timelines)
        layers.update(found.layers)
        say("\n".join([*table(found.rows), f"    ({time.perf_counter() - begun:.0f} s)"]))
    curves = losses(args.contenders, device, args.losses) if args.losses else {}
    if rank == 0 and not args.no_file:
        content: dict[str, Any] = {
            "meta": described(on, world) | {"command": args.command},
            "rows": rows,
            "losses": curves,
            "layers": layers,
        }
        content["meta"]["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        path = args.output or ROOT / "bench" / "results" / f"{device_name(on)}-x{world}-llama.json"
        keep_under_its_date(path)
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".html").write_text(page(content, timelines))
        say(f"{path.name}, {path.with_suffix('.html').name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, help="default: one a GPU, or 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there are GPUs")
    parser.add_argument("--modes", nargs="+", default=["train", "prefill", "decode"])
    parser.add_argument("--compile", nargs="+", default=["whole", "blocks"], choices=("whole", "blocks"))
    parser.add_argument("--seqs", nargs="+", type=int, help="of training and prefill")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of decoding")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache while decoding")
    parser.add_argument("--weights", choices=("dtensor", "local"), default="dtensor", help="of decoding")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS[:4]), choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=10, help="timed ones of each")
    parser.add_argument(
        "--losses", type=int, default=0, help="updates of each contender, for the loss curves"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-file", action="store_true")
    args = parser.parse_args()
    for mode in args.modes:
        if mode not in ("train", "prefill", "decode"):
            parser.error(f"--modes: has {mode!r}, must be train, prefill or decode")
    if "RANK" not in os.environ:
        ranks = args.ranks or torch.cuda.device_count() or 2
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.call([sys.executable, *launcher, __file__, *sys.argv[1:]], env=environment)
    args.command = " ".join(["python", "bench/llama.py", *sys.argv[1:]])
    if torch.cuda.is_available() and args.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    run_report(args)
    torch.compiler.reset()  # NCCL waits for the graphs that were captured with it
    gc.collect()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
