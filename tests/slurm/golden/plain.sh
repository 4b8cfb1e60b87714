#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120
#SBATCH --chdir=/work
#SBATCH --output='/shared/holdfast home/jobs/train'/slurm-%j.out
#SBATCH --open-mode=append
export HOLDFAST_HOME='/shared/holdfast home'
exec PYTHON -P -m holdfast.engines.slurm '--job-dir=/shared/holdfast home/jobs/train'
