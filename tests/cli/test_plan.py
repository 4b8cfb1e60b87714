import json


def test_the_sizes_of_a_job_and_what_they_leave_idle(holdfast):
    said = holdfast("plan", "--global-batch", 64, "--micro-batch", 8, "--nnodes", "1:9")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert ["8", "8", "1", "0.0%"] in rows
    assert ["3", "3", "2", "to", "3", "11.1%"] in rows
    assert "more than 8 workers cannot share 8 micro-batches" in said.out
    assert "--micro-batch 4 leaves at most" in said.out or "--micro-batch 1 leaves" in said.out


def test_as_json(holdfast):
    said = holdfast("plan", "--global-batch", 12, "--micro-batch", 2, "--nnodes", "4", "--json")
    assert json.loads(said.out)["sizes"] == [{"world": 4, "most": 2, "least": 1, "idle": 0.25}]


def test_sizes_that_cannot_be(holdfast):
    assert "not a multiple" in holdfast("plan", "--global-batch", 10, "--micro-batch", 4).err
    said = holdfast("plan", "--global-batch", 8, "--micro-batch", 4, "--nnodes", "3:4")
    assert said.code == 2
    assert "2 micro-batches are too few for 3 workers" in said.err
