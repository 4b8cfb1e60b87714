from concurrent.futures import Future

from holdfast.data.prefetch import MOST_MICRO_BATCHES, PrefetchBuffer


class Making:
    """Notes what is begun; `finish` ends it."""

    def __init__(self, **options):
        self.begun = []
        self.futures = {}
        options = {"until": 100, "steps": 2, "at_least": 2, "most_bytes": 1 << 30} | options
        self.ahead = PrefetchBuffer(self.begin, **options)

    def begin(self, key):
        self.begun.append(key)
        future = self.futures[key] = Future()
        return future

    def finish(self, nbytes=10):
        for future in self.futures.values():
            if not future.done():
                future.set_result(bytes(nbytes))

    def take_new(self):
        begun, self.begun = self.begun, []
        return begun


def warm(**options):
    making = Making(**options)
    making.ahead.aim(0, range(4))
    making.finish()
    making.ahead.take(0, 0)
    making.finish()
    making.take_new()
    return making


def test_until_the_size_is_known_little_is_made_ahead():
    making = Making()
    making.ahead.aim(0, range(4))
    assert making.take_new() == [(0, 0), (0, 1)]


def test_two_steps_share_is_made_ahead_in_the_order_of_need():
    making = Making()
    making.ahead.aim(0, range(1, 3))
    making.finish()
    making.ahead.take(0, 1)
    assert making.take_new() == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]


def test_a_step_that_is_tried_again_makes_nothing_again():
    making = warm()
    for micro in range(4):
        making.ahead.take(0, micro)
    making.finish()
    begun = set(making.take_new())
    making.ahead.aim(0, range(4))
    for micro in range(4):
        assert making.ahead.take(0, micro).done()
    assert not set(making.take_new()) & (begun | {(0, m) for m in range(4)})


def test_after_a_resize_only_what_the_new_share_lacks_is_made():
    making = warm()
    before = making.ahead.keys
    making.ahead.aim(0, range(2, 6))
    making.finish()
    new = making.take_new()
    assert not set(new) & before
    assert {(0, 4), (0, 5)} <= set(new)
    assert making.ahead.take(0, 2).done()
    assert making.ahead.take(0, 3).done()


def test_what_the_new_share_has_no_use_for_is_let_go_and_not_begun():
    making = Making(at_least=8)
    making.ahead.aim(0, range(4))
    pending = making.futures[(1, 0)]
    making.ahead.aim(0, range(2, 4))
    assert pending.cancelled()
    assert all(micro in (2, 3) for _, micro in making.ahead.keys)


def test_the_next_step_lets_the_last_one_go():
    making = warm()
    for micro in range(4):
        making.ahead.take(0, micro)
    making.ahead.aim(1, range(4))
    assert all(step >= 1 for step, _ in making.ahead.keys)


def test_nothing_is_made_past_the_last_step():
    making = warm(until=2)
    for micro in range(4):
        making.ahead.take(0, micro)
    assert max(making.ahead.keys) == (1, 3)


def test_the_memory_bound_holds_and_the_next_one_is_always_allowed():
    making = Making(most_bytes=35)
    making.ahead.aim(0, range(8))
    for micro in range(8):
        making.ahead.take(0, micro)
        making.finish()
        assert len(making.ahead.keys) <= 4
    making = Making(most_bytes=5)
    making.ahead.aim(0, range(8))
    for micro in range(8):
        assert making.ahead.take(0, micro) is making.futures[(0, micro)]
        making.finish()


def test_the_one_that_is_waited_for_is_never_cancelled():
    making = Making(most_bytes=5)
    making.ahead.aim(0, range(8))
    making.finish()
    future = making.ahead.take(0, 5)
    making.ahead.take(0, 6)
    assert not future.cancelled()


def test_a_large_share_is_bounded():
    making = Making()
    making.ahead.aim(0, range(10_000))
    making.finish()
    making.ahead.take(0, 0)
    assert len(making.ahead.keys) <= MOST_MICRO_BATCHES + 1


def test_an_empty_share_makes_nothing():
    making = Making()
    making.ahead.aim(0, range(0))
    assert making.begun == []
