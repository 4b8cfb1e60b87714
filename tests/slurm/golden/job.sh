#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --chdir=/work
#SBATCH --output='/shared/holdfast home/jobs/train'/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --time=4:00:00
#SBATCH --account=physics
#SBATCH --gpus-per-node=8
#SBATCH --qos=high
#SBATCH --constraint=h200
export HOLDFAST_HOME='/shared/holdfast home'
exec PYTHON -P -m holdfast.engines.slurm '--job-dir=/shared/holdfast home/jobs/train'
