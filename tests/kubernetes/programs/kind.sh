#!/usr/bin/env bash
# A job on a laptop: a cluster of kind with three workers, the image, the operator, and a job whose node you can delete.
# Needs docker, kind and kubectl, and 8 GiB of memory.   kind.sh [up | down]
set -euo pipefail

NAME=holdfast
IMAGE=holdfast:kind
ROOT=$(cd "$(dirname "$(readlink -f "$0")")/../../.." && pwd)

need() {
  for program in "$@"; do
    command -v "$program" >/dev/null || { echo "kind.sh needs $program" >&2; exit 1; }
  done
}

up() {
  need docker kind kubectl
  cat <<CONF | kind create cluster --name "$NAME" --config -
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}, {role: worker}]
CONF
  docker build -t "$IMAGE" -f "$ROOT/deploy/kubernetes/Containerfile" "$ROOT"
  # There is no registry: the image is put onto every machine.
  kind load docker-image "$IMAGE" --name "$NAME"
  kubectl apply --server-side -f "$ROOT/src/holdfast/kubernetes/crd.yaml"
  sed "s|image: holdfast:latest|image: $IMAGE|" "$ROOT/deploy/kubernetes/operator.yaml" | kubectl apply -f -
  kubectl -n holdfast-system rollout status deployment/holdfast-operator --timeout=120s
  cat <<TEXT

Now, in the environment with holdfast-train[kubernetes]:
  holdfast run --engine kubernetes --image $IMAGE --nnodes 2 --spares 1 --node-memory 1500Mi --job hello tests/slurm/train_paced.py 600 0.1 /tmp/at-once
and in another terminal:
  kubectl delete pod hello-n0
TEXT
}

case ${1:-up} in
  up) up ;;
  down) kind delete cluster --name "$NAME" ;;
  *) sed -n '2,3p' "$0" >&2; exit 2 ;;
esac
