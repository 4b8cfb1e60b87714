#!/usr/bin/env bash
# A real Slurm on one machine: slurmctld here, and six nodes, each with network, process, mount, name and memory
# namespaces of its own, on one bridge. Needs root; installs Debian's packages where they are missing.
#
#   cluster.sh with COMMAND...     starts it, runs the command with SLURM_CONF and HOLDFAST_SLURM_DIR set, ends it
#   cluster.sh kill|boot NODE      power loss (every process of the node and its memory); power on again
#   cluster.sh exchange NODE       power loss; another machine has its place and name
#   cluster.sh cut|heal NODE       its network cable
#   cluster.sh exec NODE COMMAND   runs a command on the node
#   cluster.sh slurmctld stop|start
#   cluster.sh missing             the packages that it would install
set -euo pipefail

NODES=6
NEEDS=(iproute2 munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd)
WAIT_S=60
NET=10.77.0
SELF=$(readlink -f "$0")
PACKAGES=$(dirname "$SELF")/../packages.sh
names() { seq -f n%g 1 $NODES; }
address() { echo "$NET.$((10 + ${1#n}))"; }

packages() {
  if [ "$(id -u)" != 0 ]; then
    echo "the nodes of the test cluster are namespaces, which only root can make" >&2
    exit 1
  fi
  "$PACKAGES" install "the test cluster" "${NEEDS[@]}"
}

configure() {
  mkdir -p "$D"/{state,spool,log,pid,munge,shared,machines,none}
  chmod 755 "$D" "$D"/{state,spool,log,pid}
  chmod 1777 "$D/shared"
  chmod 711 "$D/munge"
  dd if=/dev/urandom of="$D/munge/key" bs=1024 count=1 status=none
  chmod 400 "$D/munge/key"
  {
    echo "127.0.0.1 localhost"
    echo "$NET.1 $(hostname -s)"
    for n in $(names); do echo "$(address "$n") $n"; done
  } >"$D/hosts"
  # cred_expire is also how long a requeued job waits (120 s by default). TRES selection, no accounting, no cgroups.
  cat >"$D/slurm.conf" <<CONF
ClusterName=holdfast
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=17002
SlurmdPort=17003
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/munge/munge.sock,cred_expire=5
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/pid/slurmctld.pid
SlurmdPidFile=$D/pid/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
SlurmctldDebug=debug2
SlurmdDebug=verbose
LogTimeFormat=iso8601_ms
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=${SLURMD_TIMEOUT:-30}
SlurmctldTimeout=30
MessageTimeout=4
TCPTimeout=2
KillWait=10
BatchStartTimeout=5
UnkillableStepTimeout=20
InactiveLimit=0
MinJobAge=300
JobRequeue=1
ReturnToService=1
RebootProgram=$D/reboot.sh
TaskProlog=$D/identity.sh
SlurmctldParameters=reboot_from_controller
SlurmdParameters=config_overrides
CONF
  for n in $(names); do
    echo "NodeName=$n NodeHostname=$n NodeAddr=$(address "$n") CPUs=4 CoresPerSocket=4 RealMemory=4000 State=UNKNOWN"
  done >>"$D/slurm.conf"
  cat >>"$D/slurm.conf" <<CONF
PartitionName=train Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=8
PartitionName=urgent Nodes=n[1-$NODES] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=n[1-$NODES] MaxTime=2 State=UP PriorityTier=1
CONF
  cat >"$D/reboot.sh" <<SCRIPT
#!/bin/bash
for node in \$(SLURM_CONF=$D/slurm.conf scontrol show hostnames "\$1"); do
  HOLDFAST_SLURM_DIR=$D $SELF kill \$node
  HOLDFAST_SLURM_DIR=$D $SELF boot \$node
done
SCRIPT
  # Where this runs in a container, the nodes seem to be containers too, whose machine-id counts for nothing.
  cat >"$D/identity.sh" <<'SCRIPT'
#!/bin/bash
echo "export HOLDFAST_NODE_IDENTITY=machine-id:$(</etc/machine-id)"
SCRIPT
  chmod +x "$D/reboot.sh" "$D/identity.sh"
}

cables() {
  ip link add hfslurm type bridge
  ip addr add "$NET.1/24" dev hfslurm
  ip link set hfslurm up
  for n in $(names); do
    ip netns add "hfslurm-$n"
    ip link add "hfslurm$n" type veth peer name eth0 netns "hfslurm-$n"
    ip link set "hfslurm$n" master hfslurm up
    ip -n "hfslurm-$n" link set lo up
    ip -n "hfslurm-$n" addr add "$(address "$n")/24" dev eth0
    ip -n "hfslurm-$n" link set eth0 up
  done
}

no_cables() {
  for n in $(names); do ip netns del "hfslurm-$n" 2>/dev/null || true; done
  ip link del hfslurm 2>/dev/null || true
}

boot() { # the process in pid/power-NODE is the power switch: with it everything on the node ends
  local n=$1 id=$D/machines/$1
  [ -s "$id" ] || tr -d - </proc/sys/kernel/random/uuid >"$id" # whose history it is: not that of the machine below
  # `-b`: it came up just now, whatever the machine's uptime says. nsenter, for `ip netns exec` hides /sys/fs/cgroup.
  # env: slurmctld boots nodes too, and what it starts has its signals blocked, SIGHUP (a reconfiguration) among them.
  setsid nsenter --net="/run/netns/hfslurm-$n" unshare --pid --fork --kill-child=KILL --mount --mount-proc --uts --ipc \
    bash -c "hostname $n; mount --bind $D/hosts /etc/hosts; mount -t tmpfs -o size=1g,nosuid tmpfs /dev/shm; \
      mount --bind $id /etc/machine-id; [ ! -d /sys/class/dmi/id/ ] || mount --bind $D/none /sys/class/dmi/id/; \
      mkdir -p $D/spool/$n; exec env --default-signal slurmd -b -D -f $D/slurm.conf -N $n" \
    </dev/null >>"$D/log/boot-$n.log" 2>&1 7>&- 8>&- 9>&- &
  echo $! >"$D/pid/power-$n"
  disown
}

power_off() {
  local f=$D/pid/power-$1
  [ -s "$f" ] && kill -KILL "$(<"$f")" 2>/dev/null || true
  rm -f "$f"
}

controller() { (setsid slurmctld -f "$D/slurm.conf" </dev/null >/dev/null 2>&1 7>&- 8>&- 9>&-); }

end_of() { # a pid file: asks the process to end, and waits for it
  local pid end=$((SECONDS + 10))
  pid=$(cat "$1" 2>/dev/null) || return 0
  kill "$pid" 2>/dev/null || return 0
  while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.05; done
  kill -KILL "$pid" 2>/dev/null || true
}

stop() {
  trap - EXIT INT TERM
  for n in $(names); do power_off "$n"; done
  end_of "$D/pid/slurmctld.pid"
  end_of "$D/munge/munged.pid"
  no_cables
  for n in $(names); do rm -f "/run/holdfast-health-$n.lock"; done
  [ -n "${HOLDFAST_SLURM_KEEP:-}" ] || rm -rf "$D"
}

start() {
  no_cables
  configure
  cables
  munged --force --key-file="$D/munge/key" --socket="$D/munge/munge.sock" --pid-file="$D/munge/munged.pid" \
    --log-file="$D/munge/munged.log" --seed-file="$D/munge/seed" --num-threads=4 2>/dev/null 7>&- 8>&- 9>&-
  controller
  for n in $(names); do boot "$n"; done
  local end=$((SECONDS + WAIT_S))
  until [ "$(timeout 2 sinfo -h -N -p train -o %t 2>/dev/null | grep -c '^idle$')" = $NODES ]; do
    if [ $SECONDS -ge $end ]; then
      echo "Slurm did not start in $WAIT_S s; the end of what it said:" >&2
      tail -n 20 "$D"/log/* >&2 || true
      exit 1
    fi
    sleep 0.1
  done
}

case ${1:-} in
  missing) exec "$PACKAGES" missing "${NEEDS[@]}" ;;
  with)
    shift
    packages
    exec 7>/tmp/holdfast-slurm.lock # one at a time: the addresses are the same
    flock 7
    D=$(mktemp -d /tmp/holdfast-slurm-XXXXXX)
    export HOLDFAST_SLURM_DIR=$D SLURM_CONF=$D/slurm.conf HOLDFAST_SLURM_CLUSTER=$SELF
    trap stop EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    start
    echo "$(sinfo --version), $NODES nodes, after $SECONDS s" >&2
    "$@" 7>&-
    ;;
  kill | boot | exchange | cut | heal | exec | slurmctld)
    D=${HOLDFAST_SLURM_DIR:?set by: cluster.sh with COMMAND}
    export SLURM_CONF=$D/slurm.conf
    case $1 in
      kill) power_off "$2" ;;
      boot) boot "$2" ;;
      exchange)
        power_off "$2"
        rm -f "$D/machines/$2"
        boot "$2"
        ;;
      cut) ip link set "hfslurm$2" down ;;
      heal) ip link set "hfslurm$2" up ;;
      exec)
        first=$(pgrep -P "$(<"$D/pid/power-$2")")
        shift 2
        exec nsenter -t "$first" -n -m -p -u -i "$@"
        ;;
      slurmctld) if [ "$2" = stop ]; then end_of "$D/pid/slurmctld.pid"; else controller; fi ;;
    esac
    ;;
  *)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
