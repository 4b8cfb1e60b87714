"""An image classifier: augmentation, BatchNorm, loader workers, DistributedSampler, StepLR, accuracy, checkpoints."""

import argparse
import hashlib
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


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
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    random.seed(7 + rank)
    np.random.seed(7 + rank)
    train, test = Shapes(64, True), Shapes(32, False)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler, num_workers=args.workers)
    tests = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(8 * 144, 4),
    )  # fmt: skip
    model = nn.parallel.DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    os.makedirs(args.output, exist_ok=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (images, labels) in enumerate(loader):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"[{rank}] epoch {epoch} batch {i} loss {loss.item():.9f}", flush=True)
        schedule.step()
        top1 = accuracy(model, tests)
        print(f"[{rank}] epoch {epoch} top-1 {top1:.6f} lr {schedule.get_last_lr()[0]:.9f}", flush=True)
        if rank == 0:
            torch.save(
                {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                os.path.join(args.output, f"epoch_{epoch}.pt"),
            )
    state = b"".join(t.numpy().tobytes() for t in net.state_dict().values())
    print(f"[{rank}] finished {hashlib.sha256(state).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
