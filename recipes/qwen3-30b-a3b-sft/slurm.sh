#!/usr/bin/env bash
# Submits the job, follows it, and goes on following if called again. --dry-run shows the batch script.
# Not run here: no GPU was at hand.
set -euo pipefail
exec holdfast run --engine slurm --job qwen3-30b-sft --partition gpu --time 1-00:00:00 --requeue \
  --nnodes 4:16 --spares 1 --gpus-per-node 8 --nproc-per-node 8 \
  --snapshot-memory 1200G --checkpoint /scratch/qwen3-30b-sft,every=30m,keep=2 \
  --preload torch,transformers.models.qwen3_moe.modeling_qwen3_moe \
  "$@" recipes/train.py recipes/qwen3-30b-a3b-sft/30b.toml
