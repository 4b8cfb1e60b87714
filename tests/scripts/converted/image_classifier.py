"""image_classifier.py at level 2: its dataset with augmentation is decoded by processes, its schedule goes by epochs."""

import argparse
import hashlib
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast


class Shapes(Dataset):
    """Noisy bars in one of four places; flipped and moved by torch's, numpy's or Python's generator."""

    def __init__(self, length, train):
        self.length, self.train = length, train

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = np.random.RandomState(index + (0 if self.train else 10_000))
        label = index % 4
        image = noise.normal(size=(1, 12, 12)).astype(np.float32)
        image[0, label * 3 : label * 3 + 2] += 1.5
        image = torch.from_numpy(image)
        if self.train:
            if random.random() < 0.5:
                image = image.flip(2)
            image = image.roll(int(torch.randint(-1, 2, ())), 2)
            image = image * float(np.random.uniform(0.9, 1.1))
        return image, label


def accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    model.train()
    return (counts[0] / counts[1]).item()


def main(run):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--reduction", default="fast")
    args = parser.parse_args()
    torch.manual_seed(7)
    train, test = Shapes(64, True), Shapes(32, False)
    tests = DataLoader(test, batch_size=8)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(8 * 144, 4),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    run.protect(model=net, optimizer=optimizer, schedule=schedule)
    os.makedirs(args.output, exist_ok=True)
    per_epoch = len(train) // (8 * args.ranks)
    steps = run.steps(
        holdfast.data.shuffled(train, workers=args.workers),
        global_batch=8 * args.ranks,
        micro_batch=8,
        until=args.epochs * per_epoch,
        seed=7,
        reduction=args.reduction,
    )
    for step in steps:
        epoch, i = divmod(step.index, per_epoch)
        ends = i == per_epoch - 1
        with step:
            for images, labels in step:
                loss = criterion(net(images), labels)
                step.backward(loss * len(labels), weight=len(labels))
            step.apply(optimizer, scheduler=schedule if ends else None)
        if not step.committed:
            continue
        print(f"[{run.rank}] epoch {epoch} batch {i} loss {loss.item():.9f}", flush=True)
        if ends:
            with run.relaxed_watchdog():
                top1, lr = accuracy(net, tests), schedule.get_last_lr()[0]
                print(f"[{run.rank}] epoch {epoch} top-1 {top1:.6f} lr {lr:.9f}", flush=True)
                if run.rank == 0:
                    torch.save(
                        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                        os.path.join(args.output, f"epoch_{epoch}.pt"),
                    )
    state = b"".join(t.numpy().tobytes() for t in net.state_dict().values())
    print(f"[{run.rank}] finished {hashlib.sha256(state).hexdigest()}", flush=True)


if __name__ == "__main__":
    holdfast.start(main)
