"""What a checksum covers, and that it is the same on all who hold the same."""

import torch

from holdfast.train.held_state import EVERY_BLOCKS, WINDOW_BYTES, WINDOW_TENSORS
from holdfast.train.held_state import StateSums as Sums


class StateSums(Sums):
    def look(self, number):
        return self.after(number * EVERY_BLOCKS)


def made(width=8):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_equal_states_have_equal_sums_and_a_flipped_bit_shows():
    one, other = StateSums(made()), StateSums(made())
    assert [one.after(n) is None for n in range(5)] == [False, True, True, True, False]
    assert one.look(2) == other.look(2) is not None
    one.flip()
    assert one.look(4) != other.look(4)
    one.flip()
    assert one.look(6) == other.look(6)


def test_a_look_reads_little_however_many_tensors_there_are():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(50)), torch.nn.Linear(3, 90_000))
    windows = StateSums({"model": model})._laid_out()
    assert max(map(len, windows)) == WINDOW_TENSORS
    assert max(sum(end - begin for _, begin, end in w) for w in windows) == WINDOW_BYTES
    assert sum(end - begin for w in windows for _, begin, end in w) == sum(
        p.nbytes for p in model.parameters()
    )


def test_every_byte_has_its_turn():
    objects = made(300)
    sums = StateSums(objects)
    windows = len(sums._laid_out())
    assert windows > 3
    tensors = [objects["model"].weight, objects["model"].bias]
    tensors += [s[k] for s in objects["optimizer"].state.values() for k in ("exp_avg", "exp_avg_sq", "step")]
    for tensor in tensors:
        before = [sums.look(n) for n in range(windows)]
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        after = [sums.look(n) for n in range(windows)]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_an_optimizer_that_was_loaded_has_the_same_sum():
    """Its moments are in another order than those of one that made its steps itself."""
    here = made()
    there = made()
    state = there["optimizer"].state_dict()
    there["optimizer"] = torch.optim.AdamW(there["model"].parameters())
    state["state"] = dict(reversed(state["state"].items()))
    there["optimizer"].load_state_dict(state)
    assert StateSums(here).look(0) == StateSums(there).look(0)


def test_an_optimizer_that_makes_new_tensors_is_read_as_it_is_now():
    one, other = made(), made()
    sums = StateSums(one)
    assert sums.look(0) == StateSums(other).look(0)
    for objects in (one, other):
        for state in objects["optimizer"].state.values():
            state["exp_avg"] = state["exp_avg"] * 2
    assert sums.look(0) == StateSums(other).look(0) != StateSums(made()).look(0)


def test_the_same_elements_have_the_same_sum_however_they_lie_in_memory():
    def convolution(lies):
        torch.manual_seed(0)
        return {"model": torch.nn.Conv2d(4, 4, 3).to(memory_format=lies)}

    one, other = convolution(torch.contiguous_format), convolution(torch.channels_last)
    assert not other["model"].weight.is_contiguous()
    assert StateSums(one).look(0) == StateSums(other).look(0) is not None


def test_nothing_to_read():
    assert StateSums({}).look(0) is None
    with torch.device("meta"):
        assert StateSums({"model": torch.nn.Linear(2, 2)}).look(0) is None
