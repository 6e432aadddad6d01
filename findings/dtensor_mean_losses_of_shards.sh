#!/usr/bin/env bash
# The mean of F.mse_loss, huber_loss, smooth_l1_loss and soft_margin_loss of a DTensor that is sharded. The loss and the
# gradients of the whole tensor are expected, as (d * d).mean() and F.l1_loss give them. Each rank takes the mean of its
# own shard, and the mean of these is the result: with shards of unlike sizes the loss is wrong. The gradients are
# those of each rank's own mean, so with two ranks and shards alike they are twice what they should be.
#
# Seen on 2026-11-29 with torch 2.13.0, Python 3.11, on the CPU:
#   mse_loss of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
#     plain: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
#     DTensor: 7.5000, gradient [1.0, 2.0, 3.0, 4.0]
#   huber_loss of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
#     plain: 2.0000, gradient [0.25, 0.25, 0.25, 0.25]
#     DTensor: 2.0000, gradient [0.5, 0.5, 0.5, 0.5]
#   mean of squares of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
#     plain: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
#     DTensor: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
#   mse_loss of [1.0, 2.0, 3.0], shards of [2, 1]
#     plain: 4.6667, gradient [0.6667, 1.3333, 2.0]
#     DTensor: 5.7500, gradient [1.0, 2.0, 6.0]
#   huber_loss of [1.0, 2.0, 3.0], shards of [2, 1]
#     plain: 1.5000, gradient [0.3333, 0.3333, 0.3333]
#     DTensor: 1.7500, gradient [0.5, 0.5, 1.0]
#   mean of squares of [1.0, 2.0, 3.0], shards of [2, 1]
#     plain: 4.6667, gradient [0.6667, 1.3333, 2.0]
#     DTensor: 4.6667, gradient [0.6667, 1.3333, 2.0]
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
import torch.nn.functional as F
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


def trained(loss, values, mesh):
    whole = torch.tensor(values).requires_grad_()
    shards = distribute_tensor(torch.tensor(values), mesh, [Shard(0)]).requires_grad_()
    wanted, got = loss(whole), loss(shards)
    wanted.backward()
    got.backward()
    for name, value, grad in (
        ("plain", wanted, whole.grad),
        ("DTensor", got.full_tensor(), shards.grad.full_tensor()),
    ):
        yield f"  {name}: {value.item():.4f}, gradient {[round(g, 4) for g in grad.tolist()]}"


def program(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    losses = {
        "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
        "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x)),
        "mean of squares": lambda x: (x * x).mean(),
    }
    for values in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0]):
        for name, loss in losses.items():
            yield f"{name} of {values}, shards of {[len(c) for c in torch.tensor(values).chunk(world_size)]}"
            yield from trained(loss, values, mesh)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
mse_loss of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
  plain: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
  DTensor: 7.5000, gradient [1.0, 2.0, 3.0, 4.0]
huber_loss of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
  plain: 2.0000, gradient [0.25, 0.25, 0.25, 0.25]
  DTensor: 2.0000, gradient [0.5, 0.5, 0.5, 0.5]
mean of squares of [1.0, 2.0, 3.0, 4.0], shards of [2, 2]
  plain: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
  DTensor: 7.5000, gradient [0.5, 1.0, 1.5, 2.0]
mse_loss of [1.0, 2.0, 3.0], shards of [2, 1]
  plain: 4.6667, gradient [0.6667, 1.3333, 2.0]
  DTensor: 5.7500, gradient [1.0, 2.0, 6.0]
huber_loss of [1.0, 2.0, 3.0], shards of [2, 1]
  plain: 1.5000, gradient [0.3333, 0.3333, 0.3333]
  DTensor: 1.7500, gradient [0.5, 0.5, 1.0]
mean of squares of [1.0, 2.0, 3.0], shards of [2, 1]
  plain: 4.6667, gradient [0.6667, 1.3333, 2.0]
  DTensor: 4.6667, gradient [0.6667, 1.3333, 2.0]
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
