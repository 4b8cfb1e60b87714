"""What `holdfast run --engine kubernetes` can be told beside what every engine can."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from holdfast.protocol.options import Option

# As run_options.py: read by `holdfast run --help`, so nothing that is slow to import.


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Of the object and its pods. Whatever else a pod needs is in a template."""

    image: Annotated[
        str,
        Option(usual=True, metavar="IMAGE", help="Container image of the nodes, with Holdfast and PyTorch."),
    ] = ""
    namespace: Annotated[
        str,
        Option(
            names=("--namespace", "-n"),
            metavar="NAME",
            default="the context's",
            help="Namespace in which the job's object is created.",
        ),
    ] = ""
    context: Annotated[
        str,
        Option(
            metavar="NAME",
            default="the current context",
            help="Context of the kubeconfig, which selects the cluster.",
        ),
    ] = ""
    queue: Annotated[
        str,
        Option(metavar="NAME", default="none", help="LocalQueue of Kueue in which the job waits for quota."),
    ] = ""
    queue_topology: Annotated[
        str,
        Option(
            metavar="required=LABEL|preferred=LABEL",
            default="the queue's",
            help=(
                "With --queue: required=LABEL or preferred=LABEL. Kueue chooses machines that have the same value of "
                "this label, which must be a level of Kueue's Topology."
            ),
        ),
    ] = ""
    gang: Annotated[
        str | None,
        Option(
            choices=("KAI", "PodGroup", "Volcano"),
            default="pods one by one",
            help=(
                "Let this scheduler bind either all nodes of --nnodes MIN or none. PodGroup is Kubernetes' own, from "
                "version 1.37 on."
            ),
        ),
    ] = None
    gang_queue: Annotated[
        str,
        Option(
            metavar="NAME",
            default="Volcano's default",
            help="With --gang KAI or Volcano: the queue of that scheduler.",
        ),
    ] = ""
    in_image: Annotated[
        bool,
        Option(
            help=(
                "SCRIPT is a path in the image. Without this option the script, but no other file, is sent along in "
                "a ConfigMap."
            )
        ),
    ] = False
    node_cpus: Annotated[
        str, Option(metavar="N", help="Processors of each node, in Kubernetes' notation: 8 or 500m.")
    ] = ""
    node_memory: Annotated[
        str, Option(metavar="SIZE", help="Memory of each node, in Kubernetes' notation, for example 64Gi.")
    ] = ""
    node_gpus: Annotated[int, Option(metavar="N", least=0, help="NVIDIA GPUs of each node.")] = 0
    pod_template: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=(
                "YAML file with a pod template for the nodes (volumes, tolerations, secrets). Its container `worker` "
                "runs the node."
            ),
        ),
    ] = None
