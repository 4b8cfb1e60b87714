"""What an agent loses when it has more to say than it can keep."""

from holdfast.agent.coordinator_link import Outbox
from holdfast.protocol import messages as m


def progress(step: int, loss: float | None = None) -> m.FromWorker:
    losses = () if loss is None else (m.ReportedStep(step, loss, 0.1),)
    return m.FromWorker("w", m.Progress(generation=1, committed=step + 1, median_s=0.1, losses=losses))


def exited(number: int) -> m.Exited:
    return m.Exited(worker=f"w{number}", code=1)


def everything(outbox: Outbox) -> list[m.AgentMessage]:
    return [outbox.take().message for _ in range(len(outbox))]


def test_a_full_queue_repeats_only_what_there_is_room_for() -> None:
    outbox = Outbox(kept=16, repeated=8)
    for step in range(8):
        outbox.put(progress(step, 2.5), 0.0)
        outbox.sent(outbox.take())
    for number in range(13):
        outbox.put(exited(number), 0.0)
    outbox.repeat()
    told = everything(outbox)
    assert told[3:] == [exited(number) for number in range(13)]
    assert told[:3] == [progress(step, 2.5) for step in (5, 6, 7)]


def test_repeats_go_first_then_what_is_said_anew_then_rows_of_the_ledger() -> None:
    outbox = Outbox(kept=8, repeated=8)
    outbox.put(progress(0, 2.5), 0.0)
    outbox.sent(outbox.take())
    outbox.put(exited(0), 0.0)
    outbox.put(progress(1, 2.5), 0.0)
    outbox.put(m.Heartbeat(), 0.0)
    outbox.put(progress(2), 0.0)
    outbox.repeat()
    full = [progress(0, 2.5), exited(0), progress(1, 2.5), m.Heartbeat(), progress(2)]
    for number in range(1, 4):
        outbox.put(exited(number), 0.0)
    lost = []
    for number in range(4, 9):
        outbox.put(exited(number), 0.0)
        told = [letter.message for letter in outbox._waiting]
        assert len(told) <= 8
        assert told[-1] == exited(number)
        lost += [x for x in full if x not in told and x not in lost]
    assert lost == [progress(0, 2.5), m.Heartbeat(), progress(2), progress(1, 2.5), exited(0)]


def test_what_is_under_way_is_not_lost_when_the_queue_gets_full() -> None:
    outbox = Outbox(kept=8)
    for number in range(8):
        outbox.put(exited(number), 0.0)
    under_way = outbox.take()
    for number in range(8, 20):
        outbox.put(exited(number), 0.0)
    outbox.put_back([under_way])
    told = everything(outbox)
    assert told[0] == exited(0)
    assert told[-1] == exited(19)
    assert len(told) <= 9
