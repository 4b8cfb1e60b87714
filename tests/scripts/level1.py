"""The scripts with the lines of level 1: for each, what is replaced and by what. Everything else stays as it is."""

from pathlib import Path

Change = tuple[str, str]

CHARACTER_MODEL: list[Change] = [
    ("import torch\n", "import holdfast\nimport torch\n"),
    (
        "while True:\n",
        "state = {'model': raw_model, 'optimizer': optimizer, 'best': best_val_loss,"
        " 'batch': [X, Y], 'chance': torch.get_rng_state()}\n"
        "if (saved := holdfast.checkpoint.load(state)) is not None:\n"
        "    iter_num, best_val_loss, (X, Y) = saved, state['best'], state['batch']\n"
        "    torch.set_rng_state(state['chance'])\n"
        "while True:\n",
    ),
    (
        "    iter_num += 1\n",
        "    iter_num += 1\n"
        "    state.update(best=best_val_loss, batch=[X, Y], chance=torch.get_rng_state())\n"
        "    holdfast.checkpoint.save(state, iter_num, overlap=True)\n",
    ),
]

IMAGE_CLASSIFIER: list[Change] = [
    ("import numpy as np\n", "import holdfast\nimport numpy as np\n"),
    (
        "    for epoch in range(args.epochs):\n",
        "    state = {'model': net, 'optimizer': optimizer, 'schedule': schedule, 'chance': torch.get_rng_state()}\n"
        "    begin = holdfast.checkpoint.load(state) or 0\n"
        "    torch.set_rng_state(state['chance'])\n"
        "    for epoch in range(begin, args.epochs):\n",
    ),
    (
        "        if rank == 0:\n",
        "        state['chance'] = torch.get_rng_state()\n"
        "        holdfast.checkpoint.save(state, epoch + 1)\n"
        "        if rank == 0:\n",
    ),
]
"""Chance within the loader's workers follows from torch's generator, which gives each epoch its base seed."""

SNAPSHOT_TRAINER: list[Change] = [
    ("import torch\n", "import holdfast\nimport torch\n"),
    ("        if os.path.exists(snapshot_path):\n", "        if False:  # Holdfast has newer ones\n"),
    (
        "        for epoch in range(self.epochs_run, max_epochs):\n",
        "        state = {'model': self.model, 'optimizer': self.optimizer}\n"
        "        self.epochs_run = holdfast.checkpoint.load(state) or 0\n"
        "        for epoch in range(self.epochs_run, max_epochs):\n",
    ),
    (
        "            if self.global_rank == 0 and epoch",
        "            holdfast.checkpoint.save(state, epoch + 1, overlap=True)\n"
        "            if self.global_rank == 0 and epoch",
    ),
]

SHARDED_MODEL: list[Change] = [
    ("import torch\n", "import holdfast\nimport torch\n"),
    (
        "    for step in range(10):\n",
        "    state = {'model': model, 'optimizer': optimizer, 'chance': torch.get_rng_state()}\n"
        "    begin = holdfast.checkpoint.load(state) or 0\n"
        "    torch.set_rng_state(state['chance'])\n"
        "    for step in range(begin, 10):\n",
    ),
    (
        "    saved = digest(model)\n",
        "        state['chance'] = torch.get_rng_state()\n"
        "        holdfast.checkpoint.save(state, step + 1, overlap=True)\n"
        "    saved = digest(model)\n",
    ),
]


def change(script: Path, changes: list[Change]) -> None:
    """Rewrites the script. A text to be replaced that is not there, or there twice, is an error."""
    text = script.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (script, old)
        text = text.replace(old, new)
    script.write_text(text)
