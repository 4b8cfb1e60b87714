"""What the ssh engine says of hosts that cannot be used, and which addresses it chooses: pure."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.cli.spec import plan
from holdfast.engines.run_options import NodeOptions, RunOptions
from holdfast.engines.ssh import Ssh
from holdfast.engines.ssh.addresses import (
    Seen,
    bind_address,
    choose_address,
    plain_address,
    plan_ssh,
    why_apart,
)
from holdfast.engines.ssh.connection import OPTIONS, SshSettings, ssh_command
from holdfast.engines.ssh.explain import failure, mismatch
from holdfast.engines.ssh.words import PREFIX, AgentEnded, Greeting, from_host, read_answer
from holdfast.errors import ProtocolError, UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SshOptions

OURS = Greeting(version="1", python="3.11", torch="2.13.0", boot="x", client="", server="")


@pytest.mark.parametrize(
    ("code", "stderr", "told"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "ssh does not know this name"),
        (255, "ssh: connect to host b port 22: Connection refused", "nothing listens for ssh there"),
        (255, "ssh: connect to host b port 22: Connection timed out", "cannot be reached"),
        (255, "ssh: connect to host b port 22: No route to host", "cannot be reached"),
        (255, "No ED25519 host key is known for b.\nHost key verification failed.", "not known here"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R b",
        ),
        (255, "me@b: Permission denied (publickey).", "it refused the key"),
        (127, "bash: line 1: /p/python: No such file or directory", "there is no Python at /p/python"),
        (
            1,
            "/p/python: Error while finding module: No module named 'holdfast.engines.ssh'",
            "a different version",
        ),
        (1, "/p/python: No module named holdfast.engines.ssh.node", "a different version"),
        (1, "ModuleNotFoundError: No module named 'msgspec'", "is incomplete"),
        (1, "No module named 'holdfast'", "is incomplete"),
        (3, "what nobody thought of", "exit code 3 (what nobody thought of)"),
        (0, "", "exit code 0"),
    ],
)
def test_each_failure_names_the_host_and_what_to_do(code, stderr, told) -> None:
    said = failure("b", code, stderr, "/p/python", "1.2")
    assert said.startswith("b: ")
    assert told in said
    assert "\n" not in said
    assert any(word in said for word in ("ssh", "environment", "Python", "install"))


@pytest.mark.parametrize(("field", "value"), [("version", "2"), ("python", "3.12"), ("torch", "")])
def test_another_environment_is_refused(field, value) -> None:
    said = mismatch("b", msgspec.structs.replace(OURS, **{field: value}), OURS, "/p/python")
    assert said is not None
    what = {"version": "Holdfast"}.get(field, "Python" if field == "python" else field)
    assert said.startswith(f"b: {what} is {value or 'missing'} in /p/python there")
    assert mismatch("b", OURS, OURS, "/p/python") is None


def test_what_a_shell_prints_is_passed_over() -> None:
    assert read_answer(b"Welcome to b!\n") is None
    assert read_answer(from_host(AgentEnded(1))) == AgentEnded(1)
    with pytest.raises(ProtocolError):
        read_answer(PREFIX + b'{"type": "nothing"}\n')


def test_the_command_line_has_no_secret_and_no_host_is_an_option() -> None:
    argv = ssh_command("a", SshSettings("/c", "/a folder/python", "1"))
    assert argv[:3] == ["ssh", "-F", "/c"]
    assert argv[-3:-1] == ["--", "a"]
    assert argv[-1] == "'/a folder/python' -P -m holdfast.engines.ssh.node"
    assert "BatchMode=yes" in OPTIONS
    # The user's configuration decides whom to trust.
    assert not [o for o in OPTIONS if "HostKey" in o or "KnownHosts" in o]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8::7", "2001:db8::7"),
        ("fe80::1%eth0", ""),
        ("", ""),
        ("UNKNOWN", ""),
    ],
)
def test_addresses_as_sshd_says_them(text, plain) -> None:
    assert plain_address(text) == plain


AWAY = {"a": Seen("10.0.0.9", "10.0.0.1"), "b": Seen("10.0.0.9", "10.0.0.2")}
HERE = {"me": Seen("127.0.0.1", "127.0.0.1")}


def test_the_coordinator_listens_where_the_hosts_see_this_machine() -> None:
    ours = {"10.0.0.9", "127.0.0.1"}.__contains__
    assert choose_address(AWAY, "", ours) == "10.0.0.9"
    assert choose_address({**HERE, **AWAY}, "", ours) == "10.0.0.9"
    assert choose_address(HERE, "", ours) == "127.0.0.1"
    assert bind_address(HERE["me"], "10.0.0.9") == "10.0.0.9"
    assert bind_address(AWAY["a"], "10.0.0.9") == "10.0.0.1"
    assert bind_address(Seen("127.0.0.1", "127.0.1.2"), "127.0.0.1") == "127.0.1.2"


def test_hosts_of_one_kind_of_address_are_used_together() -> None:
    away = {
        "a": Seen("fd00::9", "fd00::1"),
        "b": Seen("fd00::9", "fd00::2"),
        "c": Seen("10.0.0.9", "10.0.0.3"),
    }
    assert choose_address(away, "", {"fd00::9", "10.0.0.9"}.__contains__) == "fd00::9"
    assert [why_apart(away[name], "fd00::9") for name in "ab"] == [None, None]
    assert "AddressFamily inet6" in str(why_apart(away["c"], "fd00::9"))
    assert "AddressFamily inet`" in str(why_apart(away["a"], "10.0.0.9"))
    # One that is this machine binds the coordinator's address.
    assert why_apart(HERE["me"], "fd00::9") is None


def test_loopback_and_addresses_of_others_are_refused() -> None:
    with pytest.raises(UsageError, match="a, b must reach it, too"):
        choose_address(AWAY, "127.0.0.1", lambda address: True)
    with pytest.raises(UsageError, match="does not have this address"):
        choose_address(AWAY, "10.0.0.77", lambda address: False)
    with pytest.raises(UsageError, match="jump host"):
        choose_address(AWAY, "", lambda address: False)


@pytest.mark.parametrize(
    "hosts", [("-oProxyCommand=x",), ("a b",), ("a;b",), ("7",), ("a", "x@a"), ("a,b", "b"), ("a:22",)]
)
def test_hosts_that_ssh_must_not_see_are_refused(hosts) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        plan_ssh(SshOptions(hosts=hosts))


def test_hosts_and_their_options_are_checked_before_anything_starts(tmp_path) -> None:
    planned = plan_ssh(SshOptions(hosts=("a, me@b", "10.0.0.3")))
    assert planned.hosts == ("a", "me@b", "10.0.0.3")
    assert planned.names == ("a", "b", "10.0.0.3")
    for wrong in (
        SshOptions(config=str(tmp_path / "none")),
        SshOptions(address="b"),
        SshOptions(env=("A=1",)),
    ):
        with pytest.raises(UsageError):
            plan_ssh(wrong)
    job = JobSpec(name="j", script="train.py", max_nodes=2, spares=1)
    assert Ssh().plan(job, SshOptions(hosts=("a, me@b", "10.0.0.3"))).ssh == planned
    with pytest.raises(UsageError, match="3 nodes and 1 spares need 4"):
        Ssh().plan(msgspec.structs.replace(job, max_nodes=3), planned)
    with pytest.raises(UsageError, match="the nodes are the hosts"):
        plan(
            RunOptions(
                script="train.py",
                engine="ssh",
                engines={"ssh": planned},
                nodes=NodeOptions(nproc_per_node="auto"),
            )
        )
    with pytest.raises(UsageError, match="needs the hosts"):
        plan(RunOptions(script="train.py", engine="ssh"))
