#!/usr/bin/env bash
# What to run on a machine with an NVIDIA GPU and no network: agreement of every kernel
# with the reference, its time against its floor, the engine against transformers, and
# MPS (a daemon of its own) where NVIDIA's control program is on PATH.
#
#   bench/gpu.sh [report]          under 8 minutes, whatever happens
#   bench/gpu.sh --cpu-smoke       the same script on a tiny model in Triton's interpreter
#
# PYTHON names the interpreter of an environment with tokenmill[worker,gpu,dev] and a
# CUDA build of torch. The report (gpu-report.txt by default) ends with one JSON line.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
if [ "${1:-}" = "--cpu-smoke" ]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    exec timeout -k 5 910 "$python" bench/gpu.py --cpu-smoke
fi
unset TRITON_INTERPRET
report="${1:-gpu-report.txt}"
# The stages end by themselves after 450 s in all; this bounds even their end.
timeout -k 5 470 "$python" bench/gpu.py | tee "$report"
echo "report: $report"
