"""Two jobs of one name in two namespaces: each command goes to the one that is meant."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubejobs import job
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.kubectl import arguments
from holdfast.cli.kubernetes import find, located
from holdfast.engines import jobs
from holdfast.errors import UsageError


class Cluster:
    """Jobs called llm that people have suspended: whoever asks for one is told so. `asked`: the namespaces that were asked about."""

    def __init__(self, *namespaces: str) -> None:
        self.there = set(namespaces)
        self.asked: list[str] = []

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[3:4] != ["namespaces"] or parts[5:] != ["holdfastjobs", "llm"]:
            return 404, {"reason": "NotFound", "message": path}
        namespace = parts[4]
        self.asked.append(namespace)
        if namespace not in self.there:
            return 404, {"reason": "NotFound", "message": f"no llm in {namespace}"}
        made = job(metadata__namespace=namespace, metadata__uid=f"u-{namespace}")
        put = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": ""}
        put["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        made["spec"]["runPolicy"] = {"suspend": True}
        return 200, made | {"status": {"state": "Suspended", "conditions": [put]}}


@contextmanager
def served(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Over HTTP; with the kubeconfig in the folder."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = cluster.answer(self.path)
            sent = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = threading.Thread(target=server.serve_forever, args=(0.01,))
    running.start()
    try:
        context = {"cluster": "c", "user": "u", "namespace": "team-a"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
            ],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        yield
    finally:
        server.shutdown()
        running.join()
        server.server_close()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A job in each of two namespaces, and a home that knows neither."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    cluster = Cluster("team-a", "team-b")
    with served(cluster, tmp_path):
        yield cluster


def holdfast(*words: str) -> str:
    ran = CliRunner().invoke(app, list(words))
    return ran.output + (str(ran.exception) if ran.exception is not None else "")


def test_two_jobs_of_one_name_have_folders_of_their_own(two: Cluster) -> None:
    first, second = find("llm", "team-a", ""), find("llm", "team-b", "")
    assert (first.name, second.name) == ("llm", "llm.team-b")
    for folder, namespace in ((first, "team-a"), (second, "team-b")):
        known = jobs.read_allocation(folder)
        assert known is not None
        assert (known.namespace, known.id, known.name or folder.name) == (namespace, f"u-{namespace}", "llm")
    # Found again, in whichever order, and by the context's own namespace.
    assert find("llm", "team-b", "") == second
    assert find("llm", "", "") == first


@pytest.mark.parametrize(
    ("command", "flag"),
    [("status", "-n"), ("stop", "--namespace"), ("resize", "-n"), ("why", "-n"), ("report", "--namespace")],
)
def test_every_command_goes_to_the_job_that_is_meant(two: Cluster, command: str, flag: str) -> None:
    find("llm", "team-a", "")
    two.asked.clear()
    more = ["3"] if command == "resize" else []
    said = holdfast(command, "--job", "llm", flag, "team-b", *more)
    assert set(two.asked) == {"team-b"}, said
    assert (jobs.home() / "jobs" / "llm.team-b" / "spec.json").is_file()


def test_a_running_job_is_asked_in_its_own_namespace(two: Cluster) -> None:
    for namespace in ("team-a", "team-b"):
        find("llm", namespace, "")
    two.asked.clear()
    assert "is suspended" in holdfast("fault", "kill-worker", "--job", "llm.team-b")
    assert set(two.asked) == {"team-b"}
    listed = json.loads(holdfast("ls", "--json"))
    assert {one["job"] for one in listed} == {"llm", "llm.team-b"}


def test_the_number_of_lines_and_the_namespace_have_one_letter(two: Cluster) -> None:
    find("llm", "team-a", "")
    two.asked.clear()
    holdfast("logs", "--job", "llm", "-n", "team-b", "-n", "5")
    assert set(two.asked) == {"team-b"}
    two.asked.clear()
    holdfast("events", "--job", "llm", "-n", "5")
    assert set(two.asked) == {"team-a"}


def test_a_job_that_the_cluster_has_no_more_is_found_here(two: Cluster) -> None:
    second = find("llm", "team-a", ""), find("llm", "team-b", "")
    two.there.clear()
    assert located("llm", "team-b", "") == second[1]
    with pytest.raises(UsageError, match="no llm in team-c"):
        located("llm", "team-c", "")


def test_the_plugin_of_kubectl_names_the_folder(two: Cluster) -> None:
    find("llm", "team-a", "")
    assert arguments(["status", "--job", "llm", "-n", "team-b"]) == ["status", "--job", "llm.team-b"]
    assert arguments(["stop", "--job=llm", "-n", "team-b"]) == ["stop", "--job=llm.team-b"]
    assert arguments(["stop", "--job=llm"]) == ["stop", "--job=llm"]


def test_a_place_without_a_job_is_refused(two: Cluster) -> None:
    assert "pass its name with --job, too" in holdfast("status", "-n", "team-b")
