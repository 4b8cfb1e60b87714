#!/usr/bin/env bash
# A real Kubernetes on one machine: etcd, API server, scheduler, controller-manager and DNS here, and four nodes, each
# with a kubelet, containerd and kube-proxy in network, process and mount namespaces of its own, on one bridge. Needs
# root, and Kubernetes' programs in the folder KUBE_BIN; installs Debian's packages where they are missing.
#
#   cluster.sh with COMMAND...     starts it, runs the command with KUBECONFIG and HOLDFAST_KUBE_DIR set, ends it
#   cluster.sh kill|boot NODE      power loss (every process of the node and its memory); power on, with its disk
#   cluster.sh boot NODE SIZE      power on, with an empty disk of this size for what the kubelet keeps, the pods' folders too
#   cluster.sh cut|heal NODE       its network cable
#   cluster.sh block|unblock NODE  its way to the API server alone, also that of its pods
#   cluster.sh freeze|thaw NODE    all its processes stand still; its kernel answers
#   cluster.sh exec NODE COMMAND   runs a command on the node
#   cluster.sh apiserver stop|start
#   cluster.sh etcd freeze|thaw    the API server answers, and can read and write nothing
#   cluster.sh controllers freeze|thaw  nothing follows from an object: no account for a namespace, no pod for a Deployment
#   cluster.sh dns stop|start      its name service
#   cluster.sh resolve NAME        whether the cluster's name service knows it
#   cluster.sh missing             what it lacks: packages, programs
set -euo pipefail

NODES=${HOLDFAST_KUBE_NODES:-4}
NEEDS=(busybox-static conntrack containerd containernetworking-plugins curl iproute2 iptables openssl runc)
PROGRAMS=(etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet coredns)
WAIT_S=${HOLDFAST_KUBE_START:-120}
# After so long without a word of its kubelet, Kubernetes calls a node not ready. 40 s by default.
NODE_GRACE=${HOLDFAST_KUBE_GRACE:-12s}
# Feature gates of the control plane, and APIs that it serves beside its own: GenericWorkload=true and scheduling.k8s.io/v1beta1=true
# are gang scheduling on 1.37.
GATES=${HOLDFAST_KUBE_GATES:+--feature-gates=$HOLDFAST_KUBE_GATES}
APIS=${HOLDFAST_KUBE_APIS:+--runtime-config=$HOLDFAST_KUBE_APIS}
# Clusters with different numbers (up to 9) can stand beside each other: their addresses and names are different.
SLOT=${HOLDFAST_KUBE_SLOT:-0}
NAME=hfkube${SLOT#0}
# 6: the nodes, the pods and the services have addresses of IPv6 alone. As long as this machine forwards for them it takes no
# route from a router's advertisements.
if [ "${HOLDFAST_KUBE_FAMILY:-4}" = 6 ]; then
  HOST=fd79:$SLOT::1 HOSTS=fd79:$SLOT::/64 PODS=fd80:$SLOT::/48 SERVICES=fd81:$SLOT::/112 SERVICE=fd81:$SLOT::1
  API=https://[$HOST]:16443 ANYWHERE=::/0 IPTABLES=ip6tables FORWARDS=net.ipv6.conf.all.forwarding
  address() { echo "fd79:$SLOT::$((10 + ${1#n}))"; }
  pods() { echo "fd80:$SLOT:0:${1#n}::/64"; }
else
  HOST=10.79.$SLOT.1 HOSTS=10.79.$SLOT.0/24 PODS=10.$((80 + 10 * SLOT)).0.0/16 SERVICES=10.81.$SLOT.0/24 SERVICE=10.81.$SLOT.1
  API=https://$HOST:16443 ANYWHERE=0.0.0.0/0 IPTABLES=iptables FORWARDS=net.ipv4.ip_forward
  address() { echo "10.79.$SLOT.$((10 + ${1#n}))"; }
  pods() { echo "10.$((80 + 10 * SLOT)).${1#n}.0/24"; }
fi
ETCD=http://127.0.0.1:$((12479 + 10 * SLOT))
ETCD_PEERS=http://127.0.0.1:$((12480 + 10 * SLOT))
IMAGE=holdfast.test/holdfast:1
SELF=$(readlink -f "$0")
HERE=$(dirname "$SELF")
PACKAGES=$HERE/../packages.sh
PYTHON=${PYTHON:-$HERE/../../.venv/bin/python}
# As it is from everywhere, and not where the link leads: an environment's Python is found by its own path.
PYTHON=$(realpath -sm "$PYTHON")
names() { seq -f n%g 1 "$NODES"; }

no_programs() { # those of Kubernetes that are not in KUBE_BIN
  local p
  for p in "${PROGRAMS[@]}"; do [ -x "${KUBE_BIN:-/nowhere}/$p" ] || echo "$p"; done | xargs
}

prepare() {
  local missing
  if [ "$(id -u)" != 0 ]; then
    echo "the nodes of the test cluster are namespaces, which only root can make" >&2
    exit 1
  fi
  missing=$(no_programs)
  if [ -n "$missing" ]; then
    echo "make kube-test needs KUBE_BIN, a folder with Kubernetes' programs; there is no $missing in ${KUBE_BIN:-(not set)}." >&2
    echo "docs/kubernetes.md#testing-on-a-real-cluster says where they come from." >&2
    exit 1
  fi
  "$PACKAGES" install "the test cluster" "${NEEDS[@]}"
}

# ------------------------------------------------------------ the control plane

run() { # NAME COMMAND...: in the background, its process id in pid/NAME
  local name=$1
  shift
  setsid "$@" </dev/null >>"$D/log/$name.log" 2>&1 7>&- 8>&- 9>&- &
  echo $! >"$D/pid/$name"
  disown
}

certificate() { # NAME SUBJECT [ALTERNATIVE NAMES]
  openssl req -newkey rsa:2048 -nodes -subj "$2" -keyout "pki/$1.key" -out "pki/$1.csr" 2>/dev/null
  openssl x509 -req -in "pki/$1.csr" -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 30 -out "pki/$1.crt" \
    -extfile <(echo "${3:+subjectAltName=$3}") 2>/dev/null
}

certificates() {
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=holdfast-test -keyout pki/ca.key -out pki/ca.crt 2>/dev/null
  certificate api /CN=kube-apiserver \
    "IP:$HOST,IP:127.0.0.1,IP:$SERVICE,DNS:localhost,DNS:kubernetes.default.svc,DNS:kubernetes.default"
  certificate to-kubelet /O=system:masters/CN=apiserver-kubelet
  openssl genrsa -out pki/accounts.key 2048 2>/dev/null
  openssl rsa -in pki/accounts.key -pubout -out pki/accounts.pub 2>/dev/null
  # A token and not a certificate: it is also what the tests and the nodes show, and it ends with this folder.
  token=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
  (umask 077 && echo "$token,admin,admin,\"system:masters\"" >pki/tokens.csv)
  cat >kubeconfig <<CONF
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "$API", certificate-authority: "$D/pki/ca.crt"}}]
users: [{name: admin, user: {token: "$token"}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
CONF
}

apiserver() {
  run apiserver "$KUBE_BIN/kube-apiserver" --etcd-servers=$ETCD --bind-address=$HOST --advertise-address=$HOST \
    --secure-port=16443 --tls-cert-file=pki/api.crt --tls-private-key-file=pki/api.key --client-ca-file=pki/ca.crt \
    --token-auth-file=pki/tokens.csv --authorization-mode=Node,RBAC --service-cluster-ip-range=$SERVICES \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=pki/accounts.pub \
    --service-account-signing-key-file=pki/accounts.key --kubelet-client-certificate=pki/to-kubelet.crt \
    --kubelet-client-key=pki/to-kubelet.key --kubelet-preferred-address-types=InternalIP --allow-privileged=true \
    --enable-aggregator-routing=true $GATES $APIS
}

until_ready() { # WHAT COMMAND...
  local what=$1 end=$((SECONDS + WAIT_S))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ]; then
      echo "$what did not start in $WAIT_S s; the end of what was said:" >&2
      tail -n 15 "$D"/log/* >&2 || true
      exit 1
    fi
    sleep 0.1
  done
}

ask() { curl -sf --max-time 5 --cacert "$D/pki/ca.crt" -H "Authorization: Bearer $(cut -d, -f1 "$D/pki/tokens.csv")" "$API$1"; }
answers() { [ "$(ask /readyz)" = ok ]; }
all_ready() {
  [ "$(ask /api/v1/nodes | tr -d ' \n' | grep -o '"type":"Ready","status":"True"\|"status":"True",[^}]*"type":"Ready"' | wc -l)" = "$NODES" ]
}

control_plane() {
  run etcd "$KUBE_BIN/etcd" --data-dir "$D/etcd" --listen-client-urls $ETCD --advertise-client-urls $ETCD \
    --listen-peer-urls $ETCD_PEERS --initial-advertise-peer-urls $ETCD_PEERS \
    --initial-cluster default=$ETCD_PEERS --unsafe-no-fsync=true
  apiserver
  until_ready "the API server" answers
  run controllers "$KUBE_BIN/kube-controller-manager" --kubeconfig=kubeconfig --root-ca-file=pki/ca.crt \
    --service-account-private-key-file=pki/accounts.key --leader-elect=false --node-monitor-period=1s \
    --node-monitor-grace-period="$NODE_GRACE" --secure-port=0 --use-service-account-credentials $GATES
  run scheduler "$KUBE_BIN/kube-scheduler" --kubeconfig=kubeconfig --leader-elect=false --secure-port=0 $GATES
  cat >Corefile <<CONF
cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {
  bind $HOST
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    kubeconfig $D/kubeconfig test
    pods insecure
    ttl 5
  }
  cache 5
}
CONF
  dns
}

# Runs Nodes that have no kubelet, and says of their pods what a kubelet would.
kwok() {
  run kwok "$KUBE_BIN/kwok" --kubeconfig=kubeconfig --config="$KUBE_BIN/kwok-stages.yaml" \
    --manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake --server-address=127.0.0.1:$((12481 + 10 * SLOT))
}

dns() { run dns "$KUBE_BIN/coredns" -conf Corefile; }

# ------------------------------------------------------------ nodes

cables() {
  local n
  sysctl -n $FORWARDS >"$D/forwarded"
  sysctl -qw $FORWARDS=1
  ip link add "$NAME" type bridge
  place "$HOST" "$NAME"
  ip link set "$NAME" up
  for n in $(names); do
    ip netns add "$NAME-$n"
    ip link add "$NAME$n" type veth peer name eth0 netns "$NAME-$n"
    ip link set "$NAME$n" master "$NAME"
    ip -n "$NAME-$n" link set lo up
    place "$(address "$n")" eth0 -n "$NAME-$n"
    ip -n "$NAME-$n" link set eth0 up
    ip -n "$NAME-$n" route add default via "$HOST"
    ip netns exec "$NAME-$n" sysctl -qw $FORWARDS=1
    plug "$n"
  done
}

place() { # ADDRESS LINK [-n NAMESPACE]: without asking the others first whether they have it, which takes IPv6 a second
  local nodad=
  [[ $1 != *:* ]] || nodad=nodad
  ip "${@:3}" addr add "$1/${HOSTS#*/}" dev "$2" $nodad
}

plug() {
  ip link set "$NAME$1" up
  # The kernel forgets a route when its cable is out.
  ip route replace "$(pods "$1")" via "$(address "$1")"
}

no_cables() {
  local n
  for n in $(names); do
    ip netns del "$NAME-$n" 2>/dev/null || true
    ip link del "$NAME$n" 2>/dev/null || true
  done
  ip link del "$NAME" 2>/dev/null || true
}

# A node's pods have a cgroup of its own above them, so no kubelet takes another one's pods for orphans.
groups() {
  local n=$1 group
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "/sys/fs/cgroup/$NAME-$n"
    return
  fi
  for group in /sys/fs/cgroup/*/; do mkdir -p "$group/$NAME-$n" 2>/dev/null || true; done
  for group in cpus mems; do
    cat "/sys/fs/cgroup/cpuset/cpuset.$group" >"/sys/fs/cgroup/cpuset/$NAME-$n/cpuset.$group" 2>/dev/null || true
  done
}

configure_node() {
  local n=$1 d=$D/$1
  mkdir -p "$d"/cni
  # Of the runtime: no registry is there, so the pods' first container is of the one image that there is. runc may not
  # lower oom_score_adj where this machine is itself a container.
  cat >"$d/containerd.toml" <<CONF
version = 2
root = "$d/root"
state = "$d/state"
[grpc]
address = "$d/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "$IMAGE"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "$D/image/container.json"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$d/cni"
CONF
  cat >"$d/cni/10.conflist" <<CONF
{"cniVersion": "0.3.1", "name": "$n", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": {"type": "host-local", "dataDir": "$d/addresses",
   "ranges": [[{"subnet": "$(pods "$n")"}]], "routes": [{"dst": "$ANYWHERE"}]}},
  {"type": "loopback"}]}
CONF
  cat >"$d/kubelet.yaml" <<CONF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: "$D/pki/ca.crt"}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /$NAME-$n
failCgroupV1: false
failSwapOn: false
nodeStatusUpdateFrequency: 2s
evictionPressureTransitionPeriod: 10s
evictionHard: {memory.available: "50Mi", nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
healthzPort: 0
clusterDomain: cluster.local
clusterDNS: ["$HOST"]
resolvConf: ""
podLogsDir: $d/pods
CONF
  # What a machine does as it comes up. Memory and locks of the last time are gone: /run is new. What the disk holds
  # stays, images and the kubelet's notes among them.
  cat >"$d/start.sh" <<'CONF'
#!/bin/bash
set -eu
D=$1 n=$2 address=$3 d=$1/$2 small=${5:-}
hostname "$n"
mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir -p /var/lib/kubelet
mount -t tmpfs tmpfs /var/lib/kubelet
mkdir -p "$d/kubelet"
[ -z "$small" ] || mount -t tmpfs -o "size=$small" tmpfs "$d/kubelet"
rm -rf "$d/state" "$d/containerd.sock" "$d/addresses"
containerd --config "$d/containerd.toml" &
until [ -S "$d/containerd.sock" ] && ctr -a "$d/containerd.sock" -n k8s.io images ls -q >"$d/images" 2>/dev/null; do sleep 0.1; done
[ -s "$d/images" ] || ctr -a "$d/containerd.sock" -n k8s.io images import "$D/image/image.tar" >/dev/null
"$KUBE_BIN/kube-proxy" --kubeconfig="$D/kubeconfig" --hostname-override="$n" --proxy-mode=iptables --cluster-cidr="$4" \
  --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 \
  --healthz-bind-address=127.0.0.1:10256 --metrics-bind-address=127.0.0.1:10249 &
exec "$KUBE_BIN/kubelet" --config="$d/kubelet.yaml" --kubeconfig="$D/kubeconfig" --root-dir="$d/kubelet" \
  --container-runtime-endpoint="unix://$d/containerd.sock" --hostname-override="$n" --node-ip="$address" \
  --node-labels="topology.kubernetes.io/zone=z$((${n#n} % 2))"
CONF
  chmod +x "$d/start.sh"
}

boot() { # NODE [SIZE]: the process in pid/power-NODE is the power switch: with it everything on the node ends, its mounts too
  local n=$1
  plug "$n"
  groups "$n"
  # nsenter, for `ip netns exec` hides /sys/fs/cgroup.
  run "power-$n" nsenter --net="/run/netns/$NAME-$n" unshare --pid --fork --kill-child=KILL --mount --mount-proc --uts --ipc \
    env KUBE_BIN="$KUBE_BIN" "$D/$n/start.sh" "$D" "$n" "$(address "$n")" "$PODS" "${2:-}"
}

# Before kube-proxy has led a pod's word to the service's address to the API server's own.
api_path() { # NODE -I|-D
  ip netns exec "$NAME-$1" $IPTABLES -w -t raw "$2" PREROUTING -d "$SERVICE" -j DROP 2>/dev/null
  ip netns exec "$NAME-$1" $IPTABLES -w "$2" OUTPUT -p tcp -d "$HOST" --dport 16443 -j DROP 2>/dev/null
}

power_off() {
  local f=$D/pid/power-$1
  # The cable first. A machine without power answers nobody, and the kernel of a namespace whose processes were killed
  # would still close their connections.
  ip link set "$NAME$1" down 2>/dev/null || true
  end_of "$f" KILL
  forget "$1"
}

# What a machine's kernel forgets without power. This one's keeps the network of a killed pod while a connection of it waits for
# answers, for two minutes, and answers for its address, which is another pod's after the boot.
forget() {
  local link
  for link in $(ip -n "$NAME-$1" -o link 2>/dev/null | cut -d: -f2 | cut -d@ -f1); do
    case $link in lo | eth0) ;; *) ip -n "$NAME-$1" link del "$link" 2>/dev/null || true ;; esac
  done
  ip -n "$NAME-$1" neigh flush all 2>/dev/null || true
}

first_of() { # NODE: the process that all others there descend from, as this machine numbers it
  pgrep -P "$(<"$D/pid/power-$1")"
}

end_of() { # PID FILE [SIGNAL]: asks the process to end, and waits for it
  local pid end=$((SECONDS + 10))
  pid=$(cat "$1" 2>/dev/null) || return 0
  rm -f "$1"
  kill -"${2:-TERM}" "$pid" 2>/dev/null || return 0
  # Not `kill -0`: that also finds a process which has ended, for as long as nobody has asked how.
  while readlink "/proc/$pid/exe" >/dev/null && [ $SECONDS -lt $end ]; do sleep 0.05; done
  kill -KILL "$pid" 2>/dev/null || true
}

# ------------------------------------------------------------ all of it

image() {
  mkdir -p image
  "$PYTHON" "$HERE/image.py" "$IMAGE" image/image.tar
  ctr oci spec | "$PYTHON" "$HERE/image.py" --container >image/container.json
}

start() {
  no_cables
  mkdir -p "$D"/{pki,log,pid}
  chmod 700 "$D/pki"
  cd "$D"
  cables
  certificates
  image &
  local making=$!
  control_plane
  wait $making
  local n
  for n in $(names); do
    configure_node "$n"
    boot "$n"
  done
  until_ready "a node" all_ready
}

stop() {
  trap - EXIT INT TERM
  local n f
  for n in $(names); do power_off "$n"; done
  for f in kwok dns scheduler controllers apiserver etcd; do end_of "$D/pid/$f"; done
  no_cables
  # Not while a cluster of another number needs it.
  ip -o link show type bridge | grep -q ': hfkube' || [ ! -s "$D/forwarded" ] || sysctl -qw "$FORWARDS=$(<"$D/forwarded")"
  # A cgroup is removed by rmdir alone, with all below it before.
  find /sys/fs/cgroup/"$NAME"-n* /sys/fs/cgroup/*/"$NAME"-n* -depth -type d -exec rmdir {} + 2>/dev/null || true
  [ -n "${HOLDFAST_KUBE_KEEP:-}" ] || rm -rf "$D"
}

case ${1:-} in
  missing)
    missing=$("$PACKAGES" missing "${NEEDS[@]}")
    programs=$(no_programs)
    echo "${missing}${programs:+${missing:+, }and in KUBE_BIN $programs}"
    ;;
  with)
    shift
    prepare
    exec 7>"/tmp/holdfast-kube${SLOT#0}.lock" # one at a time: the addresses are the same
    flock 7
    D=$(mktemp -d /tmp/holdfast-kube-XXXXXX)
    # Pods' users read the code of their image through this folder.
    chmod 755 "$D"
    back=$PWD
    export HOLDFAST_KUBE_DIR=$D KUBECONFIG=$D/kubeconfig HOLDFAST_KUBE_CLUSTER=$SELF HOLDFAST_KUBE_IMAGE=$IMAGE KUBE_BIN
    trap stop EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    start
    echo "Kubernetes, $NODES nodes, after $SECONDS s" >&2
    cd "$back"
    "$@" 7>&-
    ;;
  kill | boot | cut | heal | block | unblock | freeze | thaw | exec | apiserver | etcd | controllers | dns | kwok | resolve)
    D=${HOLDFAST_KUBE_DIR:?set by: cluster.sh with COMMAND}
    cd "$D"
    case $1 in
      kill) power_off "$2" ;;
      boot) boot "$2" "${3:-}" ;;
      cut) ip link set "$NAME$2" down ;;
      heal) plug "$2" ;;
      block) api_path "$2" -I ;;
      unblock) api_path "$2" -D || true ;;
      freeze | thaw)
        signal=STOP
        [ "$1" = freeze ] || signal=CONT
        # -1: all but the sender and the namespace's first, which is the kubelet.
        first=$(first_of "$2")
        nsenter -t "$first" -p -m sh -c "kill -$signal -1"
        kill -$signal "$first"
        ;;
      exec)
        first=$(first_of "$2")
        shift 2
        exec nsenter -t "$first" -n -m -p -u -i "$@"
        ;;
      dns) if [ "$2" = stop ]; then end_of "$D/pid/dns"; else dns; fi ;;
      kwok) if [ "$2" = stop ]; then end_of "$D/pid/kwok"; else kwok; fi ;;
      resolve) busybox nslookup "$2" "$HOST" >/dev/null 2>&1 ;;
      etcd | controllers)
        [ "$2" = thaw ] || kill -STOP "$(<"$D/pid/$1")"
        [ "$2" = freeze ] || kill -CONT "$(<"$D/pid/$1")"
        ;;
      apiserver)
        if [ "$2" = stop ]; then
          end_of "$D/pid/apiserver"
        elif [ "$2" = kill ]; then
          end_of "$D/pid/apiserver" KILL
        else
          apiserver
          until_ready "the API server" answers
        fi
        ;;
    esac
    ;;
  *)
    sed -n '2,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
