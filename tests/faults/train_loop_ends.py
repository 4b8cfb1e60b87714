"""A job that says where its loop ends, and what stands after it: `fails` raises in step 3, `stops` goes on until it is asked."""

import sys

import torch

import holdfast

HOW = sys.argv[1]


def main(run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    until = 5 if HOW == "ends" else 1_000_000
    try:
        for step in run.steps(
            torch.utils.data.TensorDataset(torch.randn(40, 4)), global_batch=8, micro_batch=4, until=until
        ):
            with step:
                for (x,) in step:
                    step.backward(model(x).square().sum(), weight=len(x))
                if HOW == "fails" and step.index == 3:
                    raise RuntimeError("a bug of the script")
                step.apply(optimizer)
            assert step.loss == step.loss, "no NaN where a step was dropped"
        print("PAST THE LOOP", flush=True)
    except holdfast.JobStopped as error:
        print(f"leaves by an error, stopped {run.stopped}: {error}", flush=True)
        raise


holdfast.start(main)
print("PAST THE RUN", flush=True)
