#!/bin/bash
#SBATCH --job-name=train+1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --chdir=/work
#SBATCH --output='/shared/holdfast home/jobs/train'/slurm-%j.out
#SBATCH --partition=gpu
#SBATCH --time=4:00:00
#SBATCH --account=physics
#SBATCH --gpus-per-node=8
#SBATCH --qos=high
#SBATCH --constraint=h200
#SBATCH --exclude=n2,n7
#SBATCH --time=95
export HOLDFAST_HOME='/shared/holdfast home'
exec PYTHON -P -m holdfast.engines.slurm.node '--job-dir=/shared/holdfast home/jobs/train'
