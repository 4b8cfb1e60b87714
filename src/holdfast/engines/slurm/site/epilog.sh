#!/bin/bash
# Epilog: ends agents and workers of the job that got away from its step. Slurm's own tracking of processes finds them
# where it uses cgroups.
set -u
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
for environment in /proc/[0-9]*/environ; do
  pid=${environment#/proc/}
  pid=${pid%/environ}
  tr '\0' '\n' <"$environment" 2>/dev/null | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID" || continue
  tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q 'holdfast\.agent\|holdfast\.engines\.slurm' || continue
  kill -KILL "$pid" 2>/dev/null # its workers end with it
done
exit 0
