#!/usr/bin/env bash
# Submits the job, follows it, and goes on following if called again. --dry-run shows the batch script.
# Not run here: no GPU was at hand.
set -euo pipefail
exec holdfast run --engine slurm --job mathstral-7b --partition gpu --time 2-00:00:00 --requeue \
  --nnodes 8:32 --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --snapshot-memory 350G --checkpoint /scratch/mathstral-7b,every=30m,keep=2 \
  --preload torch,transformers.models.mistral.modeling_mistral \
  "$@" recipes/train.py recipes/mathstral-7b/7b.toml
