import pytest
from machines import write

from holdfast.errors import UsageError
from holdfast.health import identity as module
from holdfast.health.container import in_container
from holdfast.health.identity import devices


def identity(root, part="", **environ):
    return module.identity(root, part, environ=environ)


BARE = {"sys/class/dmi/id/product_serial": "J7XK9\n", "etc/machine-id": "3d1219c7\n"}


def test_the_most_lasting_identity_that_can_be_read(tmp_path):
    assert identity(tmp_path) == ""
    write(tmp_path, {"etc/machine-id": "3d1219c7\n"})
    assert identity(tmp_path) == "machine-id:3d1219c7"
    write(tmp_path, {"var/lib/cloud/data/instance-id": "i-0abc\n"})
    assert identity(tmp_path) == "instance:i-0abc"
    write(tmp_path, {"sys/class/dmi/id/product_uuid": "4c4c4544-0042\n"})
    assert identity(tmp_path) == "uuid:4c4c4544-0042"
    write(tmp_path, BARE)
    assert identity(tmp_path) == "serial:J7XK9"


def test_what_makers_leave_in_the_fields_is_no_identity(tmp_path):
    write(tmp_path, BARE)
    for value in ("To Be Filled By O.E.M.", "........", "0000000", "Default string", "", " None "):
        write(tmp_path, {"sys/class/dmi/id/product_serial": value + "\n"})
        assert identity(tmp_path) == "machine-id:3d1219c7", value


def test_nodes_that_share_a_machine_differ(tmp_path):
    write(tmp_path, BARE)
    assert identity(tmp_path, "node1") == "machine-id:3d1219c7/node1"


def test_devices_by_what_stays_the_same(tmp_path):
    gpus = "proc/driver/nvidia/gpus"
    write(
        tmp_path,
        {
            f"{gpus}/0000:5D:00.0/information": "Model: \t H100\nGPU UUID: \t GPU-aa\n",
            f"{gpus}/0000:5e:00.0/information": "GPU UUID: \t GPU-????-????\n",
            "sys/class/infiniband/mlx5_0/node_guid": "b83f:d203:00aa:0001\n",
            "sys/class/infiniband/mlx5_bond/node_guid": "0000:0000:0000:0000\n",
            "sys/class/nvme/nvme0/serial": "S123   \n",
        },
    )
    assert devices(tmp_path) == ("GPU-aa", "guid:b83f:d203:00aa:0001", "nvme:S123")
    assert devices(tmp_path / "none") == ()


CONTAINERS = {
    "docker": ({".dockerenv": ""}, {}),
    "podman": ({"run/.containerenv": ""}, {}),
    "nspawn": ({"run/systemd/container": "systemd-nspawn"}, {}),
    "pod": ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    "runtime's variable": ({}, {"container": "lxc"}),
    "groups": ({"proc/self/cgroup": "4:memory:/kubepods/besteffort/pod7/a\n0::/\n"}, {}),
}


@pytest.mark.parametrize(("files", "environ"), CONTAINERS.values(), ids=CONTAINERS)
def test_in_a_container_the_files_of_the_image_are_nobody_s_identity(tmp_path, files, environ):
    """All pods would be one machine."""
    write(tmp_path, {"etc/machine-id": "3d1219c7\n", "var/lib/cloud/data/instance-id": "i-0abc\n", **files})
    assert in_container(tmp_path, environ)
    assert identity(tmp_path, **environ) == ""
    assert identity(tmp_path, "node1", **environ) == ""
    assert identity(tmp_path, **environ, HOLDFAST_MACHINE="gpu-7.a") == "k8s:gpu-7.a"
    assert identity(tmp_path, "node1", **environ, HOLDFAST_MACHINE="gpu-7.a") == "k8s:gpu-7.a/node1"
    assert identity(tmp_path, **environ, HOLDFAST_MACHINE="two words") == ""
    write(tmp_path, BARE)
    assert identity(tmp_path, **environ, HOLDFAST_MACHINE="gpu-7.a") == "serial:J7XK9"


def test_on_a_machine_the_name_in_a_cluster_is_no_identity(tmp_path):
    write(tmp_path, {"etc/machine-id": "3d1219c7\n", "proc/self/cgroup": "0::/user.slice/session-2.scope\n"})
    assert not in_container(tmp_path, {})
    assert identity(tmp_path, HOLDFAST_MACHINE="gpu-7") == "machine-id:3d1219c7"


def test_who_starts_the_agent_knows_best(tmp_path):
    write(tmp_path, BARE)
    assert identity(tmp_path, HOLDFAST_NODE_IDENTITY="asset:R7-U12") == "asset:R7-U12"
    assert identity(tmp_path, "node1", HOLDFAST_NODE_IDENTITY="asset:R7-U12") == "asset:R7-U12/node1"


@pytest.mark.parametrize(
    "given", ["R7", ":x", "asset:", "asset:a b", "Asset:x", "asset:" + "x" * 201, "asset:é"]
)
def test_an_identity_that_is_none_is_refused(tmp_path, given):
    with pytest.raises(UsageError, match="must be KIND:VALUE"):
        identity(tmp_path, HOLDFAST_NODE_IDENTITY=given)
