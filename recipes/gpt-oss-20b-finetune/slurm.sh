#!/usr/bin/env bash
# Submits the job, follows it, and goes on following if called again. --dry-run shows the batch script.
# Not run here: no GPU was at hand.
set -euo pipefail
exec holdfast run --engine slurm --job gpt-oss-20b --partition gpu --time 1-00:00:00 --requeue \
  --nnodes ${NODES:-4:16} --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --snapshot-memory 800G --checkpoint /scratch/gpt-oss-20b,every=30m,keep=2 \
  --preload torch,transformers.models.gpt_oss.modeling_gpt_oss \
  "$@" recipes/train.py recipes/gpt-oss-20b-finetune/${RECIPE:-20b.toml}
