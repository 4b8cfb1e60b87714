"""What a checksum covers, and that it is the same on all who hold the same."""

import torch

from holdfast.train.state_sums import WINDOW_BYTES, StateSums


def made(width=8):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_equal_states_have_equal_sums_and_a_flipped_bit_shows():
    one, other = StateSums(made()), StateSums(made())
    assert one.look(3) == other.look(3) is not None
    one.flip()
    assert one.look(4) != other.look(4)
    one.flip()
    assert one.look(5) == other.look(5)


def test_every_byte_has_its_turn():
    objects = made(300)
    sums = StateSums(objects)
    nbytes = 3 * sum(p.numel() * 4 for p in objects["model"].parameters())
    windows = -(-nbytes // WINDOW_BYTES)
    assert windows > 3
    tensors = [objects["model"].weight, objects["model"].bias]
    tensors += [s[k] for s in objects["optimizer"].state.values() for k in ("exp_avg", "exp_avg_sq", "step")]
    for tensor in tensors:
        before = [sums.look(n) for n in range(windows + 1)]
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        after = [sums.look(n) for n in range(windows + 1)]
        assert 1 <= sum(a != b for a, b in zip(before, after, strict=True)) <= 2


def test_an_optimizer_that_was_loaded_has_the_same_sum():
    """Its moments are in another order than those of one that made its steps itself."""
    here = made()
    there = made()
    state = there["optimizer"].state_dict()
    there["optimizer"] = torch.optim.AdamW(there["model"].parameters())
    state["state"] = dict(reversed(state["state"].items()))
    there["optimizer"].load_state_dict(state)
    assert StateSums(here).look(0) == StateSums(there).look(0)


def test_nothing_to_read():
    assert StateSums({}).look(0) is None
    with torch.device("meta"):
        assert StateSums({"model": torch.nn.Linear(2, 2)}).look(0) is None
