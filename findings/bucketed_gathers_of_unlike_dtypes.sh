#!/usr/bin/env bash
# Inductor's bucketing of all-gathers, mode "custom_ops_multidtype": the wire's dtype is expected to be bytes or the widest.
# It is that with the smallest item: a float32 shard travels as twice as many bfloat16 elements, which are no numbers. Who
# reads dtype or element count of a bucket's gather, or sums it, reads it wrong. By default neighbours only of the same
# dtype are joined.
#
# Seen on 2026-11-28 with torch 2.13.0, Python 3.11, on the CPU:
#   None: 3 gathers: torch.bfloat16 x 16384, torch.float32 x 16384, torch.bfloat16 x 4096
#   custom_ops_multidtype: 1 gathers: torch.bfloat16 x 53248
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
import torch
import torch.distributed as dist
from torch._inductor.fx_passes.bucketing import bucket_all_gather
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
c10d = torch.ops._c10d_functional


def f(a, b, c):
    name = dist.group.WORLD.group_name
    gathered = [c10d.all_gather_into_tensor(x, 4, name) for x in (a, b, c)]
    return [c10d.wait_tensor(x) for x in gathered]


for mode in (None, "custom_ops_multidtype"):
    bf16, f32 = torch.bfloat16, torch.float32
    args = torch.ones(64, 64, dtype=bf16), torch.ones(64, 64, dtype=f32), torch.ones(32, 32, dtype=bf16)
    graph = make_fx(f, tracing_mode="fake")(*args)
    bucket_all_gather(graph, mode=mode) if mode else bucket_all_gather(graph)
    gathers = [n for n in graph.graph.nodes if "all_gather_into_tensor" in str(n.target)]
    sizes = [f"{n.meta['val'].dtype} x {n.meta['val'].numel()}" for n in gathers]
    print(f"{mode}: {len(gathers)} gathers: {', '.join(sizes)}")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
None: 3 gathers: torch.bfloat16 x 16384, torch.float32 x 16384, torch.bfloat16 x 4096
custom_ops_multidtype: 1 gathers: torch.bfloat16 x 53248
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
