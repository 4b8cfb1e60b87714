"""A training of test_trainer_oracle.py, as a member of a job: train_oracle.py FOLDER CASE"""

import json
import os
import sys
from pathlib import Path

import test_trainer_oracle as oracle


def main() -> None:
    folder = Path(sys.argv[1])
    found = oracle.train(oracle.Case(**json.loads(sys.argv[2])), oracle.adapter.Trainer, folder)
    state = found["state"]
    end = {
        "history": [logs for logs in found["history"] if "train_loss" not in logs],
        "loss": found["out"][1],
        "weights": {name: tensor.tolist() for name, tensor in found["weights"].items()},
        "best": (state["best_metric"], state["best_global_step"]),
        "best_checkpoint": Path(state["best_model_checkpoint"]).name,
        "steps": found["out"][0],
    }
    (folder / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
