#!/usr/bin/env bash
# What to run on a machine with an NVIDIA GPU: agreement on the device, then times.
#
#   bench/gpu.sh [report]        writes the report to the file named, gpu-report.txt
#
# PYTHON names the interpreter of an environment with tokenmill[worker,gpu,dev] and a
# CUDA build of torch. Exits with the first failure's status.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
report="${1:-gpu-report.txt}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET

run() {
    {
        echo "== $1"
        date -u +%FT%TZ
    } | tee -a "$report"
    shift
    "$@" 2>&1 | tee -a "$report"
}

: >"$report"
run "device and versions" "$python" - <<'PYTHON'
import bitsandbytes, torch, triton

if not torch.cuda.is_available():
    raise SystemExit("error: torch sees no CUDA device; install a CUDA build of torch")
for index in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(index)
    print(index, device.name, f"capability {device.major}.{device.minor}",
          f"{device.total_memory >> 20} MiB")
print("torch", torch.__version__, "triton", triton.__version__,
      "bitsandbytes", bitsandbytes.__version__)
PYTHON
run "kernels against the reference, on the device" \
    env TOKENMILL_TEST_DEVICE=cuda "$python" -m pytest tests/kernels_gpu -q
run "times of the kernels" "$python" bench/gpu_kernels.py
if "$python" bench/engine.py --help | grep -q -- --device; then
    run "the engine" "$python" bench/engine.py --device cuda --against hf-static
else
    run "the engine" echo "bench/engine.py has no --device: the engine runs on the CPU"
fi
echo "report: $report"
