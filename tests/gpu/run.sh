#!/usr/bin/env bash
# Conformance of the CUDA operators, on a machine with a Hopper GPU and vLLM's CUDA build.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python3 -m pytest tests/gpu -q -p no:cacheprovider "$@"
