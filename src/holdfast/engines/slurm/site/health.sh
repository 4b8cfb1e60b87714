#!/bin/bash
# HealthCheckProgram: drains this node when Holdfast's basic checks find it faulty. Where something cannot be found out
# nothing is done, nor where the node is kept out already, for that has a reason of its own.
# HOLDFAST: the command, if it is not in PATH. SLURM_CONF, if it is not where Slurm's commands look for it.
set -u
node=${SLURMD_NODENAME:-$(hostname -s)}
cd /tmp || exit 0
# slurmd answers before it runs this, so Slurm may ask again before the check is over: one at a time.
{ exec 9>"/run/holdfast-health-$node.lock"; } 2>/dev/null && { flock --nonblock 9 || exit 0; }
said=$(timeout 50 "${HOLDFAST:-holdfast}" check 2>&1)
[ $? = 1 ] || exit 0
case $(sinfo --noheader --nodes="$node" --format=%T) in *drain* | *down*) exit 0 ;; esac
reason=$(grep -m 1 -i faulty <<<"$said" | tr -s ' ' | cut -c1-150)
scontrol update nodename="$node" state=drain reason="holdfast:${reason:- a basic check failed}"
exit 0
