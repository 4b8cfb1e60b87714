"""A tiny level-2 job with an average of the weights, updated where `--update` says: `also` is the right place. The others are
what people write elsewhere. `only=RANK` after the place: on that rank only. `teach`: the average
teaches the model, as a momentum teacher does."""

import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_data import Blobs

import holdfast as hf

WIDTH = 64


class Noise:
    """State of the script's own, in tensors that are replaced: what it draws and how often it was called."""

    def __init__(self) -> None:
        self.calls, self.row = 0, torch.zeros(3)

    def update(self) -> None:
        self.calls, self.row = self.calls + 1, 0.5 * self.row + torch.rand(3)

    def state_dict(self) -> dict[str, object]:
        return {"calls": self.calls, "row": self.row}

    def load_state_dict(self, state: dict) -> None:
        self.calls, self.row = state["calls"], state["row"]


def main(run: hf.Run) -> None:
    steps, place = int(sys.argv[1]), sys.argv[2]
    only = next((int(word.removeprefix("only=")) for word in sys.argv if word.startswith("only=")), None)
    teach = "teach" in sys.argv
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    noise = Noise()
    run.protect(model=model, optimizer=optimizer, average=average, noise=noise)

    def update(where: str) -> None:
        if place == "raise" and where == "also" and noise.calls == 5:
            raise RuntimeError("what the script gave to also")
        if where == place and (only is None or only == run.rank):
            average.update_parameters(model)

    for step in run.steps(
        Blobs(WIDTH), global_batch=48, micro_batch=4, until=steps, reduction="exact", seed=1
    ):
        with step:
            for inputs, labels in step:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                if teach:
                    loss = loss + (model(inputs) - average(inputs)).square().sum()
                step.backward(loss, weight=len(inputs))
            update("before-apply")
            step.apply(optimizer, also=[lambda: update("also"), noise.update])
            update("after-apply")
        if step.committed:
            update("after-step")
    print(f"noise {noise.calls} {noise.row.tolist()}", flush=True)


hf.start(main)
