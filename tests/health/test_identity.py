from machines import write

from holdfast.health.identity import devices, identity

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
