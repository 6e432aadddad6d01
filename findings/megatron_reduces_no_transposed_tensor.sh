#!/usr/bin/env bash
# Megatron's reduction over tensor-parallel ranks of a tensor that is not contiguous. The sum over ranks is expected;
# the tensor comes back unreduced, without an error. One that is contiguous is reduced, and the input is overwritten.
#
# Seen on 2026-11-28 with megatron-core 0.16.1, torch 2.13.0, Python 3.11, on the CPU:
#   contiguous: result 3.0, input afterwards 3.0
#   transposed: result 1.0, input afterwards 1.0
#   a part of the columns: result 1.0, input afterwards 1.0
#
# Exits with 0 as long as that is so. FINDINGS_VENV names an environment that has the packages; else one is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENV:-$folder/venv}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet torch==2.13.0 numpy megatron-core==0.16.1
fi
cat > "$folder/program.py" <<'PROGRAM'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


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
    def reduced(x):
        return reduce_from_tensor_model_parallel_region(x, dist.group.WORLD)[0, 0].item()

    for name, view in (
        ("contiguous", lambda x: x),
        ("transposed", lambda x: x.t()),
        ("a part of the columns", lambda x: x[:, :2]),
    ):
        x = torch.full((2, 3), rank + 1.0)
        yield f"{name}: result {reduced(view(x))}, input afterwards {x[0, 0].item()}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
contiguous: result 3.0, input afterwards 3.0
transposed: result 1.0, input afterwards 1.0
a part of the columns: result 1.0, input afterwards 1.0
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
