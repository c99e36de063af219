"""The step loop: one thread, one outcome for every item, and no fault that ends it."""

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from producer.core import PreparedItem
from producer.errors import InternalError, OverloadedError, UnavailableError
from producer.metrics import Metrics
from producer.step_loop import StepLoop
from producer.wire.contract import Reason
from tests.kit.steps import Done
from tests.unit.conftest import key_of, prepared, sample

WAIT_S = 30.0
"""Longer than anything here takes: reaching it means that it never comes."""


class Device:
    """Stands in for encoder and publisher. It computes nothing; a step waits at the gate while that is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_busy = threading.Event()
        self.steps: list[list[str]] = []
        self.published: list[str] = []
        self.launchers: set[str] = set()
        self.bad_items: dict[str, Exception] = {}
        self.bad_publishes: dict[str, Exception] = {}

    def launch(self, items: Sequence[PreparedItem]) -> Done:
        self.launchers.add(threading.current_thread().name)
        self.steps.append([item.key for item in items])
        self.is_busy.set()
        assert self.gate.wait(WAIT_S)
        for item in items:
            if item.key in self.bad_items:
                raise self.bad_items[item.key]
        return Done([torch.zeros(item.num_rows, 8) for item in items])

    def publish(self, item: PreparedItem, embedding: torch.Tensor) -> None:
        if item.key in self.bad_publishes:
            raise self.bad_publishes[item.key]
        self.published.append(item.key)

    def hold(self) -> None:
        """The next step waits for `gate`."""
        self.gate.clear()
        self.is_busy.clear()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture(params=[0, 2], ids=["published by the loop", "publishers"])
def loop(device: Device, metrics: Metrics, request: pytest.FixtureRequest) -> Iterator[StepLoop]:
    loop = StepLoop(
        device.launch, device.publish, max_rows=16, max_items=3, num_publishers=request.param, metrics=metrics
    )
    loop.start()
    yield loop
    device.gate.set()
    loop.stop()


def keys(*numbers: int) -> list[str]:
    return [prepared(number).key for number in numbers]


def begin_step(loop: StepLoop, device: Device) -> None:
    """Item 0 is on the device and stays there until the gate opens."""
    device.hold()
    loop.submit(prepared(0))
    assert device.is_busy.wait(WAIT_S)


def test_an_item_ends_when_it_is_published(loop: StepLoop, device: Device) -> None:
    assert loop.submit(prepared(1)).result(WAIT_S) is None
    assert device.published == keys(1)


def test_one_thread_drives_the_device(loop: StepLoop, device: Device) -> None:
    for number in range(5):
        loop.submit(prepared(number)).result(WAIT_S)
    assert device.launchers == {"step-loop"}


def test_the_next_step_does_not_wait_until_the_last_is_published(device: Device, metrics: Metrics) -> None:
    may_publish = threading.Event()

    def publish(item: PreparedItem, embedding: torch.Tensor) -> None:
        assert may_publish.wait(WAIT_S)
        device.publish(item, embedding)

    loop = StepLoop(device.launch, publish, max_rows=16, max_items=3, num_publishers=1, metrics=metrics)
    loop.start()
    done = [loop.submit(prepared(0))]
    assert device.is_busy.wait(WAIT_S)
    device.is_busy.clear()
    done.append(loop.submit(prepared(1)))
    assert device.is_busy.wait(WAIT_S)
    assert not device.published
    may_publish.set()
    assert loop.stop()
    assert [one.exception(0) for one in done] == [None, None]  # what is being published at the end is not refused
    assert device.published == keys(0, 1)


def test_items_that_wait_together_share_steps(loop: StepLoop, device: Device) -> None:
    begin_step(loop, device)
    waiting = [loop.submit(prepared(number)) for number in range(1, 6)]
    device.gate.set()
    for done in waiting:
        done.result(WAIT_S)
    assert device.steps == [keys(0), keys(1, 2, 3), keys(4, 5)]
    assert sorted(device.published) == sorted(keys(*range(6)))


def test_counts_say_what_ran(loop: StepLoop, device: Device, metrics: Metrics) -> None:
    begin_step(loop, device)
    waiting = [loop.submit(prepared(number)) for number in (1, 2)]
    device.gate.set()
    for done in waiting:
        done.result(WAIT_S)
    assert (sample(metrics, "step_items_count"), sample(metrics, "step_items_sum")) == (2, 3)
    assert sample(metrics, "queue_seconds_count") == 3
    assert sample(metrics, "stage_seconds_count", stage="encode") == 2


def test_an_items_wait_is_that_for_a_process_and_that_for_a_step(loop: StepLoop, metrics: Metrics) -> None:
    loop.submit(dataclasses.replace(prepared(0), waited_s=1000.0)).result(WAIT_S)
    assert 1000 <= sample(metrics, "queue_seconds_sum") < 1000 + WAIT_S


def test_an_item_that_is_tried_again_has_waited_once(loop: StepLoop, device: Device, metrics: Metrics) -> None:
    begin_step(loop, device)
    device.bad_items[key_of(2)] = ValueError("bad")
    waiting = [loop.submit(prepared(number)) for number in (1, 2, 3)]
    device.gate.set()
    for done in waiting:
        done.exception(WAIT_S)
    assert len(device.steps) > 2
    assert sample(metrics, "queue_seconds_count") == 4


def test_a_step_without_progress_is_a_metric(loop: StepLoop, device: Device, metrics: Metrics) -> None:
    assert sample(metrics, "stalled_seconds") == 0
    begin_step(loop, device)
    until_s = time.monotonic() + WAIT_S
    while sample(metrics, "stalled_seconds") < 0.05:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    device.gate.set()


# Cancellation


def test_a_cancelled_item_never_reaches_the_device(loop: StepLoop, device: Device) -> None:
    begin_step(loop, device)
    first, second = loop.submit(prepared(1)), loop.submit(prepared(2))
    assert first.cancel()
    device.gate.set()
    second.result(WAIT_S)
    assert device.steps == [keys(0), keys(2)]


def test_a_step_of_cancelled_items_is_no_step(loop: StepLoop, device: Device) -> None:
    begin_step(loop, device)
    assert loop.submit(prepared(1, modality="video")).cancel()
    last = loop.submit(prepared(2))
    device.gate.set()
    last.result(WAIT_S)
    assert device.steps == [keys(0), keys(2)]


def test_an_item_on_the_device_is_finished(loop: StepLoop, device: Device) -> None:
    device.hold()
    done = loop.submit(prepared(1))
    assert device.is_busy.wait(WAIT_S)
    assert not done.cancel()
    device.gate.set()
    assert done.result(WAIT_S) is None
    assert device.published == keys(1)


def test_a_cancelled_items_inputs_are_let_go_at_once(loop: StepLoop, device: Device) -> None:
    class Inputs:
        """Megabytes, in truth."""

    begin_step(loop, device)
    inputs = Inputs()
    alive = weakref.ref(inputs)
    done = loop.submit(prepared(1, inputs=inputs))
    del inputs
    assert done.cancel()
    del done
    gc.collect()
    assert alive() is None


# Faults


def test_a_bad_item_does_not_void_its_neighbours(loop: StepLoop, device: Device) -> None:
    device.bad_items = {prepared(2).key: RuntimeError("at 0x7f00: out of memory")}
    begin_step(loop, device)
    first, bad, third = (loop.submit(prepared(number)) for number in (1, 2, 3))
    device.gate.set()
    first.result(WAIT_S)
    third.result(WAIT_S)
    with pytest.raises(InternalError, match=r"^encoding failed: RuntimeError$") as caught:
        bad.result(WAIT_S)
    assert caught.value.reason is Reason.ENCODE_FAILED
    assert device.published == keys(0, 1, 3)


def test_the_loop_survives_a_bad_step(loop: StepLoop, device: Device) -> None:
    device.bad_items = {prepared(1).key: ValueError("bad")}
    with pytest.raises(InternalError):
        loop.submit(prepared(1)).result(WAIT_S)
    loop.submit(prepared(2)).result(WAIT_S)


def test_a_refused_publish_is_the_items_error(loop: StepLoop, device: Device) -> None:
    device.bad_publishes = {prepared(1).key: OverloadedError(Reason.POOL_FULL, "full")}
    begin_step(loop, device)
    refused, fine = loop.submit(prepared(1)), loop.submit(prepared(2))
    device.gate.set()
    fine.result(WAIT_S)
    with pytest.raises(OverloadedError, match="full"):
        refused.result(WAIT_S)


def test_a_publish_that_breaks_is_an_internal_error(loop: StepLoop, device: Device) -> None:
    device.bad_publishes = {prepared(1).key: KeyError("float64")}
    with pytest.raises(InternalError, match=r"^publishing failed: KeyError$"):
        loop.submit(prepared(1)).result(WAIT_S)
    loop.submit(prepared(2)).result(WAIT_S)


def test_an_encoder_that_returns_too_few_embeddings_is_an_internal_error(metrics: Metrics) -> None:
    loop = StepLoop(lambda items: Done([]), lambda item, rows: None, max_rows=16, max_items=3, metrics=metrics)
    loop.start()
    done = loop.submit(prepared(1))
    while loop._thread.is_alive() and not done.done():
        time.sleep(0.01)
    loop.stop()
    assert isinstance(done.exception(timeout=0), InternalError)


# Stopping


def test_stopping_refuses_what_waits_and_finishes_what_runs(loop: StepLoop, device: Device) -> None:
    device.hold()
    running = loop.submit(prepared(0))
    assert device.is_busy.wait(WAIT_S)
    waiting = [loop.submit(prepared(number)) for number in range(1, 6)]
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    with loop._changed:
        assert loop._changed.wait_for(lambda: loop._stopping, WAIT_S)
    device.gate.set()
    stopping.join(WAIT_S)
    assert running.result(WAIT_S) is None
    for done in waiting:
        with pytest.raises(UnavailableError, match="shutting down") as caught:
            done.result(WAIT_S)
        assert caught.value.reason is Reason.SHUTTING_DOWN
    assert device.steps == [keys(0)]


def test_a_stopped_loop_takes_nothing(loop: StepLoop) -> None:
    loop.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        loop.submit(prepared(1))


def test_stopping_twice_or_without_a_start_is_harmless(device: Device, metrics: Metrics) -> None:
    loop = StepLoop(device.launch, device.publish, max_rows=1, max_items=1, metrics=metrics)
    loop.stop()
    loop.stop()


# A device that is stuck, or lost


def test_a_step_that_makes_no_progress_is_seen(loop: StepLoop, device: Device) -> None:
    assert loop.stalled_s == 0
    begin_step(loop, device)
    time.sleep(0.2)
    assert loop.stalled_s >= 0.2
    loop.tick()  # as the encoder does after each block: a slow step is not a stuck one
    assert loop.stalled_s < 0.2
    device.gate.set()
    deadline_s = time.monotonic() + WAIT_S
    while loop.stalled_s and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert loop.stalled_s == 0
    assert loop.lost == ""


@pytest.mark.parametrize(
    ("loop", "where"), [(0, "bad_items"), (0, "bad_publishes"), (2, "bad_items")], indirect=["loop"]
)
def test_a_lost_device_ends_every_item_and_takes_none(loop: StepLoop, device: Device, where: str) -> None:
    begin_step(loop, device)
    getattr(device, where)[keys(1)[0]] = torch.AcceleratorError("an illegal memory access was encountered")
    jobs = [loop.submit(prepared(number)) for number in (1, 2, 3, 4)]
    device.gate.set()
    for done in jobs[:1] + jobs[3:]:
        with pytest.raises(UnavailableError, match="cannot encode any more: the device failed while") as caught:
            done.result(WAIT_S)
        assert caught.value.reason is Reason.DEVICE_LOST
    assert all(done.done() or done.exception(WAIT_S) is None for done in jobs)
    assert "the device failed" in loop.lost
    with pytest.raises(UnavailableError, match="cannot encode any more"):
        loop.submit(prepared(5))
    assert device.steps[:2] == [keys(0), keys(1, 2, 3)]
    assert len(device.steps) == 2


def test_running_out_of_memory_loses_no_device(loop: StepLoop, device: Device) -> None:
    device.bad_items[keys(0)[0]] = torch.OutOfMemoryError("no room")
    with pytest.raises(InternalError):
        loop.submit(prepared(0)).result(WAIT_S)
    assert loop.submit(prepared(1)).result(WAIT_S) is None


def test_a_thread_that_dies_leaves_nobody_waiting(loop: StepLoop, device: Device) -> None:
    begin_step(loop, device)
    device.bad_items[keys(1)[0]] = SystemExit()  # type: ignore[assignment]
    jobs = [loop.submit(prepared(number)) for number in range(1, 6)]
    device.gate.set()
    for done in jobs:
        with pytest.raises(UnavailableError, match="the device thread failed"):
            done.result(WAIT_S)


def test_a_stuck_step_does_not_hold_up_the_end(device: Device, metrics: Metrics) -> None:
    loop = StepLoop(device.launch, device.publish, max_rows=1, max_items=1, metrics=metrics)
    loop.start()
    begin_step(loop, device)
    assert not loop.stop(timeout_s=0.1)
    device.gate.set()
    assert loop.stop(WAIT_S)


# Steps beside each other


class AsyncDevice(Device):
    """Steps whose results come when a test opens their gate. `log` is what was launched, waited for and finished."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.bad_finishes: dict[str, BaseException] = {}
        self.changed = threading.Condition()

    def launch(self, items: Sequence[PreparedItem]) -> Any:
        self._say("launch", items)
        done = super().launch(items)
        return SimpleNamespace(finish=lambda: self._finish(items, done))

    def _finish(self, items: Sequence[PreparedItem], done: Done) -> Any:
        self._say("wait", items)
        assert self.gate_of(items[0].key).wait(WAIT_S)
        self._say("finish", items)
        for item in items:
            if item.key in self.bad_finishes:
                raise self.bad_finishes[item.key]
        return done.finish()

    def gate_of(self, key: str) -> threading.Event:
        return self.gates.setdefault(key, threading.Event())

    def open(self, *numbers: int) -> None:
        for key in keys(*numbers):
            self.gate_of(key).set()

    def _say(self, what: str, items: Sequence[PreparedItem]) -> None:
        with self.changed:
            self.log.append(f"{what} {'+'.join(str(int(item.key, 16)) for item in items)}")
            self.changed.notify_all()

    def wait_for(self, *events: str) -> None:
        """Until `log` is exactly that."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.log) >= len(events), WAIT_S), self.log
            assert self.log == list(events)


@pytest.fixture
def ahead() -> AsyncDevice:
    return AsyncDevice()


@pytest.fixture
def pipelined(ahead: AsyncDevice, metrics: Metrics) -> Iterator[StepLoop]:
    """A loop with two steps under way, of one item each."""
    yield from running(ahead, metrics, max_steps=2, max_items=1)


def running(device: AsyncDevice, metrics: Metrics, *, max_steps: int, max_items: int) -> Iterator[StepLoop]:
    loop = StepLoop(
        device.launch, device.publish, max_rows=16, max_items=max_items, max_steps=max_steps, metrics=metrics
    )
    yield loop
    device.gate.set()
    device.open(*range(10))
    loop.stop()


def submit(loop: StepLoop, *numbers: int) -> "list[Future[None]]":
    """All of them before the loop sees the first."""
    jobs = [loop.submit(prepared(number)) for number in numbers]
    loop.start()
    return jobs


def test_the_next_step_is_launched_before_the_first_is_finished(pipelined: StepLoop, ahead: AsyncDevice) -> None:
    """And no more than `max_steps`, which are finished in their order."""
    jobs = submit(pipelined, 0, 1, 2, 3)
    ahead.open(1, 2)  # the device is done with these first: that changes nothing
    ahead.wait_for("launch 0", "launch 1", "wait 0")
    assert not any(job.done() for job in jobs)
    ahead.open(0)
    first = ["launch 0", "launch 1", "wait 0", "finish 0", "launch 2", "wait 1", "finish 1", "launch 3", "wait 2"]
    ahead.wait_for(*first, "finish 2", "wait 3")
    assert [job.done() for job in jobs] == [True, True, True, False]
    ahead.open(3)
    assert [job.result(WAIT_S) for job in jobs] == [None] * 4
    assert ahead.published == keys(0, 1, 2, 3)
    assert ahead.launchers == {"step-loop"}


@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_no_more_steps_are_under_way_than_allowed(ahead: AsyncDevice, metrics: Metrics, max_steps: int) -> None:
    for loop in running(ahead, metrics, max_steps=max_steps, max_items=1):
        jobs = submit(loop, *range(8))
        ahead.open(*range(8))
        assert all(job.result(WAIT_S) is None for job in jobs)
    under_way = [0]
    for event in ahead.log:
        under_way.append(under_way[-1] + {"launch": 1, "wait": 0, "finish": -1}[event.split()[0]])
    assert max(under_way) == max_steps


def test_a_lone_step_is_finished_without_another(pipelined: StepLoop, ahead: AsyncDevice) -> None:
    ahead.open(0)
    (job,) = submit(pipelined, 0)
    assert job.result(WAIT_S) is None
    assert ahead.log == ["launch 0", "wait 0", "finish 0"]


def test_a_step_that_fails_late_is_tried_item_by_item(ahead: AsyncDevice, metrics: Metrics) -> None:
    """What was launched behind it is finished all the same."""
    ahead.bad_finishes = {keys(1)[0]: RuntimeError("at 0x7f00")}
    for loop in running(ahead, metrics, max_steps=2, max_items=3):
        jobs = submit(loop, 0, 1, 2, 3)
        ahead.open(0, 1, 2, 3)
        for number in (0, 2, 3):
            assert jobs[number].result(WAIT_S) is None
        with pytest.raises(InternalError, match=r"^encoding failed: RuntimeError$"):
            jobs[1].result(WAIT_S)
    assert sorted(ahead.published) == keys(0, 2, 3)
    assert [event for event in ahead.log if event.startswith("launch")] == [
        "launch 0+1+2",
        "launch 3",
        "launch 0",
        "launch 1",
        "launch 2",
    ]


def test_a_launch_that_fails_behind_a_step_loses_neither(pipelined: StepLoop, ahead: AsyncDevice) -> None:
    ahead.bad_items = {keys(1)[0]: RuntimeError("bad")}
    jobs = submit(pipelined, 0, 1, 2)
    ahead.open(0, 1, 2)
    assert [jobs[number].result(WAIT_S) for number in (0, 2)] == [None, None]
    with pytest.raises(InternalError, match=r"^encoding failed: RuntimeError$"):
        jobs[1].result(WAIT_S)


def test_stopping_finishes_all_steps_under_way(pipelined: StepLoop, ahead: AsyncDevice) -> None:
    jobs = submit(pipelined, 0, 1, 2)
    ahead.wait_for("launch 0", "launch 1", "wait 0")
    assert not pipelined.stop(timeout_s=0.05)
    ahead.open(0, 1)
    assert pipelined.stop(WAIT_S)
    assert [job.result(0) for job in jobs[:2]] == [None, None]
    with pytest.raises(UnavailableError, match="shutting down"):
        jobs[2].result(0)
    assert ahead.published == keys(0, 1)


def test_a_wait_for_the_device_is_seen(pipelined: StepLoop, ahead: AsyncDevice) -> None:
    (job,) = submit(pipelined, 0)
    ahead.wait_for("launch 0", "wait 0")
    time.sleep(0.2)
    assert pipelined.stalled_s >= 0.2
    ahead.open(0)
    assert job.result(WAIT_S) is None


@pytest.mark.parametrize("error", [SystemExit(), torch.AcceleratorError("an illegal memory access")], ids=repr)
def test_what_ends_the_loop_ends_every_step_under_way(
    pipelined: StepLoop, ahead: AsyncDevice, error: BaseException
) -> None:
    ahead.bad_finishes = dict.fromkeys(keys(0, 1), error)
    jobs = submit(pipelined, 0, 1, 2)
    ahead.open(0, 1, 2)
    for job in jobs:
        with pytest.raises(UnavailableError, match="cannot encode any more: the device") as caught:
            job.result(WAIT_S)
        assert caught.value.reason is Reason.DEVICE_LOST
    assert ahead.published == []


def test_a_thread_that_dies_between_items_tried_alone_leaves_nobody_waiting(
    ahead: AsyncDevice, metrics: Metrics
) -> None:
    for loop in running(ahead, metrics, max_steps=1, max_items=3):
        ahead.bad_finishes = {keys(2)[0]: RuntimeError("bad"), keys(0)[0]: SystemExit()}
        jobs = submit(loop, 2, 0, 1)
        ahead.open(0, 1, 2)
        with pytest.raises(InternalError):
            jobs[0].result(WAIT_S)
        for job in jobs[1:]:
            with pytest.raises(UnavailableError, match="the device thread failed"):
                job.result(5)


def test_nothing_more_is_launched_on_a_lost_device(ahead: AsyncDevice, metrics: Metrics) -> None:
    """Though it is lost while the items of a bad step are tried alone."""
    for loop in running(ahead, metrics, max_steps=1, max_items=3):
        ahead.bad_finishes = {keys(0)[0]: RuntimeError("bad"), keys(1)[0]: torch.AcceleratorError("lost")}
        jobs = submit(loop, 0, 1, 2)
        ahead.open(0, 1, 2)
        with pytest.raises(InternalError):
            jobs[0].result(WAIT_S)
        for job in jobs[1:]:
            with pytest.raises(UnavailableError, match="the device failed"):
                job.result(5)
    assert "launch 2" not in ahead.log
