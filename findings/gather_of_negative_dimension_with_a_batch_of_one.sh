#!/usr/bin/env bash
# Functional all-gather along dimension -1 of a tensor whose first dimension is 1: expected to be the gather along the same
# dimension counted from the front. It raises, while a first dimension of 3 works, and so does 2 in place of -1.
# torch/_utils.py, _maybe_view_chunk_cat: the shortcut by views slices the shape by the negative number.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   (3, 8, 4) along 2: right
#   (3, 8, 4) along -1: right
#   (1, 8, 4) along 2: right
#   (1, 8, 4) along -1: RuntimeError, shape '[1, 8, 8, 2, 8, 4]' is invalid for input of size 64
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

    for first in (3, 1):
        for dim in (2, -1):
            x = torch.arange(first * 32.0).view(first, 8, 4) + 1000 * rank
            want = torch.cat([x - 1000 * rank + 1000 * other for other in range(world_size)], -1)
            try:
                got = funcol.all_gather_tensor(x, dim, dist.group.WORLD)
                said = "right" if torch.equal(got, want) else "wrong"
            except RuntimeError as e:
                said = f"RuntimeError, {e}"
            yield f"({first}, 8, 4) along {dim}: {said}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
(3, 8, 4) along 2: right
(3, 8, 4) along -1: right
(1, 8, 4) along 2: right
(1, 8, 4) along -1: RuntimeError, shape '[1, 8, 8, 2, 8, 4]' is invalid for input of size 64
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
