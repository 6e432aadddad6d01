#!/usr/bin/env bash
# all_reduce by AVG over gloo: the average of values that a dtype holds is expected to be a value that it holds. gloo adds
# up in the dtype and divides then, so two float16 of 40,000 have the average inf. The sum of values that are divided
# before it is right.
#
# Seen on 2026-11-30 with torch 2.13.0, Python 3.11, on the CPU:
#   float16, 30000 on each rank: AVG 30000, sum of halves 30000
#   float16, 40000 on each rank: AVG inf, sum of halves 40000
#   float32, 3e+38 on each rank: AVG inf, sum of halves 3e+38
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
    for dtype, value in ((torch.float16, 30000.0), (torch.float16, 40000.0), (torch.float32, 3e38)):
        x = torch.full((4,), value, dtype=dtype)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        y = torch.full((4,), value, dtype=dtype) / world_size
        dist.all_reduce(y)
        yield f"{str(dtype)[6:]}, {value:g} on each rank: AVG {x[0].item():g}, sum of halves {y[0].item():g}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
float16, 30000 on each rank: AVG 30000, sum of halves 30000
float16, 40000 on each rank: AVG inf, sum of halves 40000
float32, 3e+38 on each rank: AVG inf, sum of halves 3e+38
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
