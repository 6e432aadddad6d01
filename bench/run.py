"""The benchmark: one suite a table, weft beside PyTorch and NCCL, measured between ranks.

python -m weft bench SUITE [options]                         one rank a GPU, or two CPU ranks
torchrun --nproc-per-node 4 bench/run.py SUITE [options]     ranks that are started otherwise

Rank 0 prints the date, the command, the machine and the table. With --results FOLDER it writes them there, too.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import sys
from pathlib import Path
from pkgutil import resolve_name

# GPUs may be shared with others: no contender uses NVLink multicast. Read when NCCL and torch start.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

SUITES = {
    "ops": "every op, layer and size beside NCCL + cuBLAS and torch.ops.symm_mem",
    "scaled": "the ops of fp8 operands",
    "norm_kinds": "the norms after an all-reduce, of every kind",
    "gathered_a": "all-gather + matmul with the gathered A; sums and terms of matmul + reduce-scatter",
    "process_group": "all-reduces by the process group weft, and by NCCL",
    "installed": "layers that call torch.ops.symm_mem by name, with weft in its place",
    "transfers": "put and get between registered tensors, NCCL's send and recv",
    "rings": "several puts at once; a ring of puts beside the fused op",
    "sequence_layers": "a decoder with the pass's sequence parallelism and without",
    "gathered_weights": "a Llama of gathered weights (FSDP), in several orders of collectives",
    "llama": "Llama-3 8B: training, prefill and decoding, without the pass and with it",
    "frameworks": "programs of transformers, DDP and FSDP2, without weft and with it",
    "vocabulary": "the loss of a vocabulary that the ranks share",
    "experts": "the ops of experts, a layer of them, the tail of decoding",
    "exchanges": "heads to sequence and back, alone and around their products",
    "expert_parallel": "tokens to the ranks of their experts, and back",
    "forms": "which programs weft's pass and torch's own fuse; not timed",
    "alone": "the matmul ops of one rank on one GPU that stands for several",
    "compare": "this checkout's ops beside those of another commit",
    "pages": "the tables and pictures of README.md and docs/, from bench/results/",
    "plot": "a chart of a results file: weft, its peers and the limit over the size",
}


def main(arguments: list[str]) -> int:
    prog = "python -m weft bench"
    if not arguments or arguments[0] in ("-h", "--help"):
        suites = "\n".join(f"  {name:<18}{about}" for name, about in SUITES.items())
        print(f"{__doc__}\nsuites; SUITE --help has the options of one:\n{suites}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in SUITES:
        print(f"{prog}: SUITE: is {name!r}, must be one of {', '.join(SUITES)}", file=sys.stderr)
        return 2
    suite = resolve_name(f"suites.{name}:SUITE")
    parser = argparse.ArgumentParser(
        f"{prog} {name}",
        description=inspect.getdoc(suite),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    suite.add_options(parser)
    given = parser.parse_args(rest)
    given.suite, given.command = name, shlex.join(["python", "-m", "weft", "bench", *arguments])
    try:
        given.rows = suite.rows(given)
        if "RANK" not in os.environ:
            return int(suite.start(given, arguments))
    except ValueError as e:
        parser.error(str(e))
    return int(suite.run_rank(given))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main(sys.argv[1:]))
