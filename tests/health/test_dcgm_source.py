import http.server
import threading

import pytest
from machines import lines, values

from holdfast.health import dcgm
from holdfast.health.dcgm import URL_VARIABLE, Dcgm, dcgm_sources, fetch_page
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

LABELS = 'gpu="0",UUID="GPU-aa",pci_bus_id="00000000:5D:00.0",device="nvidia0",modelName="NVIDIA H100",Hostname="a\\"b"'
OTHER = 'gpu="1",UUID="GPU-bb",pci_bus_id="00000000:9B:00.0",device="nvidia1",modelName="NVIDIA H100",Hostname="a"'
PAGE = f"""# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1980
# TYPE DCGM_FI_DEV_ECC_DBE_VOL_TOTAL counter
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 0
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{OTHER}}} 2
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS}}} 9223372036854775794
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 61
DCGM_FI_DEV_XID_ERRORS{{{LABELS},err_code="31"}} 31
DCGM_EXP_XID_ERRORS_COUNT{{{LABELS},window_size_in_ms="300000",xid="94"}} 1
"""


def of(*pages):
    given = iter(pages)
    return Dcgm("http://127.0.0.1:9400/metrics", lambda url: next(given))


def test_readings_are_named_as_the_drivers_own():
    source = of(PAGE)
    readings = list(source.read())
    source.close()
    found = values(r for r in readings if isinstance(r, Reading))
    assert found == {
        ("dcgm.silent", ""): 0.0,
        ("nvml.ecc.volatile.uncorrected", "gpu 0000:5d:00"): 0.0,
        ("nvml.ecc.volatile.uncorrected", "gpu 0000:9b:00"): 2.0,
        ("nvml.temperature_c", "gpu 0000:5d:00"): 61.0,
        ("nvml.lost", "gpu 0000:5d:00"): 0.0,
        ("nvml.lost", "gpu 0000:9b:00"): 0.0,
    }
    assert lines(readings) == []  # the gauge's Xid may be days old
    assert {r.device for r in readings if r.subject == "gpu 0000:9b:00"} == {"GPU-bb"}


def test_a_new_xid_is_a_line_and_an_old_one_is_not():
    source = of(
        PAGE, PAGE.replace("} 31\n", "} 79\n"), PAGE.replace("} 31\n", "} 79\n"), PAGE.replace("} 31", "} 0")
    )
    assert [lines(source.read()) for _ in range(4)] == [
        [],
        ["NVRM: Xid (PCI:0000:5d:00): 79, reported by the driver's library"],
        [],
        [],
    ]
    source.close()


def test_where_the_exporter_counts_repeated_xids_are_heard():
    source = of(PAGE, PAGE.replace('xid="94"} 1', 'xid="94"} 3'))
    assert lines(source.read()) == []
    assert lines(source.read()) == ["NVRM: Xid (PCI:0000:5d:00): 94, reported by the driver's library"]
    source.close()


def test_a_gpu_that_is_no_longer_on_the_page_is_lost():
    source = of(PAGE, "\n".join(line for line in PAGE.splitlines() if "GPU-bb" not in line))
    list(source.read())
    found = {r.subject: r.value for r in source.read() if isinstance(r, Reading) and r.name == "nvml.lost"}
    assert found == {"gpu 0000:5d:00": 0.0, "gpu 0000:9b:00": 1.0}
    source.close()


def test_an_exporter_that_was_just_started_has_lost_no_gpu():
    source = of(PAGE, "")
    list(source.read())
    (reading,) = source.read()
    assert (reading.name, reading.value) == ("dcgm.page", None)
    source.close()


@pytest.mark.parametrize("page", ["<html>", ""])
def test_a_page_of_something_else_has_no_gpus(page):
    source = of(page)
    assert [r.name for r in source.read()] == ["dcgm.silent"]
    source.close()


def test_an_exporter_that_does_not_answer_is_unknown():
    source = Dcgm("http://127.0.0.1:9/metrics")
    (reading,) = source.read()
    source.close()
    assert reading.value is None
    assert "127.0.0.1:9" in reading.why


def test_a_page_is_fetched():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert fetch_page(f"http://127.0.0.1:{server.server_port}/metrics") == PAGE
    thread.join()
    server.server_close()


def test_it_is_there_only_when_named_and_the_driver_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(dcgm, "load_nvml", lambda: None)
    assert dcgm_sources(MachineRoot()) == []
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:9400/metrics")
    assert len(dcgm_sources(MachineRoot())) == 1
    assert dcgm_sources(MachineRoot(tmp_path)) == []
    monkeypatch.setattr(dcgm, "load_nvml", lambda: object())
    assert dcgm_sources(MachineRoot()) == []
