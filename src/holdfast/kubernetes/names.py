"""Names that the operator and the processes in its pods share: of objects, labels, variables, ports and folders."""

from __future__ import annotations

import re

COORDINATOR_PORT = 7077
AGENT_PORT = 7079
"""An agent's port. It is open once the agent has joined. The agent reports there whether it has a connection to its coordinator,
see `protocol.network.endpoint`."""

CONFIG_FOLDER = "/etc/holdfast"
"""Folder with `token` from the job's Secret and `spec.json` from its ConfigMap, readable only by the pod's group."""
TOKEN_FILE = "token"  # noqa: S105 - a name
SPEC_FILE = "spec.json"
"""A `protocol.job.JobSpec`."""
STATE_FOLDER = "/var/lib/holdfast"
"""A writable folder that is deleted with the pod."""
CODE_FOLDER = "/opt/holdfast/code"
"""Folder with the files of `spec.run.code`."""
TERMINATION_FILE = "/dev/termination-log"
"""File in which a coordinator's process leaves its `TerminationMessage` as JSON. Kubernetes puts it into the pod's status."""

HOME_VARIABLE = "HOLDFAST_HOME"
"""So that `kubectl exec POD -- holdfast status` finds the job."""
JOB_VARIABLE = "HOLDFAST_JOB"
NODE_VARIABLE = "HOLDFAST_NODE"
"""The pod's name, which is the node's."""
HOST_VARIABLE = "HOLDFAST_HOST"
"""The pod's address."""
MACHINE_VARIABLE = "HOLDFAST_MACHINE"
"""The machine's name in the cluster."""
COORDINATOR_VARIABLE = "HOLDFAST_COORDINATOR"
"""`host:port` of the coordinator, with a name that always leads to the newest one."""
GRACE_VARIABLE = "HOLDFAST_GRACE_S"
"""Seconds from SIGTERM until the agent has to be gone."""

LABEL_JOB = "holdfast.dev/job"
LABEL_ROLE = "holdfast.dev/role"
LABEL_TERM = "holdfast.dev/term"
LABEL_RUN = "holdfast.dev/run"
NOTE_SPEC = "holdfast.dev/spec-hash"
NOTE_PLACE = "holdfast.dev/place"
"""Annotation of a node's pod: its machine's place, as `zone/block/rack`. Empty: not known yet; see also `NO_PLACE`."""
NOTE_AVOIDS = "holdfast.dev/avoids"
"""Annotation of a node's pod: the machines on which it must not run, as of its creation, separated by commas."""
NO_PLACE = "-"
"""Value of `NOTE_PLACE` if the machine's labels do not describe its place."""
PLACE_FILE = "place"
"""File in the configuration folder with the annotation `NOTE_PLACE`, which the kubelet updates."""
NOTE_FAULT = "holdfast.dev/fault"
"""Annotation of a Node: why a job wants the machine not to be used. Removing it declares the machine healthy."""
NOTE_WATCH = "holdfast.dev/watch"
"""Annotation of a Node: why the machine's own watch reports it as sick. Removing it declares the machine healthy."""
HEALTH_CONDITION = "HoldfastHealth"
"""Condition of a Node, from the machine's own watch. True: the machine is sick."""
TAINT_UNHEALTHY = "holdfast.dev/unhealthy"
NODE_ROLE, COORDINATOR_ROLE = "node", "coordinator"
LABEL_MANAGER = "app.kubernetes.io/managed-by"
MANAGER = "holdfast-operator"
"""Value of `LABEL_MANAGER` on objects that the operator watches."""
LABEL_WORKLOAD = "holdfast.dev/workload"
"""Label of a node's pod: the Kueue Workload whose quota it uses."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of the job's object, as on every kind of job that Kueue queues."""
LABEL_POD_SET = "kueue.x-k8s.io/podset"
"""Label of a pod whose machine Kueue chooses: the pod set of its Workload to which it belongs."""
NOTE_WORKLOAD = "kueue.x-k8s.io/workload"
"""Annotation of a pod whose machine Kueue chooses: its Workload."""
GATE_TOPOLOGY = "kueue.x-k8s.io/topology"
"""Scheduling gate that Kueue removes from a pod when it has chosen the pod's machine."""
LABEL_HOST = "kubernetes.io/hostname"
"""Label of a machine: its name."""
FINALIZER = "holdfast.dev/save"
"""Finalizer with which the job's object stays until its state is saved."""
NOTE_SKIP_SAVE = "holdfast.dev/skip-save"
"""Annotation of the job's object: delete it without saving."""


def node_name(job: str, number: int) -> str:
    """The name of a node and its pod."""
    return f"{job}-n{number}"


def coordinator_name(job: str, term: int) -> str:
    """The name of the coordinator's pod of a term."""
    return f"{job}-c{term}"


def labels(job: str, role: str = "", term: int | None = None) -> dict[str, str]:
    """The labels of every object of a job. role: of a pod; term: of a coordinator's pod. Pods also have `LABEL_RUN`."""
    return (
        {"app.kubernetes.io/name": "holdfast", LABEL_MANAGER: MANAGER, LABEL_JOB: job}
        | ({LABEL_ROLE: role} if role else {})
        | ({} if term is None else {LABEL_TERM: str(term)})
    )


def service_name(job: str) -> str:
    """The name of the Service in front of the coordinator."""
    return f"{job}-coordinator"


def config_name(job: str) -> str:
    """The name of the job's Secret and ConfigMap."""
    return f"{job}-holdfast"


def workload_name(job: str, number: int | None) -> str:
    """The name of a Kueue Workload. number: of a further node, from 1; None: the base, for the coordinator, the spares and the
    minimum number of nodes."""
    return f"{job}-base" if number is None else f"{job}-plus-{number}"


def number_of(job: str, pod: str) -> int | None:
    """The number of the node whose pod has this name; None: it is not the name of a node's pod."""
    return _number(f"{job}-n", pod)


def term_of(job: str, pod: str) -> int | None:
    """The term of the coordinator whose pod has this name; None: it is not the name of a coordinator's pod."""
    return _number(f"{job}-c", pod)


def further_node_of(job: str, workload: str) -> int | None:
    """The number of the further node whose Workload has this name; None: it is not the name of such a Workload."""
    return _number(f"{job}-plus-", workload)


def _number(prefix: str, name: str) -> int | None:
    rest = name.removeprefix(prefix)
    # Only canonical numbers: otherwise pods named `n01` and `n1` would count as the same node.
    return int(rest) if rest != name and re.fullmatch("0|[1-9][0-9]{0,8}", rest) else None
