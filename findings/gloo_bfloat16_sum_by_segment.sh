#!/usr/bin/env bash
# all_reduce of bfloat16 over gloo: the same four numbers in each element are expected to have the same sum in each. They
# have not: the ring starts to add at another rank in each segment of the tensor and rounds to bfloat16 at each hop, so
# 256 + 1 + 1 + 1 is 256 in half of the elements and 260 in the others. (259 rounds to 260.) The ranks agree bit by bit.
# A CPU run is no reference of a fused bfloat16 sum.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   1 elements: 260; ranks alike: True
#   1000003 elements: 256, 260; ranks alike: True
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
    for n in (1, 1_000_003):
        x = torch.full((n,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(x)
        every = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(every, x)
        values = ", ".join(f"{v:g}" for v in x.float().unique().tolist())
        yield f"{n} elements: {values}; ranks alike: {all(torch.equal(x, other) for other in every)}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(4, folder + "/store"), nprocs=4, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
1 elements: 260; ranks alike: True
1000003 elements: 256, 260; ranks alike: True
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
