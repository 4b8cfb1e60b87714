"""A file whose name is no UTF-8, in what is printed, logged and warned."""

import logging
import os
import sys
import warnings

RANK = os.environ["RANK"]
name = os.fsdecode(b"bild-\xe4.png")
print("stderr:", name, file=sys.stderr)
logging.warning("skipping %s", name)
warnings.warn(f"skipping {name}", stacklevel=1)
print(f"[{RANK}] went on {sys.stdout.errors} {sys.stderr.errors} {sys.stdout.encoding}", flush=True)
