#!/usr/bin/env bash
# dist.all_reduce in a function that is differentiated: expected to have the same gradient eager and compiled. Eager it has
# none (the gradient of x is that without a sum over ranks); traced it becomes the functional op, whose gradient is
# all-reduced, too: a factor of the number of ranks when torch.compile is turned on.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   eager: [2.0, 2.0, 2.0]
#   aot_eager: [4.0, 4.0, 4.0]
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
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y.sum()

    for name, g in (("eager", f), ("aot_eager", torch.compile(f, backend="aot_eager"))):
        x = torch.ones(3, requires_grad=True)
        g(x).backward()
        yield f"{name}: {x.grad.tolist()}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
eager: [2.0, 2.0, 2.0]
aot_eager: [4.0, 4.0, 4.0]
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
