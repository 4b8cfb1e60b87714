"""A training of test_trainer_oracle.py, as a member of a job: train_oracle.py FOLDER CASE"""

import json
import os
import sys
from pathlib import Path

import test_trainer_oracle as oracle


def main() -> None:
    folder = Path(sys.argv[1])
    found = oracle.train(oracle.Case(**json.loads(sys.argv[2])), oracle.adapter.Trainer, folder)
    end = oracle.ending(found)
    (folder / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
