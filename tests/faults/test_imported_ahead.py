"""A restarted worker finds imported what the script imported in its first start."""

from harness import run

SCRIPT = """
import os, signal, sys, time
ahead = "xmlrpc.server" in sys.modules
import torch, xmlrpc.server
import beside
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"start {start}: {ahead}, {beside.imported}", flush=True)
beside.imported = "again"
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
log, until = sys.argv[1], time.monotonic() + 60
while not start and "imported ahead" not in open(log).read():
    optimizer.step()
    assert time.monotonic() < until, "nothing was imported ahead"
optimizer.step()
if not start:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_finds_its_imports_done(tmp_path):
    (tmp_path / "beside.py").write_text("imported = 'new'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    log = tmp_path / "jobs" / "job" / "logs" / "agents" / "node0.log"
    ran = run(tmp_path, "--log-level", "info", tmp_path / "script.py", log)
    assert ran.code == 0, ran.output
    said = "".join(path.read_text() for path in (ran.job_dir / "logs" / "node0").glob("*.log"))
    assert "start 0: False, new\n" in said
    assert "start 1: True, new\n" in said
