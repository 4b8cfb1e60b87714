#!/usr/bin/env bash
# Runs a command beside a real S3 server, Ceph's gateway, and stops the server when the command has ended:
#
#     tests/s3/with-store.sh pytest -m s3 tests/s3
#     tests/s3/with-store.sh missing                the packages that it would install
#
# The server is one monitor, one storage daemon that keeps its bytes in memory, and the gateway, all on loopback and
# free ports, as children of this script. The command finds endpoint, keys and bucket in its environment.
set -euo pipefail

NEEDS=(ceph-mon ceph-osd radosgw ceph-common)
PACKAGES=$(dirname "$0")/../packages.sh
WAIT_S=60 # for each daemon to answer
STORE_BYTES=$((1 << 30)) # a full store hangs: tests stay far below
export AWS_ACCESS_KEY_ID=holdfast AWS_SECRET_ACCESS_KEY AWS_REGION=us-east-1 HOLDFAST_S3_BUCKET=checkpoints

free_ports() {
  python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*[s.getsockname()[1] for s in held])'
}

configure() {
  local classes
  classes=$(compgen -G '/usr/lib/*/rados-classes' || compgen -G '/usr/lib/rados-classes')
  cat >"$CEPH_CONF" <<CONF
[global]
fsid = $FSID
mon initial members = a
mon host = [v2:127.0.0.1:$MON_PORT,v1:127.0.0.1:$MON_V1_PORT]
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
# Without keys there is nothing to encrypt with.
ms mon client mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
ms bind ipv6 = false
run dir = $HOME_DIR
admin socket = $HOME_DIR/\$name.asok
pid file =
log file = $HOME_DIR/\$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
# The machine's disk may be nearly full without harm to a store in memory.
mon data avail crit = 1
mon data avail warn = 2
[mon.a]
mon data = $HOME_DIR/mon
[osd.0]
osd data = $HOME_DIR/osd
osd objectstore = memstore
memstore device bytes = $STORE_BYTES
osd class dir = ${classes%%$'\n'*}
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:$S3_PORT
CONF
}

started() { # name, command...: a child, its output in a file
  local name=$1
  shift
  "$@" >"$HOME_DIR/$name.out" 2>&1 &
  CHILDREN=("$!" "${CHILDREN[@]}")
}

answers() { # what, command...
  local what=$1 end=$((SECONDS + WAIT_S))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ "$SECONDS" -ge "$end" ]; then
      echo "$what did not start in $WAIT_S s; the end of what it said:" >&2
      tail -n 20 "$HOME_DIR"/*.out "$HOME_DIR"/*.log >&2 || true
      exit 1
    fi
    sleep 0.1
  done
}

stop() {
  trap - EXIT INT TERM
  for pid in "${CHILDREN[@]}"; do # gateway first
    kill -CONT "$pid" 2>/dev/null || true
    kill -KILL "$pid" 2>/dev/null || true # nothing of it is kept
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$HOME_DIR"
}

if [ "${1:-}" = missing ]; then
  exec "$PACKAGES" missing "${NEEDS[@]}"
fi
"$PACKAGES" install "the S3 server" "${NEEDS[@]}"
HOME_DIR=$(mktemp -d)
CHILDREN=()
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export CEPH_CONF=$HOME_DIR/ceph.conf
FSID=$(cat /proc/sys/kernel/random/uuid)
AWS_SECRET_ACCESS_KEY=$(cat /proc/sys/kernel/random/uuid)
read -r MON_PORT MON_V1_PORT S3_PORT < <(free_ports)
export AWS_ENDPOINT_URL=http://127.0.0.1:$S3_PORT

mkdir "$HOME_DIR/mon" "$HOME_DIR/osd"
configure
monmaptool --create --fsid "$FSID" --addv a "[v2:127.0.0.1:$MON_PORT,v1:127.0.0.1:$MON_V1_PORT]" "$HOME_DIR/monmap" >/dev/null
ceph-mon --mkfs -i a --monmap "$HOME_DIR/monmap"
started mon ceph-mon -f -i a
answers "the monitor" timeout 5 ceph mon stat
OSD=$(cat /proc/sys/kernel/random/uuid)
timeout 30 ceph osd new "$OSD" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$OSD" >"$HOME_DIR/mkfs.out" 2>&1
timeout 30 ceph osd crush add osd.0 1.0 root=default host=here >/dev/null 2>&1
started osd ceph-osd -f -i 0
answers "the storage daemon" bash -c 'timeout 5 ceph osd stat | grep -q "1 up"'
timeout 60 radosgw-admin user create --uid holdfast --display-name holdfast --access-key "$AWS_ACCESS_KEY_ID" \
  --secret-key "$AWS_SECRET_ACCESS_KEY" >"$HOME_DIR/user.out" 2>&1
started gateway radosgw -f -n client.rgw.a
export HOLDFAST_S3_GATEWAY_PID=${CHILDREN[0]}
answers "the gateway" python3 "$(dirname "$0")/bucket.py"
echo "S3 server: $(radosgw --version | cut -d' ' -f1-3) at $AWS_ENDPOINT_URL after $SECONDS s" >&2

"$@"
