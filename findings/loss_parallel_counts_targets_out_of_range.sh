#!/usr/bin/env bash
# Cross entropy of logits that are sharded over the vocabulary, under DTensor's loss_parallel. A target past the
# vocabulary is expected to be refused, as by cross entropy of whole logits; it counts as a row of loss 0, and the
# mean is too low. With a weight for each class an ignored target is expected to be left out; the loss is right, and
# its backward looks the ignored index up in the weights and raises.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   target past the vocabulary, whole: IndexError, Target 6 is out of bounds.
#   target past the vocabulary, loss_parallel: 1.0397
#   the other rows' sum / all rows: 1.0397
#   ignored target, weights, whole: 1.3863
#   ignored target, weights, loss_parallel: RuntimeError, index -100 is out of bounds for dimension 1 with size 4
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel


def run(rank, world_size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    seen = list(program(rank, world_size))
    if rank == 0:
        for line in seen:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def attempt(call):
    try:
        loss = call()
    except (IndexError, RuntimeError) as e:
        return f"{type(e).__name__}, {str(e).splitlines()[0]}"
    return f"{(loss.full_tensor() if isinstance(loss, DTensor) else loss).item():.4f}"


def with_backward(loss):
    with loss_parallel():
        loss.backward()
    return loss


def sharded(logits, targets, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with loss_parallel():
        return F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), targets, **options)


def program(rank, world_size):
    logits = torch.zeros(4, 4, requires_grad=True)  # each row's loss is log 4
    past = torch.tensor([6, 1, 2, 3])
    yield f"target past the vocabulary, whole: {attempt(lambda: F.cross_entropy(logits, past))}"
    yield f"target past the vocabulary, loss_parallel: {attempt(lambda: sharded(logits, past))}"
    yield f"the other rows' sum / all rows: {F.cross_entropy(logits[1:], past[1:], reduction='sum').item() / 4:.4f}"
    ignored, weight = torch.tensor([-100, 1, 2, 3]), torch.ones(4)
    yield f"ignored target, weights, whole: {attempt(lambda: with_backward(F.cross_entropy(logits, ignored, weight)))}"
    yield f"ignored target, weights, loss_parallel: {attempt(lambda: with_backward(sharded(logits, ignored, weight=weight)))}"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
target past the vocabulary, whole: IndexError, Target 6 is out of bounds.
target past the vocabulary, loss_parallel: 1.0397
the other rows' sum / all rows: 1.0397
ignored target, weights, whole: 1.3863
ignored target, weights, loss_parallel: RuntimeError, index -100 is out of bounds for dimension 1 with size 4
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
