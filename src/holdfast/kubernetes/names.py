"""What the operator and the processes in its pods call the same things by: objects, labels, variables, ports, folders."""

from __future__ import annotations

import re

COORDINATOR_PORT = 7077
AGENT_PORT = 7079
"""Of an agent. Its port is open once it has joined, and it says there whether it hears its coordinator: `protocol.network.endpoint`."""

CONFIG_FOLDER = "/etc/holdfast"
"""Has `token` from the job's Secret and `spec.json` from its ConfigMap, readable by the pod's group alone."""
TOKEN_FILE = "token"  # noqa: S105 - a name
SPEC_FILE = "spec.json"
"""A `protocol.job.JobSpec`."""
STATE_FOLDER = "/var/lib/holdfast"
"""Writable, and gone with the pod."""
CODE_FOLDER = "/opt/holdfast/code"
"""Has the files of `spec.run.code`."""
TERMINATION_FILE = "/dev/termination-log"
"""Where a coordinator's process leaves how the job ended, as JSON: `TerminationMessage`. Kubernetes puts it into the pod's status."""

HOME_VARIABLE = "HOLDFAST_HOME"
"""So that `kubectl exec POD -- holdfast status` finds the job."""
JOB_VARIABLE = "HOLDFAST_JOB"
NODE_VARIABLE = "HOLDFAST_NODE"
"""The pod's name, which is the node's."""
HOST_VARIABLE = "HOLDFAST_HOST"
"""The pod's address."""
MACHINE_VARIABLE = "HOLDFAST_MACHINE"
"""The cluster's name of the machine."""
COORDINATOR_VARIABLE = "HOLDFAST_COORDINATOR"
"""`host:port`, by a name that is moved to the newest coordinator."""
GRACE_VARIABLE = "HOLDFAST_GRACE_S"
"""Seconds from SIGTERM until the agent has to be gone."""

LABEL_JOB = "holdfast.dev/job"
LABEL_ROLE = "holdfast.dev/role"
LABEL_TERM = "holdfast.dev/term"
LABEL_RUN = "holdfast.dev/run"
NOTE_SPEC = "holdfast.dev/spec-hash"
NOTE_PLACE = "holdfast.dev/place"
"""Of a node's pod: where its machine stands, as `zone/block/rack`. Empty: it is to come; see `NO_PLACE`."""
NOTE_AVOIDS = "holdfast.dev/avoids"
"""Of a node's pod: the machines, with commas, on which it was not to run when it was made."""
NO_PLACE = "-"
"""The machine's labels do not say it."""
PLACE_FILE = "place"
"""In the folder of the configuration: that annotation, kept up by the kubelet."""
NOTE_FAULT = "holdfast.dev/fault"
"""Of a Node: why a job does not want it used. Who removes it says that the machine is well."""
NOTE_WATCH = "holdfast.dev/watch"
"""Of a Node: why the watch of that machine calls it sick. Who removes it says that it is well."""
HEALTH_CONDITION = "HoldfastHealth"
"""Of a Node, from the watch of that machine. True: the machine is sick."""
TAINT_UNHEALTHY = "holdfast.dev/unhealthy"
NODE_ROLE, COORDINATOR_ROLE = "node", "coordinator"
LABEL_MANAGER = "app.kubernetes.io/managed-by"
MANAGER = "holdfast-operator"
"""Of that label: the operator watches what has it."""
LABEL_WORKLOAD = "holdfast.dev/workload"
"""Of a node's pod: the Kueue Workload whose quota it uses."""
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""Of the job's object, as for every kind of job that Kueue queues."""
LABEL_POD_SET = "kueue.x-k8s.io/podset"
"""Of a pod whose machine Kueue chooses: which pods of its Workload it is one of."""
NOTE_WORKLOAD = "kueue.x-k8s.io/workload"
"""Of such a pod: its Workload, as Kueue looks for it."""
GATE_TOPOLOGY = "kueue.x-k8s.io/topology"
"""The scheduling gate that Kueue takes from such a pod when it has chosen the machine."""
LABEL_HOST = "kubernetes.io/hostname"
"""Of a machine: its name."""
FINALIZER = "holdfast.dev/save"
"""The object stays until its state is saved."""
NOTE_SKIP_SAVE = "holdfast.dev/skip-save"
"""An annotation: delete without saving."""


def node_name(job: str, number: int) -> str:
    """Of a node and its pod."""
    return f"{job}-n{number}"


def coordinator_name(job: str, term: int) -> str:
    """Of the coordinator's pod of a term."""
    return f"{job}-c{term}"


def labels(job: str, role: str = "", term: int | None = None) -> dict[str, str]:
    """Of every object of a job. role: of a pod; term: of a coordinator's pod. A pod has its run as well."""
    return (
        {"app.kubernetes.io/name": "holdfast", LABEL_MANAGER: MANAGER, LABEL_JOB: job}
        | ({LABEL_ROLE: role} if role else {})
        | ({} if term is None else {LABEL_TERM: str(term)})
    )


def service_name(job: str) -> str:
    """Of the Service in front of the coordinator."""
    return f"{job}-coordinator"


def config_name(job: str) -> str:
    """Of the job's Secret, ConfigMap and Lease."""
    return f"{job}-holdfast"


def workload_name(job: str, number: int | None) -> str:
    """Of a Kueue Workload. number: of one further node, from 1 on; None: of the coordinator and the nodes that cannot be missed."""
    return f"{job}-base" if number is None else f"{job}-plus-{number}"


def number_of(job: str, pod: str) -> int | None:
    """Of a node's pod; None: it is called otherwise."""
    return _number(f"{job}-n", pod)


def term_of(job: str, pod: str) -> int | None:
    """Of a coordinator's pod; None: it is called otherwise."""
    return _number(f"{job}-c", pod)


def further_node_of(job: str, workload: str) -> int | None:
    """Of a further node's Workload; None: it is called otherwise."""
    return _number(f"{job}-plus-", workload)


def _number(prefix: str, name: str) -> int | None:
    rest = name.removeprefix(prefix)
    # A canonical number only: `n01` and `n1` would otherwise be one node under two names of pods.
    return int(rest) if rest != name and re.fullmatch("0|[1-9][0-9]{0,8}", rest) else None
