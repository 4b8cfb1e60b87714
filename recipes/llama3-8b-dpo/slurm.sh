#!/usr/bin/env bash
# Submits the job, follows it, and goes on following if called again. --dry-run shows the batch script.
# Not run here: no GPU was at hand.
set -euo pipefail
exec holdfast run --engine slurm --job llama3-8b-dpo --partition gpu --time 12:00:00 --requeue \
  --nnodes 1:8 --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --snapshot-memory 8G --checkpoint /scratch/llama3-8b-dpo,every=30m,keep=2 \
  --preload torch,transformers.models.llama.modeling_llama,trl \
  "$@" recipes/dpo.py recipes/llama3-8b-dpo/8b.toml
