#!/usr/bin/env bash
# The adapters' tests with another version of a framework: with-version.sh transformers==5.20.0 [pytest's arguments]
#
# The version goes into an environment of its own (.venv-transformers==5.20.0), which takes everything else from .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$1
shift
framework=${version%%[=[]*}
also=() only=()
case $framework in
transformers) tests="tests/adapters/test_trainer.py tests/adapters/test_trainer_refused.py tests/adapters/test_trainer_snapshots.py tests/adapters/test_sharded_trainer.py" ;;
lightning) tests="tests/adapters/test_lightning.py tests/adapters/test_lightning_snapshots.py" ;;
accelerate) tests="tests/adapters/test_accelerate.py tests/adapters/test_accelerate_snapshots.py" ;;
trl) tests="tests/adapters/test_trainer.py -k trl" also=(peft) ;;
deepspeed) tests="tests/adapters/test_deepspeed.py" also=(ninja) ;;
ray) tests="tests/adapters/test_ray.py" ;;
megatron-bridge) # its other requirements are for CUDA, and most of them cannot be installed without
  tests="tests/adapters/test_megatron_bridge.py" only=(--no-deps)
  also=(megatron-core==0.16.1 nvidia-resiliency-ext==0.4.1 nvidia-modelopt==0.47.0 omegaconf==2.4.0 'antlr4-python3-runtime==4.9.*'
    hydra-core==1.3.8 transformers==4.57.6 'huggingface-hub==0.36.*' 'tokenizers==0.22.*' 'datasets==4.1.*' 'fsspec<2025.10'
    'dill<0.4.1' einops triton pulp scipy defusedxml) ;;
torchtitan) tests="tests/adapters/test_torchtitan.py tests/adapters/test_titan.py" also=(triton) ;; # which torch for CPUs does not bring
*) echo "there are no tests for $framework" >&2 && exit 2 ;;
esac

environment=$PWD/.venv-$version
if [ ! -e "$environment/.ready" ]; then
  rm -rf "$environment"
  .venv/bin/python -m venv "$environment"
  # Below its own packages in the search path, so that its own version wins.
  .venv/bin/python -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$(echo "$environment"/lib/python3*/site-packages)/shared.pth"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${only[@]}" "$version" "${also[@]}"
  touch "$environment/.ready"
fi
# The nested environment does not read the .pth file of an editable install.
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p out/adapters
# Without -p no:cacheprovider two environments would share what failed last.
"$environment/bin/python" -m pytest -p no:cacheprovider -m "nightly or not nightly" \
  --junitxml "out/adapters/$version.xml" $tests "$@"
