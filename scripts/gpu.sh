#!/usr/bin/env bash
# The first hour on a machine with GPUs: what it is, whether kernels compute what they should, how fast training is,
# whether memory is what was planned, how jobs end, and whether engines serve the heads. Offline, with what is
# installed; one screen at the end, and after each stage in gpu_report.md.
#
#   bash scripts/gpu.sh [--stages machine kernels ...] [--minutes 20] [--total_minutes 60] [--model DIR]
#                       [--output_dir out/gpu] [--work_dir DIR]
#   bash scripts/gpu.sh --device cpu --tiny      the same code in minutes, where there is no GPU
#
#   SWIFTLITE_PYTHON  the interpreter that has swiftlite's requirements (default: of .venv in the checkout, else python3)
#
# Where a command may take ten minutes, scripts/gpu_offline.sh runs it in three calls.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# As `swiftlite megatron` sets it: stages that call Python do not come by the command line.
[ -n "${PYTORCH_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "${SWIFTLITE_PYTHON:-$python}" "$root/scripts/gpu" "$@"
