#!/usr/bin/env bash
# A batch of gradients (is_grads_batched, jacobian(vectorize=True)) through a functional all-reduce, or torch.vmap over
# one. Each element is expected to be summed over both ranks, as it is one by one, or the call to be refused. Where the
# other rank comes half a second later, this one has its own numbers: torch's loop over the batch copies each result
# before it is there, and waits for the copy. (Of all-gathers and reduce-scatters it copies memory not written yet.)
#
# Seen on 2026-11-30 with torch 2.13.0, Python 3.11, on the CPU:
#   one by one: [[2.0, 0.0], [0.0, 2.0]]
#   is_grads_batched: [[1.0, 0.0], [0.0, 1.0]]
#   jacobian(vectorize=True): [[1.0, 0.0], [0.0, 1.0]]
#   vmap: [[1.0, 1.0], [1.0, 1.0]]
#   vmap, waited for inside: [[1.0, 1.0], [1.0, 1.0]]
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
import time

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
    from torch.distributed import _functional_collectives as funcol

    def all_reduce(x):
        return funcol.all_reduce(x, "sum", dist.group.WORLD)

    def jacobian():
        return torch.autograd.functional.jacobian(lambda x: all_reduce(x) * 1, torch.ones(2), vectorize=True)

    x = torch.ones(2, requires_grad=True)
    y = all_reduce(x) * 1
    each = torch.eye(2)
    calls = {
        "one by one": lambda: torch.stack([torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in each]),
        "is_grads_batched": lambda: torch.autograd.grad(y, x, each, retain_graph=True, is_grads_batched=True)[0],
        "jacobian(vectorize=True)": jacobian,
        "vmap": lambda: torch.vmap(all_reduce)(torch.ones(2, 2)) * 1,
        "vmap, waited for inside": lambda: torch.vmap(lambda t: funcol.wait_tensor(all_reduce(t)))(torch.ones(2, 2)),
    }
    for name, call in calls.items():
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        yield f"{name}: {call().tolist()}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
one by one: [[2.0, 0.0], [0.0, 2.0]]
is_grads_batched: [[1.0, 0.0], [0.0, 1.0]]
jacobian(vectorize=True): [[1.0, 0.0], [0.0, 1.0]]
vmap: [[1.0, 1.0], [1.0, 1.0]]
vmap, waited for inside: [[1.0, 1.0], [1.0, 1.0]]
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
