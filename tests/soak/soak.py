"""Random mixed calls for as long as you like, every result checked: `python tests/soak/soak.py --calls 100000`.

The ops of calls.py, random sizes, dtypes, dimensions, several overlapping groups, threads (CPU) or streams and replayed
graphs (CUDA), ranks that are late. It fails when a result is wrong in any bit, when a wait expires, or when a rank
holds more memory, descriptors or threads at the end than after the first third. The seed is printed; the same seed
makes the same calls.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from traffic import Options, Traffic

sys.path.insert(0, str(Path(__file__).parents[1]))
from algorithms import mixing
from control import own_products
from ranks import run_ranks

ENVIRONMENT = {
    "WEFT_TIMEOUT": "60",
    "OMP_NUM_THREADS": "1",
    # With 8 queues a stream may wait after another one's kernel that waits for a peer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The C library gives threads that meet each other ever more arenas, and each keeps what was freed in it.
    "MALLOC_ARENA_MAX": "2",
    # torch's own caches of CPU programs would grow for a long time.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
STARTING = 240.0  # seconds beyond --seconds: processes, heaps, the first compilation of kernels


def serve(rank: int, world_size: int, options: Options) -> dict[str, Any]:
    torch.set_default_device(None)  # what is made says where it lies
    try:
        with mixing():
            return Traffic(options, rank, world_size).run()
    except AssertionError as e:
        if options.device == "cuda":
            raise AssertionError(f"{e}{own_products(options.place(rank))}") from e
        raise


def soak(world_size: int, options: Options) -> list[dict[str, Any]]:
    """What every rank says at its end.

    Raises:
        AssertionError: a rank has failed, died, or did not end in time.
    """
    env = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    how: dict[str, Any] = {"device": options.device, "gpus": options.gpus, "env": env}
    return run_ranks(
        serve, world_size, options, timeout=options.seconds + STARTING, fresh=True, store="tcp", **how
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there are enough GPUs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--share", type=int, metavar="GPUS", help="CUDA ranks share so many GPUs and take turns on them: slow"
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=3600, help="stop after so long, whatever --calls says"
    )
    parser.add_argument(
        "--lanes", type=int, default=2, help="threads of a CPU rank, each with groups of its own"
    )
    parser.add_argument("--output", type=Path, help="write the figures to this file, too")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    args = parser.parse_args()
    if args.ranks < 2 or args.calls < 1 or args.lanes < 1 or not args.seconds > 0:
        parser.error("--ranks must be at least 2, --calls and --lanes at least 1, --seconds above 0")
    device = args.device or ("cuda" if torch.cuda.device_count() >= (args.share or args.ranks) else "cpu")
    if args.share is not None and (device != "cuda" or not 1 <= args.share <= torch.cuda.device_count()):
        parser.error(f"--share: is {args.share} on {device}, must be from 1 to the number of GPUs, on cuda")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if args.output is not None:
            args.output.write_text("\n".join(lines) + "\n")

    where = device if args.share is None else f"{device} (on {args.share} GPUs)"
    say(f"{args.ranks} {where} ranks, {args.calls} calls, seed {args.seed}")
    try:
        options = Options(device, args.calls, args.seconds, args.seed, args.lanes, gpus=args.share)
        results = soak(args.ranks, options)
    except AssertionError as e:
        say(f"FAILED, seed {args.seed}\n{e}")
        sys.exit(1)
    for said in results:
        say(
            f"rank {said['rank']}: {said['calls']} calls in {said['seconds']:.0f} s, {said['checked']} results "
            f"checked, {said['replayed']} graphs replayed, {said['churned']} allocations, late {said['late']} times\n"
            f"  before: {said['before']}\n  after:  {said['after']}"
        )
    say("every result was right, and nothing has grown")


if __name__ == "__main__":
    main()
