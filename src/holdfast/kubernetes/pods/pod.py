"""What the operator provides to the processes in a job's pods: variables, files, and the job's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.engines import jobs
from holdfast.engines.folders import prepare_folder
from holdfast.errors import Damaged, UsageError
from holdfast.kubernetes.names import (
    CONFIG_FOLDER,
    HOST_VARIABLE,
    NO_PLACE,
    NODE_VARIABLE,
    PLACE_FILE,
    SPEC_FILE,
    TOKEN_FILE,
)
from holdfast.protocol.job import JobSpec
from holdfast.protocol.place import NodePlace, parse_place
from holdfast.protocol.wire.stored import decode_file

IDENTITY = "pod"
"""Identity of the snapshot memory. It belongs to one pod and ends with it, so that a restarted container finds only its own
job's."""
PLACE_S = 20.0
"""Seconds that an agent's start waits for its place. A kubelet usually passes on a new annotation within 1 or 2 s, else after a
minute."""
LOOK_S = 0.1
_specs = msgspec.json.Decoder(JobSpec)


@dataclass(frozen=True, kw_only=True)
class PodPlace:
    """A pod, as its own processes see it."""

    name: str
    host: str
    """Its address."""
    spec: JobSpec
    token: str
    folder: Path
    """The job's folder, on the pod's own volume."""

    def prepare(self) -> None:
        """Prepares the job's folder, unless an earlier container of this pod did."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        prepare_folder(self.folder, self.spec, self.token, IDENTITY)


def read_place(config: Path, wait_s: float = PLACE_S) -> NodePlace:
    """The place of the pod's machine, from the operator's annotation; empty: not known.

    Waits up to `wait_s` for the annotation, because a pod is created before it has a machine.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            text = (config / PLACE_FILE).read_text().strip()
        except OSError:
            return ()  # the operator knows of no places
        if text:
            break
        # A node can train without a place, so it does not wait any longer for an operator that is away.
        if time.monotonic() >= end:
            return ()
        time.sleep(LOOK_S)
    try:
        return () if text == NO_PLACE else parse_place(text)
    except ValueError:
        return ()


def read_pod(environ: Mapping[str, str] = os.environ, config: Path = Path(CONFIG_FOLDER)) -> PodPlace:
    """Reads what the operator provides.

    Raises:
        UsageError: something is missing, because this process is not in a pod of a HoldfastJob.
    """
    missing = [name for name in (NODE_VARIABLE, HOST_VARIABLE) if not environ.get(name)]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} not set: this program runs only in the pods of a HoldfastJob"
        )
    try:
        token = (config / TOKEN_FILE).read_text().strip()
        spec = decode_file(
            _specs.decode,
            config / SPEC_FILE,
            f"{config / SPEC_FILE} was written by another version of Holdfast",
        )
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; the job's Secret and ConfigMap must be mounted at {config}"
        ) from None
    except Damaged as error:
        raise UsageError(f"{error}; install the operator's version of Holdfast in the image") from None
    return PodPlace(
        name=environ[NODE_VARIABLE],
        host=environ[HOST_VARIABLE],
        spec=spec,
        token=token,
        folder=jobs.job_dir(jobs.check_name(spec.name)),
    )
