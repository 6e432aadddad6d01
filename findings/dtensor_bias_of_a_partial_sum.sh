#!/usr/bin/env bash
# A row-wise linear layer of DTensors whose bias is replicated: with zeros for input the result is expected to be the bias.
# In bfloat16 on 3 ranks it is not in some outputs: the bias is divided by the number of ranks, rounded, and summed. Who fuses
# bias and reduction, and adds the bias once, gets other (exact) numbers.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   torch.bfloat16: (Partial(sum),), 107 of 128 outputs are the bias
#   torch.float32: (Partial(sum),), 128 of 128 outputs are the bias
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    for dtype in (torch.bfloat16, torch.float32):
        bias = 1 + torch.arange(128) / 128
        x, w = (distribute_tensor(torch.zeros(n, 6, dtype=dtype), mesh, [Shard(1)]) for n in (1, 128))
        b = distribute_tensor(bias.to(dtype), mesh, [Replicate()])
        y = torch.nn.functional.linear(x, w, b)
        placed = y.placements
        exact = int((y.redistribute(mesh, [Replicate()]).to_local()[0] == bias.to(dtype)).sum())
        yield f"{dtype}: {placed}, {exact} of 128 outputs are the bias"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(3, folder + "/store"), nprocs=3, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
torch.bfloat16: (Partial(sum),), 107 of 128 outputs are the bias
torch.float32: (Partial(sum),), 128 of 128 outputs are the bias
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
