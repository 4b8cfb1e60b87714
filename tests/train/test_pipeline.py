"""Stages of a pipeline: what is refused by name, who has which layer, and what is left of a schedule that was cut off."""

from contextlib import closing

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from holdfast.errors import StateError, UsageError
from holdfast.train import restore, state_image
from holdfast.train.sharding import Pipelines, Sharding, _prepare

PARTS, WIDTH = 2, 4


def place_of(shard, stages, index):
    return Sharding(
        shape=(shard, 1),
        position=index,
        device=torch.device("cpu"),
        host="127.0.0.1",
        target=12,
        called=lambda begins: None,
        stages=stages,
    )


def stage_of(place, **more):
    part = torch.empty(1, WIDTH, requires_grad=True)
    shapes = {"input_args": (part,), "output_args": (part,)} | more
    at = place.mesh["stage"].get_local_rank()
    group = place.mesh["stage"].get_group()
    return PipelineStage(torch.nn.Linear(WIDTH, WIDTH), at, 2, torch.device("cpu"), group=group, **shapes)


def summed(out, target):
    return (out - target).square().sum()


def test_stages_are_between_the_shards_and_the_tensor_dimension():
    with closing(
        Sharding((2, 2), 6, torch.device("cpu"), "127.0.0.1", 16, lambda begins: None, stages=2)
    ) as place:
        assert place.mesh.mesh_dim_names == ("replicate", "shard", "stage", "tensor")
        assert place.mesh.get_coordinate() == (0, 1, 1, 0)
        assert place.shape == (2, 4)
        assert place.own_stage == [2, 3, 6, 7]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_of_several_workers_shards_its_layers_over_them_alone(stage):
    with closing(place_of(2, 2, stage)) as place:
        model = torch.nn.Linear(WIDTH, WIDTH)
        with pytest.raises(UsageError, match="weight, bias are neither sharded nor replicated"):
            place.replicate(model)
        fully_shard(model, mesh=place.mesh["shard"])
        place.replicate(model)
        assert place.counts(model.weight)


def test_a_stage_of_one_worker_needs_no_sharding():
    with closing(place_of(1, 2, 1)) as place:
        model = torch.nn.Linear(WIDTH, WIDTH)
        place.replicate(model)
        assert place.counts(model.weight)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda at: Schedule1F1B(at, PARTS, loss_fn=summed), "scale_grads=False"),
        (lambda at: Schedule1F1B(at, PARTS, scale_grads=False), "a loss_fn that sums"),
        (
            lambda at: ScheduleInterleaved1F1B([at], PARTS, loss_fn=summed, scale_grads=False),
            "is not supported",
        ),
    ],
)
def test_schedules_that_cannot_be_taken_up_again_are_refused(make, why):
    with closing(place_of(1, 2, 0)) as place, pytest.raises(UsageError, match=why):
        place.pipelines.run(make(stage_of(place)), (), None, {})


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"input_args": None, "output_args": None}, "stage 0 does not specify its shapes"),
        (
            {"output_args": (torch.empty(1, WIDTH),)},
            "stage 0 exchanges with the others do not require a gradient",
        ),
    ],
)
def test_stages_that_say_too_little_are_refused(shapes, why):
    with closing(place_of(1, 2, 0)) as place:
        schedule = Schedule1F1B(stage_of(place, **shapes), PARTS, loss_fn=summed, scale_grads=False)
        with pytest.raises(UsageError, match=why):
            place.pipelines.run(schedule, (), None, {})


def test_what_a_cut_off_step_has_left_in_a_schedule_is_gone():
    with closing(place_of(1, 2, 1)) as place:
        stage = stage_of(place)
        schedule = ScheduleGPipe(stage, PARTS, loss_fn=summed, scale_grads=False)
        _prepare(schedule)
        before = stage.args_recv_info[0][0].buffer
        schedule._internal_losses.append(torch.ones(()))
        stage.fwd_cache[0] = ((), [])
        _prepare(schedule)
        assert (schedule._internal_losses, stage.fwd_cache) == ([], {})
        assert stage.args_recv_info[0][0].buffer is not before


def test_a_schedule_that_raised_is_made_ready_again(monkeypatch):
    made = []
    monkeypatch.setattr("holdfast.train.sharding._prepare", made.append)
    with closing(place_of(1, 2, 1)) as place:
        schedule = ScheduleGPipe(stage_of(place), PARTS, loss_fn=summed, scale_grads=False)
        pipelines = Pipelines()

        def step(*args, losses, **more):
            losses += [torch.ones(()), torch.ones(())]
            if len(made) == 1:
                raise ConnectionError

        schedule.step = step
        with pytest.raises(ConnectionError):
            pipelines.run(schedule, (), None, {})
        assert pipelines.run(schedule, (), None, {}) == 2.0
        assert pipelines.run(schedule, (), None, {}) == 2.0
        assert made == [schedule, schedule]


def test_stages_on_gpus_are_refused():
    with pytest.raises(UsageError, match="pipelines are supported only with gloo"):
        Sharding((1, 1), 0, torch.device("cuda"), "127.0.0.1", 4, lambda begins: None, stages=2)


@pytest.mark.parametrize("after", [(1, 1), (2, 2)], ids=str)
def test_a_state_with_another_number_of_stages_is_refused(tmp_path, after):
    """The stages' layers have the same names and shapes, and one's are not another's."""
    with closing(place_of(1, 2, 0)) as place:
        before = place.named({"model": torch.nn.Linear(WIDTH, WIDTH)})
        restore.save(state_image.capture(before, 5), str(tmp_path), restore.Retention())
    objects = {"model": torch.nn.Linear(WIDTH, WIDTH)}
    if after[1] > 1:
        with closing(place_of(1, 2, 1)) as place:
            objects = place.named(objects)
    with pytest.raises(StateError, match=r"the state contains \['stage0_model'\]"):
        restore.restore(objects, str(tmp_path), 5, shard=(0, 1))
