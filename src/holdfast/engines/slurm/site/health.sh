#!/bin/bash
# HealthCheckProgram: drains this node when Holdfast's basic checks find it faulty. Where something cannot be found out
# nothing is done. HOLDFAST: the command, if it is not in PATH.
set -u
node=${SLURMD_NODENAME:-$(hostname -s)}
cd /tmp || exit 0
said=$(HOLDFAST_HOME=$(mktemp -d) timeout 50 "${HOLDFAST:-holdfast}" check 2>&1)
[ $? = 1 ] || exit 0
reason=$(grep -m 1 -i faulty <<<"$said" | tr -s ' ' | cut -c1-150)
scontrol update nodename="$node" state=drain reason="holdfast: ${reason:-a basic check failed}"
exit 0
