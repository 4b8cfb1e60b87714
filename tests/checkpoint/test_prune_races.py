"""Somebody prunes while somebody saves: what is reported saved is whole, in every order of what the two do."""

import itertools
import threading
import uuid

import pytest
from blobs_on_tiers import blob_of, save, save_rank, sealed

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import folder_of
from holdfast.checkpoint.policy import Retention
from holdfast.errors import HoldfastError, TierError

OPERATIONS = {"save": 4, "prune": 11}
"""Of each of the two, at most."""


class Turns:
    """Two threads that come to operations on a tier by turns, as `order` says; one that is done is passed over."""

    def __init__(self, order):
        self.order, self.at, self.done, self.news = order, 0, set(), threading.Condition()

    def take(self, who):
        with self.news:
            self.news.wait_for(lambda: self._whose() in (who, None))

    def _whose(self):
        while self.at < len(self.order) and self.order[self.at] in self.done:
            self.at += 1
        return self.order[self.at] if self.at < len(self.order) else None

    def passed(self):
        with self.news:
            self.at += 1
            self.news.notify_all()

    def leave(self, who):
        with self.news:
            self.done.add(who)
            self.news.notify_all()


class InTurn:
    """A tier of which every operation waits for its turn. A folder is not removed in one: its files go one by one."""

    def __init__(self, tier, turns, who):
        self._tier, self._turns, self._who = tier, turns, who
        self.url = tier.url

    def __getattr__(self, name):
        def do(*given):
            self._turns.take(self._who)
            try:
                return getattr(self._tier, name)(*given)
            finally:
                self._turns.passed()

        return do

    def remove_folder(self, name, last=""):
        paths = self.files(name)
        for path in sorted(paths, key=lambda p: p == last):
            self.remove(path)


def tried(order):
    """One has written the blob of step 5 and goes on, while another prunes; returns whether it was saved."""
    place = Archive(f"memory://{uuid.uuid4().hex}")
    save(place, 10, world=1, nbytes=10)
    shard = save_rank(place, 5, 0, nbytes=10)
    head = sealed(5, blob_of(5, 0, 10)).head
    turns, ends = Turns(order), {}

    def work(who, action):
        try:
            action(Archive(InTurn(place.tier, turns, who)))
        except HoldfastError as error:
            ends[who] = error
        finally:
            turns.leave(who)

    actions = {
        "save": lambda archive: archive.commit(5, [archive.save_head(shard, head)]),
        "prune": lambda archive: archive.prune(Retention(keep=9), unfinished=True),
    }
    threads = [threading.Thread(target=work, args=item) for item in actions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "prune" not in ends
    assert turns.at <= len(order)
    if "save" not in ends:
        assert place.verify(5).step == 5
        return True
    assert isinstance(ends["save"], TierError)
    assert "was removed while it was being written" in str(ends["save"])
    assert place.steps() == [10]
    return False


def test_in_every_order_what_is_reported_saved_is_whole():
    saved, total = [], sum(OPERATIONS.values())
    for places in itertools.combinations(range(total), OPERATIONS["save"]):
        saved.append(tried(["save" if i in places else "prune" for i in range(total)]))
    assert {True, False} == set(saved)


def test_one_that_was_left_half_removed_goes_later():
    """And until then nothing is saved there."""
    archive = Archive(f"memory://{uuid.uuid4().hex}")
    archive.tier.publish(f"{folder_of(5)}/being-removed", b"")
    with pytest.raises(TierError, match=r"step-5 was removed while"):
        save(archive, 5)
    save(archive, 10)
    archive.prune(Retention())
    assert folder_of(5) in archive.tier.folders(), "somebody may be writing it"
    archive.prune(Retention())
    assert archive.tier.folders() == [folder_of(10)]
    save(archive, 5)
    assert archive.verify(5).step == 5
