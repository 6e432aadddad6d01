#!/usr/bin/env bash
# An in-place all-reduce of a tensor that the backward needs: expected to be refused as other in-place changes are ("has
# been modified by an inplace operation"). It is not: collectives write below the version counters, and the gradient is
# taken from the overwritten number. x = 0.5 on both ranks: the gradient of sin(x) is cos(0.5) = 0.8776, and comes out
# as cos(1.0).
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   dist.all_reduce: versions 0, gradient 0.5403
#   _c10d_functional.all_reduce_: versions 0, gradient 0.5403
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
    def functional(y):
        torch.ops._c10d_functional.all_reduce_(y, "sum", dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(y)

    for name, change in (("dist.all_reduce", dist.all_reduce), ("_c10d_functional.all_reduce_", functional)):
        x = torch.tensor([0.5], requires_grad=True)
        y = x * 1
        z = y.sin()
        before = y._version
        with torch.no_grad():
            change(y)
        z.sum().backward()
        yield f"{name}: versions {y._version - before}, gradient {x.grad.item():.4f}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
dist.all_reduce: versions 0, gradient 0.5403
_c10d_functional.all_reduce_: versions 0, gradient 0.5403
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
