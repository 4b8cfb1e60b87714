"""What `holdfast run --engine kubernetes` can be told beside what every engine can."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from holdfast.protocol.options import Option

# As run_options.py: read by `holdfast --help`, so nothing that is slow to import.


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Of the object and its pods. Whatever else a pod needs is in a template."""

    image: Annotated[
        str, Option(usual=True, metavar="IMAGE", help="Image of the nodes, with Holdfast and PyTorch.")
    ] = ""
    namespace: Annotated[
        str,
        Option(
            names=("--namespace", "-n"),
            metavar="NAME",
            default="the context's",
            help="Where the job's object is made.",
        ),
    ] = ""
    context: Annotated[
        str, Option(metavar="NAME", default="the current one", help="Of the kubeconfig: which cluster.")
    ] = ""
    queue: Annotated[
        str,
        Option(metavar="NAME", default="none", help="Kueue's LocalQueue, in which the job waits for quota."),
    ] = ""
    queue_topology: Annotated[
        str,
        Option(
            metavar="required=LABEL|preferred=LABEL",
            default="the queue's",
            help="With --queue: Kueue chooses machines for which this label has one value; it is a level of Kueue's Topology.",
        ),
    ] = ""
    gang: Annotated[
        str | None,
        Option(
            choices=("KAI", "PodGroup", "Volcano"),
            default="pods one by one",
            help="Has this scheduler bind the nodes of --nnodes MIN together, or none. PodGroup: Kubernetes' own, from 1.37 on.",
        ),
    ] = None
    gang_queue: Annotated[
        str,
        Option(metavar="NAME", default="Volcano's default", help="KAI's or Volcano's queue, with --gang."),
    ] = ""
    in_image: Annotated[
        bool,
        Option(
            help="SCRIPT is a path in the image. Otherwise the file is sent along, alone, in a ConfigMap."
        ),
    ] = False
    node_cpus: Annotated[
        str, Option(metavar="N", help="Processors of each node, as Kubernetes writes them: 8 or 500m.")
    ] = ""
    node_memory: Annotated[
        str, Option(metavar="SIZE", help="Memory of each node, as Kubernetes writes it, for example 64Gi.")
    ] = ""
    node_gpus: Annotated[int, Option(metavar="N", least=0, help="NVIDIA GPUs of each node.")] = 0
    pod_template: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="YAML of a pod template whose container `worker` becomes the node: volumes, tolerations, secrets.",
        ),
    ] = None
