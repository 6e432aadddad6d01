#!/usr/bin/env bash
# all_reduce by MAX or MIN over gloo: a NaN of one rank is expected on all ranks, as torch.maximum gives it, or at least on
# all alike by whose it is. It is lost or kept by the position of the element and the rank that holds it: half of 1,000
# elements are NaN afterwards. The ranks agree with each other.
# A scale or a check for overflow from such a maximum may miss a NaN.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   MAX, 1 NaN of rank 0: 1 NaN in the result
#   MAX, 1000 NaN of rank 0: 500 NaN in the result
#   MAX, 1 NaN of rank 1: 0 NaN in the result
#   MAX, 1000 NaN of rank 1: 500 NaN in the result
#   MIN, 1 NaN of rank 0: 1 NaN in the result
#   MIN, 1000 NaN of rank 0: 500 NaN in the result
#   MIN, 1 NaN of rank 1: 0 NaN in the result
#   MIN, 1000 NaN of rank 1: 500 NaN in the result
#
# Exits with 0 as long as that is so. FINDINGS_VENV names an environment that has the packages; else one is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENV:-$folder/venv}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
fi
cat > "$folder/program.py" <<'PROGRAM'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world_size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    seen = list(program(rank, world_size))
    if rank == 0:
        for line in seen:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def program(rank, world_size):
    for name, op in (("MAX", dist.ReduceOp.MAX), ("MIN", dist.ReduceOp.MIN)):
        for owner in range(world_size):
            for n in (1, 1000):
                x = torch.ones(n)
                if rank == owner:
                    x.fill_(float("nan"))
                dist.all_reduce(x, op=op)
                yield f"{name}, {n} NaN of rank {owner}: {int(x.isnan().sum())} NaN in the result"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
MAX, 1 NaN of rank 0: 1 NaN in the result
MAX, 1000 NaN of rank 0: 500 NaN in the result
MAX, 1 NaN of rank 1: 0 NaN in the result
MAX, 1000 NaN of rank 1: 500 NaN in the result
MIN, 1 NaN of rank 0: 1 NaN in the result
MIN, 1000 NaN of rank 0: 500 NaN in the result
MIN, 1 NaN of rank 1: 0 NaN in the result
MIN, 1000 NaN of rank 1: 500 NaN in the result
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
