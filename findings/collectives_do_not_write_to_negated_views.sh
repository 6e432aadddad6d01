#!/usr/bin/env bash
# Collectives into a tensor that is the imaginary part of a conjugate, which PyTorch keeps as a view with a mark that
# its numbers count with the other sign. The result is expected there, as in any other tensor; it is left as it was, and
# nothing says so: the dispatcher hands on a copy without the mark, which nobody writes back. A clone() gets its result.
#
# Seen on 2026-11-30 with torch 2.13.0, Python 3.11, on the CPU:
#   all_reduce: [1.0, 1.0], expected 2
#   reduce: [1.0, 1.0], expected 2
#   broadcast from rank 1: [1.0, 1.0], expected 2
#   recv: [1.0, 1.0], expected 2
#   all_reduce of a clone: [2.0, 2.0], expected 2
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
    def negated(value):
        return torch.complex(torch.zeros(2), torch.full((2,), -value)).conj().imag

    def from_rank_1(x):
        dist.recv(x, 1) if rank == 0 else dist.send(torch.full((2,), 2.0), 0)

    cases = {
        "all_reduce": (negated(1.0), dist.all_reduce),
        "reduce": (negated(1.0), lambda x: dist.reduce(x, 0)),
        "broadcast from rank 1": (negated(rank + 1.0), lambda x: dist.broadcast(x, 1)),
        "recv": (negated(1.0), from_rank_1),
        "all_reduce of a clone": (negated(1.0).clone(), dist.all_reduce),
    }
    for name, (x, call) in cases.items():
        call(x)
        yield f"{name}: {x.tolist()}, expected 2"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
all_reduce: [1.0, 1.0], expected 2
reduce: [1.0, 1.0], expected 2
broadcast from rank 1: [1.0, 1.0], expected 2
recv: [1.0, 1.0], expected 2
all_reduce of a clone: [2.0, 2.0], expected 2
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
