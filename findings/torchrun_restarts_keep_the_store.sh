#!/usr/bin/env bash
# torchrun --max-restarts=1, whose ranks set a key in the default group's store and end with an error at their first
# start. Ranks that are started again are expected to find an empty store: torch's source says that each retry has a
# new one. They find the key, and the number that the earlier ones had counted: whatever ranks post or count there (also
# addresses of gloo's pairs) is still the dead ranks'. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone the
# store is new. (https://github.com/pytorch/pytorch/issues/135712)
#
# Seen on 2026-12-01 with torch 2.13.0, Python 3.11, on the CPU:
#   as it is: start 0 found False and counted 1; start 1 found True and counted 2
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: start 0 found False and counted 1; start 1 found False and counted 1
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
import os
import sys
from datetime import timedelta

from torch.distributed import rendezvous

start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=60)))  # as init_process_group has it
if rank == 0:
    found, counted = store.check(["a key"]), store.add("counted", 1)
    store.set("a key", "of the first start")
    with open(sys.argv[1], "a") as seen:
        seen.write(f"start {start} found {found} and counted {counted}\n")
store.set(f"start {start} of {rank}", "")
store.wait([f"start {start} of {each}" for each in range(2)], timedelta(seconds=60))
sys.exit(start == "0")
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
as it is: start 0 found False and counted 1; start 1 found True and counted 2
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: start 0 found False and counted 1; start 1 found False and counted 1
EXPECTED
cd "$folder"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONWARNINGS=ignore
for shared in 0 1; do
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$shared timeout 120 "$venv/bin/python" -m torch.distributed.run --standalone \
        --nproc-per-node=2 --max-restarts=1 program.py "$folder/of$shared" >> log 2>&1 || { cat log; exit 1; }
done
{
    echo "as it is: $(paste -sd ';' of0 | sed 's/;/; /')"
    echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: $(paste -sd ';' of1 | sed 's/;/; /')"
} > seen
cat seen
diff expected seen
