#!/usr/bin/env bash
# The infinity norm of a DTensor that is a maximum still to be taken over ranks. The norm of the tensor is expected,
# as max, amax and abs give it; the norm of each rank's part is taken and the maximum of these is returned, so a large
# negative part counts although no element of the tensor is that. Scales of fp8 are made of such maxima.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   tensor: [3.0, 1.0]
#   abs().max(): 3.0
#   vector_norm(inf): 5.0
#   placement of the norm: P(max)
#   vector_norm(inf) after redistribute: 3.0
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


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
    mesh = init_device_mesh("cpu", (world_size,))
    part = torch.tensor([[3.0, 1.0], [-5.0, -2.0]][rank])
    d = DTensor.from_local(part, mesh, [Partial("max")])
    norm = torch.linalg.vector_norm(d, float("inf"))
    whole = d.redistribute(mesh, [Replicate()])
    yield f"tensor: {d.full_tensor().tolist()}"
    yield f"abs().max(): {d.abs().max().full_tensor().item()}"
    yield f"vector_norm(inf): {norm.full_tensor().item()}"
    yield f"placement of the norm: {norm.placements[0]}"
    yield f"vector_norm(inf) after redistribute: {torch.linalg.vector_norm(whole, float('inf')).full_tensor().item()}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
tensor: [3.0, 1.0]
abs().max(): 3.0
vector_norm(inf): 5.0
placement of the norm: P(max)
vector_norm(inf) after redistribute: 3.0
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
