"""Runs scripts one after the other as `python train.py` does, each in a fork of a process that has imported torch.

`python plain.py FOLDER...`: of each folder `train.py`, in that folder; what it writes and its exit code go to `output` there.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from holdfast import data, start  # noqa: F401 - imported for the forks

torch.optim.AdamW([torch.zeros(1)])  # imports what takes as long as torch itself


def run(folder: Path) -> int:
    os.chdir(folder)
    fd = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    path = folder / "train.py"
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=__builtins__)
    sys.argv = ["train.py"]
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(main))
    except Exception as error:
        error = error.with_traceback(error.__traceback__.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


for name in sys.argv[1:]:
    if not (pid := os.fork()):
        code = 1
        try:
            code = run(Path(name))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    with (Path(name) / "output").open("a") as output:
        output.write(f"exit code {os.waitstatus_to_exitcode(status)}\n")
