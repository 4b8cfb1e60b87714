import pytest
import torch

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.policy import Retention
from holdfast.errors import StateError, UsageError
from holdfast.tensors.tree import buffer_of
from holdfast.train import restore, state_image


def trained(seed: int = 0, steps: int = 2):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def copy_bytes(source: state_image.Image, target: state_image.Image) -> None:
    total = source.index.nbytes
    data = b"".join(bytes(p) for p in source.pieces(0, total))
    at = 0
    for piece in target.pieces(0, total):
        piece[:] = data[at : at + len(piece)]
        at += len(piece)


def test_state_goes_into_a_fresh_replica_bit_by_bit():
    old, fresh = trained(), trained(seed=1, steps=0)
    image = state_image.capture(old, step=7)
    target = state_image.targets(fresh, image.index)
    copy_bytes(image, target)
    state_image.load(fresh, target)
    assert state_image.digest(fresh) == state_image.digest(old)
    assert fresh["optimizer"].param_groups[0]["betas"] == (0.9, 0.95)
    assert fresh["scheduler"].last_epoch == old["scheduler"].last_epoch


def test_live_tensors_are_received_into_directly():
    old, fresh = trained(), trained(seed=1)
    target = state_image.targets(fresh, state_image.capture(old, 0).index)
    pointers = {t.data_ptr() for t in target.tensors}
    assert all(p.data_ptr() in pointers for p in fresh["model"].parameters())


def test_pieces_cover_any_range_once():
    image = state_image.capture(trained(), 0)
    total = image.index.nbytes
    whole = b"".join(bytes(p) for p in image.pieces(0, total))
    assert len(whole) == total
    parts = b"".join(
        bytes(p) for low in range(0, total, 777) for p in image.pieces(low, min(low + 777, total))
    )
    assert parts == whole


def test_buffers_are_copied_when_they_may_change_while_they_are_read():
    things = trained()
    image = state_image.capture(things, 0, torch.clone)
    before = b"".join(bytes(p) for p in image.pieces(0, image.index.nbytes))
    things["model"](torch.randn(5, 8))  # moves the running statistics
    assert b"".join(bytes(p) for p in image.pieces(0, image.index.nbytes)) == before


def test_what_other_objects_hold_is_copied_too_while_training_goes_on():
    class Average:
        def __init__(self):
            self.mean = torch.zeros(3)

        def state_dict(self):
            return {"mean": self.mean}

        def load_state_dict(self, given):
            self.mean = given["mean"]

    things = {"average": Average()}
    live, kept = state_image.capture(things, 0), state_image.capture(things, 0, torch.clone)
    things["average"].mean += 1.0  # as a forward pass may
    assert [live.tensors[0].sum().item(), kept.tensors[0].sum().item()] == [3.0, 0.0]


def test_what_cannot_be_protected_is_refused_with_its_path():
    class Odd:
        def state_dict(self):
            return {"deep": {"thing": object()}}

        def load_state_dict(self, state):
            return

    with pytest.raises(UsageError, match=r"odd\.deep\.thing.*object"):
        state_image.capture({"odd": Odd()}, 0)
    with pytest.raises(UsageError, match="state_dict"):
        state_image.check_protected({"number": 3})


def test_other_objects_are_refused():
    image = state_image.capture(trained(), 0)
    with pytest.raises(StateError, match="this script protects"):
        state_image.load({"net": torch.nn.Linear(2, 2)}, image)


def saved(folder, things, step=1):
    restore.save(state_image.capture(things, step), str(folder), Retention())
    return next((folder / f"step-{step}").glob("rank-?.????????.safetensors"))


def test_a_checkpoint_on_disk_comes_back(tmp_path):
    old, fresh = trained(), trained(seed=1, steps=0)
    saved(tmp_path, old, 12)
    assert Archive(str(tmp_path)).steps() == [12]
    assert restore.restore(fresh, str(tmp_path), 12) == state_image.capture(old, 12).index.nbytes
    assert state_image.digest(fresh) == state_image.digest(old)


def test_one_element_may_have_any_stride():
    element = torch.arange(10.0)[3:9:7]
    assert element.stride() != (1,)
    assert bytes(buffer_of(element)) == element.clone().numpy().tobytes()


def test_a_flipped_bit_is_found(tmp_path):
    row = saved(tmp_path, trained())
    data = bytearray(row.read_bytes())
    data[len(data) // 2] ^= 1
    row.write_bytes(data)
    with pytest.raises(StateError, match="do not match their checksums"):
        restore.restore(trained(seed=1), str(tmp_path), 1)


def test_a_checkpoint_that_is_cut_short_is_refused(tmp_path):
    row = saved(tmp_path, trained())
    with row.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(StateError, match="cut short"):
        restore.restore(trained(seed=1), str(tmp_path), 1)


def test_the_newest_two_are_kept(tmp_path):
    things = trained()
    for step in (1, 2, 3, 4):
        saved(tmp_path, things, step)
    assert Archive(str(tmp_path)).steps() == [3, 4]
