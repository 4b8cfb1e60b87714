from machines import Hand, values, write

from holdfast.health.machine import machine_sources
from holdfast.health.processor import Clock, MemorySource, Pressure, Processes, kernel_clock
from holdfast.health.sources import MachineRoot

PRESSURE = """some avg10=1.00 avg60=12.50 avg300=3.00 total=123
full avg10=0.50 avg60=7.25 avg300=0.10 total=45
"""


def test_pressure_and_what_the_kernel_saw(tmp_path):
    write(tmp_path, {f"proc/pressure/{kind}": PRESSURE for kind in ("cpu", "memory", "io")})
    write(tmp_path, {"proc/sys/kernel/tainted": f"{1 << 14 | 1 << 12}\n"})
    found = values(Pressure(MachineRoot(tmp_path)).read())
    assert found["cpu.stalled_percent", ""] == 12.5
    assert found["memory.stalled_percent", ""] == found["io.stalled_percent", ""] == 7.25
    assert found["kernel.saw_soft_lockup", ""] == 1.0
    assert found["kernel.saw_machine_check", ""] == found["kernel.saw_oops", ""] == 0.0


def test_what_a_machine_does_not_have_gives_no_reading(tmp_path):
    (tmp_path / "proc").mkdir()
    assert values(Pressure(MachineRoot(tmp_path)).read()) == {}
    assert values(MemorySource(MachineRoot(tmp_path)).read()) == {}
    assert values(Clock(MachineRoot(tmp_path)).read()) == {}


def test_a_file_in_an_unknown_form_says_so(tmp_path):
    write(tmp_path, {"proc/pressure/cpu": "some avg10=1.00\n", "proc/meminfo": "MemTotal: lots\n"})
    (reading,) = Pressure(MachineRoot(tmp_path)).read()
    assert (reading.name, reading.value) == ("cpu.stalled_percent", None)
    (reading,) = MemorySource(MachineRoot(tmp_path)).read()
    assert (reading.name, reading.value) == ("memory.available_share", None)


def test_a_process_that_hangs_is_found_by_how_long_it_did(tmp_path):
    def stat(pid, command, state, started):
        fields = " ".join(["0"] * 18)
        return {f"proc/{pid}/stat": f"{pid} ({command}) {state} {fields} {started} 0\n"}

    write(tmp_path, stat(7, "a (b) c", "D", 500) | stat(8, "sleeper", "S", 500) | stat(9, "dead", "Z", 500))
    write(
        tmp_path,
        {
            "proc/loadavg": "0.1 0.2 0.3 2/500 999\n",
            "proc/sys/kernel/pid_max": "1000\n",
            "proc/sys/fs/file-nr": "250 0 1000\n",
        },
    )
    clock = Hand()
    source = Processes(MachineRoot(tmp_path), clock)
    subject = "process a (b) c (pid 7)"
    found = values(source.read())
    assert found == {
        ("process.zombies", ""): 1.0,
        ("process.used_share", ""): 0.5,
        ("file.used_share", ""): 0.25,
    }
    for blocked_s in (60.0, 120.0):
        clock.now += 60
        assert values(source.read())["process.blocked_s", subject] == blocked_s
    write(tmp_path, stat(7, "another", "D", 900))  # the number was given again
    clock.now += 60
    assert values(source.read())["process.blocked_s", subject] == 0.0
    clock.now += 60
    assert values(source.read())["process.blocked_s", "process another (pid 7)"] == 60.0
    write(tmp_path, stat(7, "another", "R", 900))
    assert values(source.read())["process.blocked_s", "process another (pid 7)"] == 0.0
    assert not [name for name, _ in values(source.read()) if name == "process.blocked_s"]


def test_memory_and_its_controllers(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 250 kB\nHardwareCorrupted: 4 kB\n",
            "proc/vmstat": "nr_free_pages 5\noom_kill 3\nswap_ra 0\n",
            "sys/devices/system/edac/mc/mc0/ce_count": "17\n",
            "sys/devices/system/edac/mc/mc0/ue_count": "1\n",
            "sys/devices/system/edac/mc/power/control": "auto\n",
        },
    )
    assert values(MemorySource(MachineRoot(tmp_path)).read()) == {
        ("memory.available_share", ""): 0.25,
        ("memory.corrupted_bytes", ""): 4096.0,
        ("memory.oom_kills", ""): 3.0,
        ("edac.ce_count", "memory controller 0"): 17.0,
        ("edac.ue_count", "memory controller 0"): 1.0,
    }


def test_clock_and_boot(tmp_path):
    write(tmp_path, {"proc/sys/kernel/random/boot_id": "abc-def\n", "proc/uptime": "12.50 3.00\n"})
    found = values(Clock(MachineRoot(tmp_path), lambda: (0x40 | 0x2000, 16_000_000)).read())
    assert found == {
        ("clock.unsynchronized", ""): 1.0,
        ("clock.max_error_s", ""): 16.0,
        ("boot.id", ""): "abc-def",
        ("boot.uptime_s", ""): 12.5,
    }


def test_the_kernel_tells_its_clock():
    status, max_error_us = kernel_clock()
    assert status >= 0
    assert max_error_us >= 0


def test_every_source_reads_this_machine():
    for source in machine_sources(MachineRoot()):
        try:
            for reading in source.read():
                assert reading.source
            assert source.every_s == int(source.every_s)
        finally:
            source.close()
