#!/usr/bin/env bash
# A weight that transformers replicates under tensor parallelism with its style replicated_with_grad_allreduce (the
# norms of queries and keys in Qwen3), in two micro-steps without zero_grad. The sum of all ranks' and steps'
# gradients, 33, is expected; each backward reduces the accumulated gradient, so that the first step's counts once
# more for each further step and rank.
#
# Seen on 2026-11-28 with transformers 5.23.0, torch 2.13.0, Python 3.11, on the CPU:
#   after the first micro-step: 3.0
#   after the second micro-step: 36.0
#
# Exits with 0 as long as that is so. FINDINGS_VENV names an environment that has the packages; else one is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENV:-$folder/venv}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet torch==2.13.0 numpy transformers==5.23.0
fi
cat > "$folder/program.py" <<'PROGRAM'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES


def run(rank, world_size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    seen = list(program(rank, world_size))
    if rank == 0:
        for line in seen:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def program(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    module = Scale()
    ALL_PARALLEL_STYLES["replicated_with_grad_allreduce"].install_forward(module, mesh)
    for name, inputs in (("first", (1.0, 2.0)), ("second", (10.0, 20.0))):
        module(torch.tensor([inputs[rank]])).sum().backward()
        yield f"after the {name} micro-step: {module.weight.grad.item()}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
after the first micro-step: 3.0
after the second micro-step: 36.0
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
