#!/usr/bin/env bash
# Builds the programs of the test cluster from Go modules, each from a module of a few lines beside this script.
#
#   build.sh FOLDER                  all of them, of the versions below
#   build.sh FOLDER kube 1.34.4      one, of another version
#
# Needs Go 1.25 or newer and its module proxy; no git, no container. About ten minutes on two cores.
set -euo pipefail

HERE=$(dirname "$(readlink -f "$0")")
declare -A VERSIONS=([etcd]=3.6.16 [kube]=1.37.2 [coredns]=1.13.1 [kueue]=0.15.2 [kwok]=0.8.0)
PARTS=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet)
PYTHON=${PYTHON:-$HERE/../../../.venv/bin/python}
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

go_module() { # NAME GO-VERSION REQUIREMENT
  printf 'module test%s\ngo %s\nrequire %s\n' "$1" "$2" "$3" >go.mod
}

module_folder() { go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)",/\1/p'; }

# k8s.io/kubernetes is no library: its go.mod takes its own parts from folders of its repository. Here they are taken from
# the modules that are published of them: 1.37.2 has them as 0.37.2.
kube_module() {
  local theirs parts=0.${1#1.}
  theirs=$(go mod download -json "k8s.io/kubernetes@v$1" | sed -n 's/.*"GoMod": "\(.*\)",/\1/p')
  {
    echo "module testkube"
    grep '^go ' "$theirs"
    echo "require k8s.io/kubernetes v$1"
    sed -n 's|^\s*\(k8s.io/[a-z-]*\) => ./staging.*|replace \1 => \1 v'"$parts"'|p' "$theirs"
  } >go.mod
}

# Without these a component says that it is v0.0.0, and others refuse to work with it.
kube_version() {
  local at=k8s.io/component-base/version minor=${1#1.}
  echo "-X $at.gitVersion=v$1 -X $at.gitMajor=1 -X $at.gitMinor=${minor%%.*} -X $at.gitTreeState=archive" \
    "-X $at.gitCommit=module -X k8s.io/client-go/pkg/version.gitVersion=v$1"
}

build() { # NAME VERSION
  local name=$1 version=$2 flags="" what=. work
  work=$(mktemp -d)
  # Of this program alone: several may be built at once.
  cp "$HERE/$name"/*.go "$work" 2>/dev/null || true
  pushd "$work" >/dev/null
  case $name in
    kube)
      kube_module "$version"
      flags=$(kube_version "$version")
      ;;
    etcd) go_module etcd 1.24.0 "go.etcd.io/etcd/server/v3 v$version" ;;
    coredns) go_module coredns 1.24.0 "github.com/coredns/coredns v$version" ;;
    kueue)
      go_module kueue 1.25.0 "sigs.k8s.io/kueue v$version"
      flags="-X sigs.k8s.io/kueue/pkg/version.GitVersion=v$version"
      what=sigs.k8s.io/kueue/cmd/kueue
      "$PYTHON" "$HERE/kueue/bundle.py" "$(module_folder "sigs.k8s.io/kueue@v$version")" >"$OUT/kueue.yaml"
      ;;
    kwok)
      go_module kwok 1.25.0 "sigs.k8s.io/kwok v$version"
      what=sigs.k8s.io/kwok/cmd/kwok
      stages "$(module_folder "sigs.k8s.io/kwok@v$version")" >"$OUT/kwok-stages.yaml"
      ;;
  esac
  go mod tidy
  # -s -w: without names of symbols, which are half of the size.
  go build -trimpath -ldflags "-s -w $flags" -o "$OUT/$name" "$what"
  popd >/dev/null
  rm -rf "$work"
  if [ "$name" = kube ]; then
    # One program, which is the component whose name it is called by.
    for part in "${PARTS[@]}"; do ln -sf kube "$OUT/$part"; done
  fi
}

stages() { # what kwok does with nodes and pods: ready at once, gone at once
  local at=$1/kustomize/stage file
  for file in "$at/node/fast/node-initialize.yaml" "$at"/node/heartbeat-with-lease/node-*.yaml "$at"/pod/general/pod-{create,init-container-running,init-container-completed,ready,complete,delete}.yaml; do
    echo ---
    cat "$file"
  done
}

OUT=$(readlink -m "${1:?where to: build.sh FOLDER [NAME [VERSION]]}")
mkdir -p "$OUT"
for name in ${2:-etcd kube coredns kueue kwok}; do
  [ -n "${VERSIONS[$name]:-}" ] || { echo "no such program: $name; there are ${!VERSIONS[*]}" >&2; exit 2; }
  echo "$name ${3:-${VERSIONS[$name]}}" >&2
  build "$name" "${3:-${VERSIONS[$name]}}"
done
