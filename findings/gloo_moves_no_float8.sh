#!/usr/bin/env bash
# Moving float8 tensors over gloo: collectives that only move data are expected to take any dtype. All but send and recv
# refuse float8_e4m3fn. (Views as uint8 travel.) So fp8 gathers cannot be tried between CPU ranks as they are written.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   broadcast: RuntimeError, Invalid scalar type
#   all_gather: RuntimeError, Invalid scalar type
#   all_gather_into_tensor: RuntimeError, Invalid scalar type
#   all_to_all_single: RuntimeError, Invalid scalar type
#   scatter: RuntimeError, Invalid scalar type
#   functional all_gather: RuntimeError, Invalid scalar type
#   send and recv: taken
#   broadcast of uint8: taken
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
    from torch.distributed import _functional_collectives as funcol

    t = torch.ones(16).to(torch.float8_e4m3fn)
    parts = [torch.empty_like(t) for _ in range(world_size)]
    whole = t.new_empty(32)

    def to_the_other():
        dist.send(t, 1) if rank == 0 else dist.recv(parts[0], 0)

    calls = {
        "broadcast": lambda: dist.broadcast(t, 0),
        "all_gather": lambda: dist.all_gather(parts, t),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, t),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(t), t),
        "scatter": lambda: dist.scatter(parts[0], parts if rank == 0 else None, 0),
        "functional all_gather": lambda: funcol.all_gather_tensor(t, 0, dist.group.WORLD).sum(),
        "send and recv": to_the_other,
        "broadcast of uint8": lambda: dist.broadcast(t.view(torch.uint8), 0),
    }
    for name, call in calls.items():
        try:
            call()
            yield f"{name}: taken"
        except RuntimeError as e:
            yield f"{name}: {type(e).__name__}, {str(e).splitlines()[0]}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
broadcast: RuntimeError, Invalid scalar type
all_gather: RuntimeError, Invalid scalar type
all_gather_into_tensor: RuntimeError, Invalid scalar type
all_to_all_single: RuntimeError, Invalid scalar type
scatter: RuntimeError, Invalid scalar type
functional all_gather: RuntimeError, Invalid scalar type
send and recv: taken
broadcast of uint8: taken
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
