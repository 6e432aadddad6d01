#!/usr/bin/env bash
# all_reduce, reduce and broadcast over gloo of a tensor whose elements do not lie next to each other, such as a column:
# its elements are expected to be reduced, as over a copy, or the tensor to be refused, as send and recv do it. As many
# numbers are taken from the memory where the first one lies: the last elements keep what they were, and numbers between
# them, which are not the tensor's, are overwritten. scatter sends such numbers, too. all_gather, gather and
# reduce_scatter are right.
# No error is raised, with TORCH_DISTRIBUTED_DEBUG=DETAIL either.
#
# Seen on 2026-11-30 with torch 2.13.0, Python 3.11, on the CPU:
#   all_reduce: [0.0, 2.0, 2.0, 3.0], between: [200.0, 200.0, 100.0, 100.0]
#   reduce: [0.0, 2.0, 2.0, 3.0], between: [200.0, 200.0, 100.0, 100.0]
#   broadcast from rank 1: [10.0, 11.0, 2.0, 3.0], between: [100.0, 100.0, 100.0, 100.0]
#   scatter: [0.0, 100.0, 1.0, 100.0]
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
    for name, call in (
        ("all_reduce", dist.all_reduce),
        ("reduce", lambda x: dist.reduce(x, 0)),
        ("broadcast from rank 1", lambda x: dist.broadcast(x, 1)),
    ):
        start = 10.0 * rank if name.startswith("broadcast") else 0.0
        table = torch.stack([torch.arange(4.0) + start, torch.full((4,), 100.0)], 1)
        call(table[:, 0])
        yield f"{name}: {table[:, 0].tolist()}, between: {table[:, 1].tolist()}"
    table, out = torch.stack([torch.arange(4.0), torch.full((4,), 100.0)], 1), torch.empty(4)
    dist.scatter(out, [table[:, 0]] * world_size if rank == 0 else None, 0)
    yield f"scatter: {out.tolist()}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
all_reduce: [0.0, 2.0, 2.0, 3.0], between: [200.0, 200.0, 100.0, 100.0]
reduce: [0.0, 2.0, 2.0, 3.0], between: [200.0, 200.0, 100.0, 100.0]
broadcast from rank 1: [10.0, 11.0, 2.0, 3.0], between: [100.0, 100.0, 100.0, 100.0]
scatter: [0.0, 100.0, 1.0, 100.0]
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
