"""Requests for the pods of one job. What was answered is at its desk at once, and what was not is in doubt there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from holdfast.kubernetes import names
from holdfast.kubernetes.actions import DeletePod, FindPod, LabelPod, TellPlace
from holdfast.kubernetes.api import Api, ApiError, NoAnswer, Object
from holdfast.kubernetes.desk import Desk
from holdfast.kubernetes.reading import pod_seen

_log = logging.getLogger(__name__)


class JobPods:
    """Each method raises ApiError and NoAnswer."""

    def __init__(
        self, api: Api, name: str, namespace: str, uid: str, desk: Desk, wake: Callable[[], None]
    ) -> None:
        """wake: has the job's task look."""
        self._api, self._name, self._uid, self._desk, self._wake = api, name, uid, desk, wake
        self._folder = f"/api/v1/namespaces/{namespace}/pods"

    async def make(self, made: Object) -> None:
        """A pod under a number that was written down."""
        name = made["metadata"]["name"]
        path = f"{self._folder}/{name}"
        try:
            # The creation before this one had no answer, so it may have happened. It is asked for by name: a
            # second creation would be refused as a duplicate of our own pod.
            if name in self._desk.doubtful:
                self._saw(await self._api.get(path))
            else:
                self._saw(await self._api.create(self._folder, made))
            self._desk.refused = None
        except NoAnswer:
            self._desk.doubtful.add(name)
            raise
        except ApiError as error:
            # It is not there, and the request may still arrive. So the number is not used a second time: the
            # late pod would meet another one of its name.
            if name in self._desk.doubtful and error.status == 404:
                self._desk.burn(name)
                self._wake()
            elif error.reason == "AlreadyExists":
                self._saw(await self._api.get(path))
            else:
                self._desk.refused = f"{name}: {error}"
                raise

    async def find(self, action: FindPod) -> None:
        """A pod that the watch does not show."""
        try:
            pod = pod_seen(await self._api.get(f"{self._folder}/{action.name}"), self._name, self._uid)
        except ApiError as error:
            if error.status != 404:
                raise
            pod = None
        if pod is None:
            self._desk.pods.not_there(action.name)
        else:
            self._desk.saw(pod)
        self._wake()

    async def label(self, action: LabelPod, labels: Mapping[str, str]) -> None:
        """Gives labels back that somebody has taken away."""
        _log.warning("gives a pod its labels back", extra={"job": self._name, "pod": action.name})
        await self._change(action.name, {"uid": action.uid, "labels": labels})

    async def tell_place(self, action: TellPlace) -> None:
        """Notes on the pod where its machine stands."""
        # With its uid: a pod of this name that somebody made since stands elsewhere.
        note = {"uid": action.uid, "annotations": {names.NOTE_PLACE: action.place}}
        await self._change(action.name, note)

    async def delete(self, action: DeletePod) -> None:
        """The pod of this uid, and no other of its name."""
        _log.info("deletes a pod: %s", action.reason, extra={"job": self._name, "pod": action.name})
        try:
            path = f"{self._folder}/{action.name}"
            await self._api.delete(path, action.uid, action.grace_s, action.version)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 409 and action.version is not None:
                # It has changed, and what it is now is to be seen before anything else is decided about it.
                await self.find(FindPod(action.name))
                return
            self._desk.pods.gone(action.name, action.uid)
        else:
            self._desk.did(action)
        self._wake()

    async def _change(self, name: str, metadata: Object) -> None:
        """metadata: with the pod's uid."""
        try:
            self._saw(await self._api.merge(f"{self._folder}/{name}", {"metadata": metadata}))
        except ApiError as error:
            if error.status not in (404, 409) and not error.is_of_another:
                raise
            self._desk.pods.gone(name, metadata["uid"])

    def _saw(self, raw: Object) -> None:
        pod = pod_seen(raw, self._name, self._uid)
        name = raw["metadata"]["name"]
        if pod is None:
            # Somebody else's pod has the name. Another number is free.
            self._desk.burn(name)
            self._desk.refused = f"{name}: there is a pod of this name that is not this job's"
        else:
            self._desk.saw(pod)
        self._wake()
