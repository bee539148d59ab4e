#!/usr/bin/env bash
# Checks every Triton kernel on this machine's GPU against float64, then times it; a table comes last. Under 5 minutes.
#
#     benchmarks/device.sh | tee benchmarks/results/device-NAME.txt
#
# Needs torch, triton and numpy alone, and no installation. PYTHON names another interpreter; arguments go to device.py.
# With --dry-run first, the checks alone run, on small inputs, in Triton's interpreter: that tries this script, no GPU.
# Ends with 0 when all is right and every target met, 1 when not, 2 when there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset TRITON_INTERPRET
if [[ "${1:-}" == "--dry-run" ]]; then
    export TRITON_INTERPRET=1
    shift
fi
export PYTHONPATH="kernels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/device.py "$@"
