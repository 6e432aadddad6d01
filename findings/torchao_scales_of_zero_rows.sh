#!/usr/bin/env bash
# torchao's row-wise fp8: a row of zeros (a padding token, a dead expert) is expected to come back as zeros. Its scale is 0
# and its numbers are 0 / 0: NaN, which dequantize() gives, too. tensor_to_scale of the same package clamps instead.
#
# Seen on 2026-11-28 with torch 2.13.0, torchao 0.18.0, Python 3.11, on the CPU:
#   scales: ['0', '0.03348']
#   NaN by row: [16, 0]
#   tensor_to_scale of the zeros: 4.48e+14
#
# Exits with 0 as long as that is so. FINDINGS_VENV names an environment that has the packages; else one is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENV:-$folder/venv}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet torch==2.13.0 torchao==0.18.0 numpy
fi
cat > "$folder/program.py" <<'PROGRAM'
import logging

logging.disable(logging.WARNING)
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale
from torchao.quantization import Float8Tensor
from torchao.quantization.granularity import PerRow

x = torch.stack([torch.zeros(16), torch.arange(16.0)])
quantised = Float8Tensor.from_hp(x, granularity=PerRow())
print("scales:", [f"{scale:.4g}" for scale in quantised.scale.flatten().tolist()])
back = quantised.dequantize()
print("NaN by row:", back.isnan().sum(1).tolist())
scale = tensor_to_scale(
    x, torch.float8_e4m3fn, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1
)
print("tensor_to_scale of the zeros:", f"{scale.flatten()[0].item():.4g}")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
scales: ['0', '0.03348']
NaN by row: [16, 0]
tensor_to_scale of the zeros: 4.48e+14
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
"$venv/bin/python" program.py > seen
cat seen
diff expected seen
