#!/usr/bin/env bash
# item(), float() and int() of a DTensor whose sum, mean, maximum or norm over ranks is still to be taken. The value of
# the tensor is expected, as full_tensor() gives it and comparisons see it; each rank gets that of its own shard, so a
# logged loss or norm differs by rank, without a word.
#
# Seen on 2026-11-29 with torch 2.13.0, Python 3.11, on the CPU:
#   sum: item() on the ranks [3.0, 7.0], full_tensor().item() 10.0, placement P(sum)
#   mean: item() on the ranks [1.5, 3.5], full_tensor().item() 2.5, placement P(avg)
#   max: item() on the ranks [2.0, 4.0], full_tensor().item() 4.0, placement P(max)
#   norm: item() on the ranks [2.236, 5.0], full_tensor().item() 5.477, placement _NormP(2)
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
from torch.distributed.tensor import Shard, distribute_tensor


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
    x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
    for name in ("sum", "mean", "max", "norm"):
        value = getattr(x, name)()
        items = [None] * world_size
        dist.all_gather_object(items, round(value.item(), 3))
        whole = round(value.full_tensor().item(), 3)
        yield f"{name}: item() on the ranks {items}, full_tensor().item() {whole}, placement {value.placements[0]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
sum: item() on the ranks [3.0, 7.0], full_tensor().item() 10.0, placement P(sum)
mean: item() on the ranks [1.5, 3.5], full_tensor().item() 2.5, placement P(avg)
max: item() on the ranks [2.0, 4.0], full_tensor().item() 4.0, placement P(max)
norm: item() on the ranks [2.236, 5.0], full_tensor().item() 5.477, placement _NormP(2)
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
