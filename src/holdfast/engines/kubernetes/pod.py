"""What the processes in a job's pods are given by the operator: variables, files, and where the job's folder is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.engines import jobs
from holdfast.engines.folders import prepare_folder
from holdfast.engines.kubernetes.names import (
    CONFIG_FOLDER,
    HOST_VARIABLE,
    NODE_VARIABLE,
    SPEC_FILE,
    TOKEN_FILE,
)
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec

IDENTITY = "pod"
"""Of the snapshot memory. It is a pod's own and ends with it, so what a restarted container finds there is its job's."""
_specs = msgspec.json.Decoder(JobSpec)


@dataclass(frozen=True, kw_only=True)
class PodPlace:
    """A pod, seen from inside."""

    name: str
    host: str
    """Its address."""
    spec: JobSpec
    token: str
    folder: Path
    """The job's, on this pod's own volume."""

    def prepare(self) -> None:
        """Makes the job's folder, unless an earlier container of this pod did."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        prepare_folder(self.folder, self.spec, self.token, IDENTITY)


def read_pod(environ: Mapping[str, str] = os.environ, config: Path = Path(CONFIG_FOLDER)) -> PodPlace:
    """Reads what the operator gave.

    Raises:
        UsageError: something is missing: this process is in no pod of a HoldfastJob.
    """
    missing = [name for name in (NODE_VARIABLE, HOST_VARIABLE) if not environ.get(name)]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not set: this program is for the pods of a HoldfastJob")
    try:
        token = (config / TOKEN_FILE).read_text().strip()
        spec = _specs.decode((config / SPEC_FILE).read_bytes())
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; the job's Secret and ConfigMap are to be mounted at {config}"
        ) from None
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{config / SPEC_FILE} is of another version of Holdfast ({error}); use the operator's version in the image"
        ) from None
    return PodPlace(
        name=environ[NODE_VARIABLE],
        host=environ[HOST_VARIABLE],
        spec=spec,
        token=token,
        folder=jobs.job_dir(jobs.check_name(spec.name)),
    )
