#!/usr/bin/env bash
# An eager nn.Embedding under RowwiseParallel, before a layer that is compiled. The embedding is expected to have the
# gradient that it has when nothing is compiled. Its output is an AsyncCollectiveTensor, which AOTAutograd unwraps before
# the graph is called, beside autograd: the backward raises; with fully_shard the gradient is zero, and nothing is raised.
#
# Seen on 2026-11-30 with torch 2.13.0, Python 3.11, on the CPU:
#   tensor parallel only, eager: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
#   tensor parallel only, aot_eager: AttributeError: 'Tensor' object has no attribute '_local_tensor'
#   tensor parallel only, inductor: AttributeError: 'Tensor' object has no attribute '_local_tensor'
#   tensor parallel only, aot_eager after a clone: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
#   fully_shard, eager: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
#   fully_shard, aot_eager: [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
#   fully_shard, inductor: [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
#   fully_shard, aot_eager after a clone: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def run(rank, world_size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    seen = list(program(rank, world_size))
    if rank == 0:
        for line in seen:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.embedding, self.layer, self.between = nn.Embedding(4, 2), nn.Linear(2, 2, bias=False), between

    def forward(self, tokens):
        return self.layer(self.between(self.embedding(tokens)))


def gradient(mesh, backend, sharded, between=lambda x: x):
    torch._dynamo.reset()
    model = Model(between)
    nn.init.ones_(model.layer.weight)
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, mesh["tensor"], plan)
    if backend:
        model.layer = torch.compile(model.layer, backend=backend)
    if sharded:
        fully_shard(model.layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    try:
        model(torch.arange(4)).sum().backward()
    except AttributeError as error:
        return f"AttributeError: {error}"
    return model.embedding.weight.grad.full_tensor().tolist()


def program(rank, world_size):
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    for sharded in (False, True):
        name = "fully_shard" if sharded else "tensor parallel only"
        for backend in (None, "aot_eager", "inductor"):
            yield f"{name}, {backend or 'eager'}: {gradient(mesh, backend, sharded)}"
        yield f"{name}, aot_eager after a clone: {gradient(mesh, 'aot_eager', sharded, torch.clone)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(2, folder + "/store"), nprocs=2, start_method="fork")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
tensor parallel only, eager: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
tensor parallel only, aot_eager: AttributeError: 'Tensor' object has no attribute '_local_tensor'
tensor parallel only, inductor: AttributeError: 'Tensor' object has no attribute '_local_tensor'
tensor parallel only, aot_eager after a clone: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
fully_shard, eager: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
fully_shard, aot_eager: [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
fully_shard, inductor: [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
fully_shard, aot_eager after a clone: [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
