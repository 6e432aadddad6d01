# torchrun --nproc-per-node 2 quickstart.py
import os

import torch
import torch.distributed as dist
from weft.fused_ops import fused_all_gather_matmul, fused_matmul_reduce_scatter, last_plan

on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # else CPU ranks
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
x, w_up, w_down = (torch.randn(*size, device=device) for size in [(128, 64), (64, 96), (96, 64)])
group = dist.group.WORLD

_, (h,) = fused_all_gather_matmul(x, [w_up], 0, group, return_A=False)  # all_gather(x) @ w_up
y = fused_matmul_reduce_scatter(h.relu(), w_down, "sum", 0, group)  # reduce_scatter(h.relu() @ w_down)
print(f"rank {dist.get_rank()}: {list(x.shape)} -> {list(h.shape)} -> {list(y.shape)}, {last_plan()}")
dist.destroy_process_group()
