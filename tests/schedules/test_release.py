"""What stages and schedules hold while torch is patched, and who lets go of it: zbpipe/_stage/.

Over two gloo processes; what needs no second process runs here, on one rank that has both stages of a V. The sends' works, their
threads and the stages' methods are of private modules, as nothing public shows them.
"""

import contextlib
import functools
import gc
import itertools
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import pipelines
from support.blocks import MICROBATCHES, SCHEDULES, WIDTH, ZERO_BUBBLE, Linears, batch, blocks, f64
from support.oracle import without_collector
from support.pipelines import Model, Pipeline, assert_close, joined, ranks_of, train, unpipelined, unwatch, watch
from support.processes import forks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zbpipe
from zbpipe._stage import state  # nothing public shows sends, their works and threads
from zbpipe._stage.before_2_15 import methods, outputs, sends, threads  # the same

WORLD = 2
PATIENCE = 10.0  # seconds for a send to be done; the receive has been posted or will be without our doing
RELEASES = torch.__version__ >= (2, 15)  # then torch sees to sends and sent outputs, and we to what is left from I to W
# Odd stages have gradients that are None: 2.11's stage sends none, 2.12's raises where it would.
SENDS_NONE = torch.__version__ >= (2, 13)
sends_none = pytest.mark.skipif(not SENDS_NONE, reason="a stage of torch before 2.13 sends no gradient that is None")
before_2_15 = pytest.mark.skipif(RELEASES, reason="torch 2.15 has other buffers, and frees them")
ZBV = "ScheduleZBVZeroBubble"
both = pytest.mark.parametrize("release", [False, True])


class Odd(nn.Module):
    """A stage of four outputs: saved by its own node, an input handed on, without gradient, an unused one."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.block = Linears()
        self.skip = nn.Linear(WIDTH, WIDTH, dtype=f64)

    def forward(self, x, handed_on=None, mask=None, unused=None):
        if self.first:
            handed_on, mask = self.skip(x), x.detach().sign()
        y = (self.block(x) * mask).tanh()
        if self.last:
            return self.skip(y) + handed_on
        return y, handed_on, mask, self.block.down(self.block.up(y))


def odd(count):
    torch.manual_seed(1)
    return [Odd(i == 0, i == count - 1) for i in range(count)]


PLAIN = Model(functools.partial(blocks, kind=Linears), steps=3)
MODELS = {"plain": PLAIN, "odd": Model(odd)}
RUNS = [(name, "plain", release) for name in SCHEDULES for release in (False, True)]
RUNS += [(name, "odd", True) for name in ("ScheduleGPipe", "Schedule1F1B", *ZERO_BUBBLE)]


def forward_entry(stage, microbatch):
    """What a stage keeps of a forward: its first output, or what stands for it, and its inputs."""
    if RELEASES:
        state = stage._forward_chunk_states[microbatch]
        return state.live_outputs[0], state.input_values
    (output, *_), inputs = stage.fwd_cache[microbatch]
    return output, inputs


class Watch:
    """Watches one stage, and notes what should be gone and is not."""

    def __init__(self, stage, release_outputs, found):
        self.stage, self.found, self.seen, self.microbatch = stage, found, 0, None
        self.index, self.lets_go = stage.stage_index, release_outputs and not RELEASES
        self.release_outputs = release_outputs
        self.held, self.sent = {}, []  # (what, microbatch): its storage
        ranks = stage.stage_index_to_group_rank
        # Then its input is the previous stage's output, its input's gradient that one's output gradient.
        self.is_beside_previous = not stage.is_first and ranks[self.index - 1] == ranks[self.index]
        self.hook = stage.submod.register_forward_hook(self.on_forward)
        watch(stage, self.around)
        send = stage.get_fwd_send_ops

        def sending(microbatch):
            if not stage.is_last:
                self.sent.append(microbatch)
            return send(microbatch)

        stage.get_fwd_send_ops = sending

    def stop(self):
        self.hook.remove()
        unwatch(self.stage)
        del self.stage.get_fwd_send_ops
        return self.seen

    def note(self, what, microbatch, tensor):
        if isinstance(tensor, torch.Tensor):
            self.held[what, microbatch] = StorageWeakRef(tensor.untyped_storage())

    def gone(self, when, microbatch, *kinds, patience=0.0):
        for what in kinds:
            storage = self.held.get((what, microbatch))
            end = time.monotonic() + (0.0 if self.found else patience)  # patient no longer with what fails anyhow
            while storage is not None and not storage.expired() and time.monotonic() < end:
                time.sleep(0.002)
                sends.poll()
            if storage is not None:
                self.seen += 1
                if not storage.expired():
                    self.found.append(f"stage {self.index}, microbatch {microbatch}: {what} lives {when}")

    def on_forward(self, module, args, output):
        self.note("input", self.microbatch, args[0])
        self.note("output", self.microbatch, output[0] if isinstance(output, tuple) else output)

    def around(self, action, run):
        self.microbatch = int(action[2:])
        while self.sent and self.lets_go:
            self.gone("after its send", self.sent.pop(), "output", patience=PATIENCE)
        if action[1] == "F":
            return run()
        return (self.weight if action[1] == "W" else self.backward)(self.microbatch, run)

    def backward(self, microbatch, run):
        stage = self.stage
        output, inputs = forward_entry(stage, microbatch)
        if not RELEASES and not stage.is_last and isinstance(output, torch.Tensor) == self.release_outputs:
            self.found.append(f"stage {self.index} keeps {type(output).__name__} from F to I")
        if not stage.is_last:
            self.note("output gradient", microbatch, stage.grad_recv_info[microbatch][0].buffer)
        received = None if stage.is_first else inputs[0]
        del output, inputs
        run()
        if received is not None:
            if received.grad is not None:
                self.found.append(f"stage {self.index}: the input's .grad lives after its backward")
            self.note("input gradient", microbatch, stage.bwd_cache[microbatch][0])

    def weight(self, microbatch, run):
        if self.stage.is_first:
            run()
            self.gone("after W", microbatch, "output", "output gradient")
            return
        if not self.stage.is_last:  # the last stage's output is the user's
            self.gone("between I and W", microbatch, "output")
        self.gone("between I and W", microbatch, "output gradient")
        if self.lets_go or not self.is_beside_previous:
            self.gone("between I and W", microbatch, "input")
        if not self.is_beside_previous and not RELEASES:
            self.gone("between I and W", microbatch, "input gradient", patience=PATIENCE)
        run()

    def end_of_step(self):
        for microbatch in range(MICROBATCHES):
            self.gone("after the step", microbatch, "output gradient", "input gradient")
            if not self.stage.is_first and not self.stage.is_last:  # the losses, which are the user's, hold the last's
                self.gone("after the step", microbatch, "input")
        if self.stage.backward_state or getattr(self.stage, "_forward_chunk_states" if RELEASES else "fwd_cache"):
            self.found.append("the stage's state outlives the step")
        self.held.clear()


def run(name, kind, release):
    """Steps 0 and 1 patched, with an evaluation between them where torch has one, step 2 on torch's own after unpatch() (which
    fails on odd outputs). Step 1 is watched. The garbage collector is off."""
    gc.disable()
    line = Pipeline(name, MODELS[kind].build(pipelines.count_of(name))[1]).start()
    numbers, watches, found, seen = itertools.count(), [], [], []

    def step(x, target):
        number = next(numbers)
        if number == 2:
            seen.extend(watched.stop() for watched in watches)
            watches.clear()
            zbpipe.unpatch()
        if number == 1 and SCHEDULES[name][1] != "v":  # torch's eval fails on these: it asks for gradients
            args, given = line.given(x, target, [])
            line.schedule.eval(*args, **given)
        if number == 1 and kind == "plain":
            watches.extend(Watch(stage, release, found) for stage in line.stages)
        losses = line.step(x, target)
        for watched in watches:
            watched.end_of_step()
        return losses

    zbpipe.patch(release)
    return train(MODELS[kind], line.parts, step), found, sum(seen)


CASES = {
    f"{name} {kind} {release}": pipelines.Case(functools.partial(run, name, kind, release), module="torch")
    for name, kind, release in RUNS
    if kind == "plain" or SENDS_NONE
}
ranks = ranks_of(__file__, CASES)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "release"), [pytest.param(*run, marks=sends_none if run[1] == "odd" else ()) for run in RUNS]
)
def test_it_trains_as_unpipelined_and_nothing_lives_longer_than_it_is_needed(name, kind, release, ranks):
    steps, found, seen = zip(*ranks(f"{name} {kind} {release}"), strict=True)
    assert_close(joined(steps), unpipelined(MODELS[kind], WORLD * SCHEDULES[name][0]))
    assert not any(found), found
    assert kind == "odd" or min(seen) >= MICROBATCHES * (2 if name in ZERO_BUBBLE else 1)


# One rank.


@pytest.fixture
def one_rank(alone):
    with without_collector():
        yield


@functools.cache
def one_step(number):
    return Model(PLAIN.make, batch=lambda step: batch(number), steps=1)


def two_stages(parts=None, **options):
    return Pipeline(ZBV, parts or blocks(2, Linears), **options)


def check_step(line, number=0):
    """A step whose weights have no gradient yet."""
    nn.ModuleList(line.parts.values()).zero_grad()
    assert_close(train(one_step(number), line.parts, line.start().step), unpipelined(one_step(number), 2))


@both
def test_a_custom_dw_builder_runs_and_finds_the_stage_empty(one_rank, release):
    """The schedule keeps nothing for it; what it captured itself it has."""
    storages, held, ran, outputs = {}, [], [], []

    def build():
        microbatch = len(storages) - 1

        def run():
            ran.append(microbatch)
            held.extend(not storage.expired() for storage in storages[microbatch])

        return run

    line = two_stages()
    first = line.stages[0]
    first.dw_builder = build
    first.submod.register_forward_hook(lambda module, args, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    with zbpipe.patch(release):

        def around(action, run):
            if action[1] in "IB":
                grad = first.grad_recv_info[int(action[2:])][0].buffer
                # The first forward is the one that infers shapes.
                storages[int(action[2:])] = [outputs[1 + int(action[2:])], StorageWeakRef(grad.untyped_storage())]
                del grad
            return run()

        watch(first, around)
        check_step(line)
    assert sorted(ran) == list(range(MICROBATCHES))
    assert len(held) == 2 * MICROBATCHES
    assert not any(held)


@both
def test_a_step_after_one_that_failed(one_rank, release):
    line, calls = two_stages(), []

    def maybe(module, args):
        calls.append(0)
        if len(calls) == 4:
            raise KeyError("planted")

    line.parts[1].register_forward_pre_hook(maybe)
    with zbpipe.patch(release):
        with pytest.raises(RuntimeError, match="failed to run forward"):
            line.start().step(*batch(0))
        line.stages[0].clear_runtime_states()  # as the next step does first
        assert line.stages[0] not in outputs._on_their_way
        check_step(line)


class Two(Linears):
    def forward(self, x):
        y = super().forward(x)
        return y, 3 * self.up(y)


class Ignores(Linears):
    def forward(self, x, unused):
        return super().forward(x)


def buffers(infos):
    return [info.buffer for of in infos.values() for info in of]


@sends_none
def test_a_gradient_that_is_none_is_handed_over_as_zero(one_rank):
    """The next stage does not use the output: torch zeroes the buffer, which must be there again in every step."""

    def make(count):
        torch.manual_seed(1)
        return [Two(), Ignores()]

    line = two_stages(make(2)).start()

    def step(x, target):
        losses = line.step(x, target)
        assert all(buffer is None or buffer.is_meta for buffer in buffers(line.stages[0].grad_recv_info))
        return losses

    with zbpipe.patch():
        assert_close(train(Model(make), line.parts, step), unpipelined(Model(make), 2))
    of_both = buffers(line.stages[0].grad_recv_info) + buffers(line.stages[1].args_recv_info)
    assert not any(buffer is not None and buffer.is_meta for buffer in of_both)


@before_2_15
def test_the_end_of_a_block_allocates_no_receive_buffer_before_it_is_used(one_rank):
    """Of all microbatches at once they would be a peak."""
    line, numbers = two_stages().start(), itertools.count()

    def received():
        infos = [few for s in line.stages for of in (s.args_recv_info, s.grad_recv_info) for few in of.values()]
        return [info for few in infos for info in few if vars(info).get("buffer") is not None]

    def step(x, target):
        is_patched = next(numbers) != 1
        with zbpipe.patch() if is_patched else contextlib.nullcontext():
            losses = line.step(x, target)
        assert received() and all(vars(info)["buffer"].is_meta == is_patched for info in received())
        return losses

    assert_close(train(PLAIN, line.parts, step), unpipelined(PLAIN, 2))
    info = received()[0]
    kind = type(info)
    assert info.buffer.device.type == "cpu" and info.buffer is info.buffer
    assert type(info) is not kind and vars(info)["buffer"] is info.buffer and "zbpipe_device" not in vars(info)


@pytest.mark.parametrize("passing", ["forward", "backward"])
def test_unpatching_within_a_step_is_said_and_ruins_no_stage(one_rank, passing, caplog):
    line = two_stages().start()
    with zbpipe.patch():
        line.step(*batch(0))
    zbpipe.patch()
    if passing == "forward":
        handle = line.parts[1].register_forward_hook(lambda *_: zbpipe.unpatch())
    else:
        handle = next(line.parts[1].parameters()).register_hook(lambda grad: zbpipe.unpatch())
    with contextlib.suppress(RuntimeError, KeyError, AttributeError):
        line.step(*batch(0))
    handle.remove()
    assert not zbpipe.is_patched()
    assert [r.getMessage() for r in caplog.records if "unpatched within a step" in r.getMessage()]
    check_step(line, 1)
    with zbpipe.patch():
        check_step(line, 2)


@before_2_15
def test_outputs_are_the_users_unless_told_otherwise(one_rank):
    line = two_stages()

    def outputs(release):
        seen = []
        with zbpipe.patch(release):
            watch(line.stages[0], lambda action, run: seen.append((action[1], run())) or seen[-1][1])
            line.start().step(*batch(0))
            unwatch(line.stages[0])
        return [result for kind, result in seen if kind == "F"]

    for release in (False, None):
        assert all(isinstance(output, torch.Tensor) and output.shape == (2, WIDTH) for output in outputs(release))
    assert outputs(True) == [[]] * MICROBATCHES


@before_2_15
def test_outputs_cannot_be_sent_when_they_are_gone(one_rank):
    line, failures = two_stages(), []
    with zbpipe.patch(release_outputs=True):
        first, last = line.stages
        hand_over = last.set_local_fwd_input

        def send_again(outputs, microbatch):
            hand_over(outputs, microbatch)
            with pytest.raises(RuntimeError, match=r"released the outputs of stage 0, microbatch \d.*send them once"):
                first.get_fwd_send_ops(microbatch)
            failures.append(microbatch)

        last.set_local_fwd_input = send_again
        line.start().step(*batch(0))
    assert len(failures) == MICROBATCHES


# Sends, with works that do as they are told.


class Work:
    def __init__(self, tells=True, error=None):
        self.tells, self.error, self.is_done, self.waited = tells, error, threading.Event(), 0

    def is_completed(self):
        return self.tells and self.is_done.is_set()

    def is_success(self):
        return self.is_done.is_set()

    def result(self):
        return ["what was sent"]

    def wait(self, timeout=timedelta(seconds=30)):
        self.waited += 1
        if not self.is_done.wait(timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout}")
        if self.error is not None:
            raise self.error
        return True

    def of_this_backend_alone(self):
        return 7


class GloosWork(Work):
    """Which breaks the group when somebody's patience ends."""

    def wait(self, timeout=timedelta(seconds=30)):
        self.patience = max(timeout, getattr(self, "patience", timeout))
        try:
            return super().wait(timeout)
        except RuntimeError:
            self.error = RuntimeError(f"Timed out waiting {round(timeout.total_seconds() * 1000)}ms")
            self.is_done.set()
            raise self.error from None


class Group:
    def __init__(self, backend, patience=None):
        options = {"options": SimpleNamespace(_timeout=patience)} if patience else {}
        self.backend = SimpleNamespace(name=lambda: backend, **options)

    def _get_backend(self, device):
        return self.backend


class Operation(SimpleNamespace):
    """Which can be referred to weakly."""


class Stage:
    """As much of one as the wrappers look at."""

    def __init__(self):
        self.grad_recv_info = self.args_recv_info = self.backward_state = self.fwd_cache = {}
        self.is_last = True


class Sent:
    """A tensor, sent by way of the schedules' function."""

    def __init__(self, group, work, op=dist.isend, stage="a stage", microbatch=0):
        tensor, kept = torch.ones(4), outputs.Outputs()
        kept.append(tensor)
        parcel = sends.Parcel(stage, microbatch, kept)
        self.op = Operation(op=op, tensor=tensor, group=group, peer=1, zbpipe_parcel=parcel)
        self.storage, self.work, self.finish = StorageWeakRef(tensor.untyped_storage()), work, work.is_done.set
        (self.result,) = sends.batch_p2p(lambda ops, desc: [work], [self.op])

    @property
    def is_gone(self):
        return self.storage.expired()


@pytest.fixture
def in_force(monkeypatch):
    monkeypatch.setattr(state, "in_force", True)


@pytest.fixture
def send(in_force, monkeypatch):
    """Sends in one group of each backend. Gloo's works and those of "a mute backend" do not tell."""
    monkeypatch.setattr(threads, "_STAYS", 0.05)
    groups = {}

    def start(backend="nccl", work=None, group=0, **given):
        group = groups.setdefault((backend, group), Group(backend))
        return Sent(group, work or Work(tells=backend == "nccl"), **given)

    yield start
    for thread in waiting_threads():
        thread.join(30)
    assert threads._queues == {}


def until(condition):
    while not condition():
        time.sleep(0.001)


def waiting_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("zbpipe")]


def test_works_that_tell_are_asked_and_no_thread_is_started(send):
    sent = send()
    sends.poll()
    assert not sent.is_gone
    assert sent.work.waited == 0
    assert waiting_threads() == []
    sent.finish()
    sends.poll()
    assert sent.is_gone
    assert sent.op.tensor.is_meta and sent.op.tensor.shape == (4,)
    assert sent.result.wait()
    assert sent.work.waited == 1


def test_gloos_works_are_waited_for_and_the_thread_ends(send):
    sent = send("gloo")
    until(lambda: sent.work.waited)
    with pytest.raises(RuntimeError, match="timed out"):  # for who waits beside the thread
        sent.result.wait(timedelta(milliseconds=10))
    assert not sent.is_gone
    sent.finish()
    assert sent.result.wait()
    assert sent.is_gone


def test_a_gradient_that_came_tells_that_its_output_has_arrived(send):
    """Whatever the works tell. Other microbatches' sends are not waited for."""
    stage = Stage()
    mine, others = (send("a mute backend", stage=stage, microbatch=microbatch) for microbatch in (3, 4))
    received = send(op=dist.irecv, stage=stage, microbatch=3)
    mine.finish()
    received.finish()
    assert not mine.is_gone
    assert received.result.wait()
    assert mine.is_gone
    assert not others.is_gone


@pytest.mark.parametrize("backend", ["gloo", "a mute backend"])
@pytest.mark.parametrize("event", ["the next step", "a forward"])
def test_sends_of_a_step_that_failed_are_not_waited_for(send, backend, event):
    stage = Stage()
    stuck = send(backend, stage=stage)
    if event == "the next step":
        methods.clear_runtime_states(lambda stage: None, stage)
    else:
        methods.forward_one_chunk(lambda stage, microbatch: "output", stage, 0)
    new, received = send(backend, stage=stage), send(op=dist.irecv, stage=stage)
    new.finish()
    received.finish()
    waiter = threading.Thread(target=received.result.wait, daemon=True)
    waiter.start()
    waiter.join(10)
    blocked = waiter.is_alive()
    stuck.finish()
    waiter.join()
    assert not blocked
    assert new.is_gone


def test_a_new_groups_sends_do_not_queue_behind_a_stuck_one(send):
    stuck, sent = send("gloo"), send("gloo", group=1)
    sent.finish()
    done = sent.result.done.wait(10)  # the thread's doing: nobody asked for it
    stuck.finish()
    assert done
    sends.poll()
    assert sent.is_gone


def test_the_schedule_does_not_wait_behind_a_send_that_it_did_not_ask_for(send):
    stuck, sent = send("gloo"), send("gloo")
    sent.finish()
    assert sent.result.wait()
    assert sent.is_gone and not stuck.is_gone
    stuck.finish()
    assert stuck.result.wait()
    assert stuck.is_gone


def test_a_thread_waits_for_one_send_after_the_other_and_ends_with_its_group(in_force, monkeypatch):
    """When it goes nobody will receive, and the peer hears nothing before the connections close, which the wait keeps open."""
    monkeypatch.setattr(threads, "_STAYS", 60)
    group, seen = [Group("gloo")], set()
    for _ in range(3):
        sent = Sent(group[0], Work(tells=False))
        seen.update(waiting_threads())
        sent.finish()
        assert sent.result.done.wait(10)
    works = [GloosWork(tells=False), GloosWork(tells=False)]
    results = [Sent(group[0], work).result for work in works]
    until(lambda: works[0].waited)
    (thread,) = {*seen, *waiting_threads()}
    assert thread.is_alive()
    del sent
    group.clear()
    thread.join(20)
    assert not thread.is_alive() and threads._queues == {}
    assert works[1].waited == 0
    assert not results[1].done.is_set()


class Watched:
    """What a thread waits for, as far as it looks."""

    patience = work = None

    def __init__(self):
        self.done = threading.Event()

    def finish(self, timeout=None):
        self.done.set()


def test_where_no_thread_can_be_had_the_next_send_gets_one(monkeypatch):
    def cannot(thread):
        raise RuntimeError("can't start new thread")

    group, late = Group("gloo"), Watched()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.watch(group, 1, Watched())
    threads.watch(group, 1, late)
    assert late.done.wait(60)


def test_a_send_answers_as_its_work_does_and_afterwards_as_one_that_is_done(send):
    result = send().result
    assert not result.is_completed()
    assert not result.is_success()
    assert result.result() == ["what was sent"]
    assert result.of_this_backend_alone() == 7
    with pytest.raises(AttributeError):  # as the work does, which is not one of torch's
        result.get_future()
    with pytest.raises(RuntimeError, match=r"timed out after 0:00:00\.01"):
        result.wait(timedelta(milliseconds=10))
    sent = send()
    sent.finish()
    result = sent.result
    assert result.wait(timedelta(seconds=10))
    assert result.work is None
    assert result.is_completed() and result.is_success() and result.wait()
    assert result.exception() is None and result.synchronize() is None
    assert result.result() == [] and result.get_future().wait() == []
    with pytest.raises(RuntimeError, match="its work is gone; ask for its source_rank before"):
        result.source_rank()
    with pytest.raises(AttributeError):
        result.of_this_backend_alone()


def test_no_send_runs_into_a_timeout_before_the_schedule_waits_for_it(in_force):
    patience = timedelta(milliseconds=300)
    sent = Sent(Group("gloo", patience), GloosWork(tells=False))
    until(lambda: sent.work.waited)
    assert sent.work.patience == 2 * patience
    with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
        sent.result.wait()


@pytest.mark.parametrize("name", ["backward_one_chunk", "backward_weight_one_chunk"])
def test_nothing_that_was_sent_is_freed_within_a_backward_or_w(one_rank, send, name):
    """What a recording counts there would depend on when the peer received it."""
    sent = send(stage=Stage())
    sent.finish()
    state.in_force = False  # the fixture's
    with zbpipe.patch():
        stage = two_stages().stages[0]
        stage.has_backward = False
        getattr(stage, name)(0)
        assert not sent.is_gone
        sends.poll()
        assert sent.is_gone


def test_a_received_tensor_stays_with_its_operation(send):
    received = send(op=dist.irecv)
    received.finish()
    assert received.result.wait()
    assert received.result.result() == ["what was sent"]
    assert received.op.tensor.sum() == 4
    assert not received.is_gone
    assert received.result.wait()
    assert received.work.waited == 2  # the work's, which may have another stream wait


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_unpatching_lets_go_of_sends_and_loses_none(send, backend):
    done, pending = send(backend), send(backend)
    done.finish()
    if backend == "gloo":
        assert done.result.done.wait(10)
    state.in_force = False
    methods.restore()
    assert done.is_gone and not pending.is_gone
    assert sends.under_way() == []
    pending.finish()
    if backend == "gloo":  # the thread frees it, whom nobody asks any more
        until(lambda: pending.is_gone)
    assert pending.result.wait()
    assert pending.is_gone
    assert pending.work.waited == 1


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_schedule_gets_a_sends_error_whoever_found_it(send, backend):
    error = RuntimeError("connection lost")
    sent = send(backend, Work(error=error))
    sent.finish()
    sends.poll()
    for wait in (sent.result.wait, lambda: sent.result.get_future().wait()):
        with pytest.raises(RuntimeError, match="connection lost"):
            wait()
    assert sent.result.is_completed() and not sent.result.is_success() and sent.result.exception() is error
    assert sent.is_gone
    assert sent.work.waited == 1


def test_what_others_send_is_left_alone(send):
    op = SimpleNamespace(op=dist.isend, tensor=torch.ones(4), group=Group("gloo"), peer=1)
    works = [Work()]
    assert sends.batch_p2p(lambda ops, desc: works, [op]) is works
    assert op.tensor.sum() == 4
    assert waiting_threads() == []


EXIT = """
import os, sys, time
import torch, torch.distributed as dist
from zbpipe._stage import state  # nothing public shows sends, their works and threads
from zbpipe._stage.before_2_15 import sends  # as above

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
if rank == 1:
    time.sleep(0.4)
    os._exit(0)
state.in_force = True
op = dist.P2POp(dist.isend, torch.ones(1_000_000), 1)
op.zbpipe_parcel = sends.Parcel("a stage", 0, None)
sends.batch_p2p(lambda ops, desc: [op.op(op.tensor, group_dst=op.group_peer) for op in ops], [op])
state.in_force = False
time.sleep(0.2)
raise KeyError("planted")
"""


@pytest.mark.dist
def test_a_send_that_nobody_receives_does_not_abort_a_failed_program(tmp_path):
    """The waiting thread is ended before the interpreter is."""
    said = [str(tmp_path / f"said {rank}") for rank in range(2)]
    store = str(tmp_path / "store")
    both = [{"argv": ["-c", str(rank), store], "code": EXIT, "output": [said[rank]] * 2} for rank in range(2)]
    statuses = forks().run(both, 60)
    words = (tmp_path / "said 0").read_text()
    assert statuses == [1, 0], words
    assert "KeyError: 'planted'" in words


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    """Those that stay for the next send are the parent's."""
    monkeypatch.setattr(threads, "_STAYS", 60)

    group, first, second = Group("gloo"), Watched(), Watched()
    threads.watch(group, 1, first)
    assert first.done.wait(30)
    child = os.fork()
    if child == 0:
        threads.watch(group, 1, second)
        os._exit(0 if second.done.wait(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads._give_up_all()
    assert threads._queues == {}
