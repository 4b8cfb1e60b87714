"""A worker that ends writes what its script left in open files."""

import weakref

from holdfast.train import script


class Thing:
    """Something that can be referred to weakly."""


def test_a_proxy_of_what_is_gone_keeps_no_file_from_being_written(tmp_path):
    thing = Thing()
    proxies = [weakref.proxy(thing) for _ in range(1)]  # torch.compile leaves such
    del thing
    with (tmp_path / "file").open("w") as file:
        file.write("last words")
        script._flush_files()
        assert (tmp_path / "file").read_text() == "last words"
    assert len(proxies) == 1
