#!/usr/bin/env bash
# Submits the job, follows it, and goes on following if called again. --dry-run shows the batch script.
# Not run here: no GPU was at hand.
set -euo pipefail
exec holdfast run --engine slurm --job llama3-8b --partition gpu --time 2-00:00:00 --requeue \
  --nnodes 8:32 --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --snapshot-memory 400G --checkpoint /scratch/llama3-8b,every=30m,keep=2 \
  --preload torch,transformers.models.llama.modeling_llama \
  "$@" recipes/train.py recipes/llama3-8b-pretrain/8b.toml
