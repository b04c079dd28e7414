"""W in the waits of a schedule: over two processes, and on one, with messages that come when the test says."""

import threading

import pytest
import torch
from schedules.fill_ranks import STEPS, ZERO_BUBBLE
from support.functions import Product
from support.processes import folder_of, results
from torch import nn
from torch.distributed.pipelining import schedules

import zbpipe
from zbpipe import _waits as waits
from zbpipe import memory
from zbpipe._stage import state, threads

WORLD = 2

folder = folder_of("schedules/fill_ranks.py", WORLD)


@pytest.mark.system
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_gradients_have_the_bits_of_waits_that_are_not_filled(name, folder):
    for filled, plain in zip(
        results(folder, f"{name}.True", WORLD), results(folder, f"{name}.False", WORLD), strict=True
    ):
        assert len(filled["steps"]) == len(plain["steps"]) == STEPS
        for (losses, grads), (wanted_losses, wanted) in zip(filled["steps"], plain["steps"], strict=True):
            assert all(map(torch.equal, losses, wanted_losses))
            assert grads.keys() == wanted.keys()
            assert all(torch.equal(grads[key], wanted[key]) for key in wanted)


@pytest.mark.system
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_groups_run_in_waits_and_recordings_show_in_which(name, folder):
    assert not any(rank["groups"] for rank in results(folder, f"{name}.False", WORLD))
    ranks = results(folder, f"{name}.True", WORLD)
    assert any(rank["groups"] for rank in ranks)
    assert all(rank["seconds"] > 0 for rank in ranks)
    for rank in ranks:
        inside = 0
        for phases in rank["phases"]:
            spans = [phase[1:] for phase in phases if phase[0].startswith("wait for ")]
            inside += sum(kind == "W" and any(a <= begin and end <= b for a, b in spans) for kind, begin, end in phases)
        assert inside == rank["groups"]


# One process: a schedule's place is taken by a list of what it does.


class Message:
    """A work whose message comes when the test says, or when `until` says it has seen enough."""

    def __init__(self, until=lambda: True, error=None):
        self.until, self.error, self.waiters = until, error, []

    def wait(self, timeout=None):
        self.waiters.append(threading.current_thread())
        for _ in range(20000):
            if self.until():
                break
            threading.Event().wait(0.0005)
        if self.error is not None:
            raise self.error
        return True


class Stage:
    """As much of a pipeline stage as W needs."""

    def __init__(self, module, index=1):
        self.submod, self.stage_index, self.device = module, index, "cpu"
        self.is_first, self.is_last, self.dw_builder = False, False, None
        self.backward_state = {}

    def input_pass(self, microbatch):
        x = torch.randn(3, 4, requires_grad=True)
        out = self.submod(x)
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], self.submod.parameters())
        self.backward_state[microbatch] = ((), groups, (), None)

    def weight_pass(self, microbatch):
        waits.backward_weight_one_chunk(Stage.weight_pass_alone, self, microbatch)

    def weight_pass_alone(self, microbatch):
        _, groups, _, _ = self.backward_state.pop(microbatch)
        zbpipe.stage_backward_weight(self.submod.parameters(), groups)


class Schedule:
    """Of one stage on this rank, in this order of actions; `others` are there and do nothing."""

    def __init__(self, stage, actions, others=()):
        self._stages, self.rank, self._has_backward = [stage, *others], 0, True
        kinds = {
            "I": schedules.BACKWARD_INPUT,
            "W": schedules.BACKWARD_WEIGHT,
            "B": schedules.FULL_BACKWARD,
            "F": schedules.FORWARD,
            "s": getattr(schedules, "WAIT_SEND_F", None),
        }
        order = [schedules._Action(stage.stage_index, kinds[action[0]], int(action[1:])) for action in actions]
        self.pipeline_order_with_comms = {0: order}

    def step(self, *does):
        """What each of `does` waits for or runs, in a step."""

        def run(schedule):
            return [do() for do in does]

        return waits.step_microbatches(run, self)


@pytest.fixture
def filling(monkeypatch):
    monkeypatch.setattr(state, "fill_waits", True)
    yield
    waits.forget()


def layers(count=3):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def expect(schedule, seconds, groups=3, each=1e-6):
    """What a step before would have taught."""
    learned = waits._learned.setdefault(schedule, waits.Learned())
    learned.waits = list(seconds)
    learned.groups = {(1, number): each for number in range(groups)}


def before_a_long_wait():
    """A stage whose three groups wait for W, and its schedule, which has learned that they fit into its first wait."""
    stage = Stage(layers())
    schedule = Schedule(stage, ["I0", "W0"])
    expect(schedule, [10.0])
    stage.input_pass(0)
    return stage, schedule


def wait(message):
    return lambda: waits.wait_batch_p2p(lambda works: [work.wait() for work in works], [message])


def left(stage, microbatch=0):
    return len(stage.backward_state[microbatch][1])


def test_all_groups_run_in_a_long_wait_and_w_finds_none(filling):
    stage, schedule = before_a_long_wait()
    seen = []
    message = Message(lambda: left(stage) == 0)
    schedule.step(wait(message), lambda: seen.append(left(stage)), lambda: stage.weight_pass(0))
    assert seen == [0]
    assert waits.waited.groups == 3
    assert threading.main_thread() not in message.waiters
    assert all(weight.grad is not None for weight in stage.submod.parameters())


def test_what_would_end_after_the_message_is_expected_does_not_start(filling):
    stage = Stage(layers())
    schedule = Schedule(stage, ["I0", "W0"])
    expect(schedule, [1.0], each=2.0)
    stage.input_pass(0)
    message = Message()
    schedule.step(wait(message), lambda: stage.weight_pass(0))
    assert waits.waited.groups == 0
    assert message.waiters == [threading.main_thread()], "nothing to compute: no thread"


def test_a_first_step_is_measured_alone(filling):
    stage = Stage(layers())
    schedule = Schedule(stage, ["I0", "W0"])
    stage.input_pass(0)
    schedule.step(wait(Message()), lambda: stage.weight_pass(0))
    assert waits.waited.groups == 0
    learned = waits._learned[schedule]
    assert len(learned.waits) == 1
    assert sorted(learned.groups) == [(1, 0), (1, 1), (1, 2)]


def test_a_send_that_an_action_waits_for_is_no_message(filling, monkeypatch):
    monkeypatch.setattr(schedules, "WAIT_SEND_F", "WAIT_SEND_F", raising=False)  # an action of its own since torch 2.15
    stage = Stage(layers())
    schedule = Schedule(stage, ["I0", "s0", "F1", "W0"])
    expect(schedule, [0.0, 10.0, 10.0])
    stage.input_pass(0)
    with memory.record() as recording:
        schedule.step(
            wait(Message()), wait(Message()), wait(Message(lambda: left(stage) == 0)), lambda: stage.weight_pass(0)
        )
    assert [phase.kind for phase in recording.phases if phase.kind.startswith("wait")] == ["wait for 1F1"]
    learned = waits._learned[schedule].waits
    assert learned[1] == 0.0 and learned[0] > 0 and learned[2] > 0


def test_a_group_that_was_slow_once_is_not_passed_over_for_ever():
    learned = waits.Learned()
    learned.share(1, [0, 1], 2.0)
    assert learned.groups == {(1, 0): 1.0, (1, 1): 1.0}
    learned.groups[1, 0] = 100.0
    for _ in range(2):
        learned.share(1, [0, 1], 2.0)
    assert sum(learned.groups.values()) == pytest.approx(2.0)
    learned.share(1, [1], 0.5)
    assert learned.groups[1, 1] == 0.5


@pytest.mark.parametrize("next_one", ["B1", "W1"])
def test_additions_keep_the_schedules_order(filling, next_one):
    """Microbatch 2's groups may run once nothing of microbatch 1 that adds to the same weights is to come before."""
    stage = Stage(layers())
    schedule = Schedule(stage, ["I2", next_one, "W2"])
    expect(schedule, [10.0])
    stage.input_pass(2)
    schedule.step(wait(Message()))
    assert (waits.waited.groups, left(stage, 2)) == (0, 3)


def test_the_next_microbatch_runs_when_nothing_of_this_one_is_left(filling):
    stage = Stage(layers())
    schedule = Schedule(stage, ["I0", "I1", "W0", "W1"])
    expect(schedule, [10.0])
    stage.input_pass(0)
    stage.input_pass(1)
    order = []
    original = waits.passes.stage_backward_weight

    def noted(weights, groups):
        order.extend(m for m in (0, 1) for group in groups if any(g is group for g in stage.backward_state[m][1]))
        return original(weights, groups)

    waits.passes.stage_backward_weight = noted
    try:
        schedule.step(wait(Message(lambda: left(stage, 1) == 0)))
    finally:
        waits.passes.stage_backward_weight = original
    assert order == [0, 0, 0, 1, 1, 1]


def hooked(stage):
    stage.submod[1].weight.register_post_accumulate_grad_hook(lambda weight: None)


def tensor_hooked(stage):
    stage.submod[1].weight.register_hook(lambda grad: None)


@pytest.mark.parametrize("watch", [hooked, tensor_hooked])
def test_a_group_with_hooks_waits_for_its_w(filling, watch):
    stage = Stage(layers())
    watch(stage)
    schedule = Schedule(stage, ["I0", "W0"])
    expect(schedule, [10.0])
    stage.input_pass(0)
    schedule.step(wait(Message(lambda: left(stage) == 1)), lambda: stage.weight_pass(0))
    assert waits.waited.groups == 2


def test_stage_0_is_left_alone(filling):
    stage = Stage(layers(), index=0)
    schedule = Schedule(stage, ["I0", "W0"])
    expect(schedule, [10.0])
    stage.backward_state[0] = ((), None, (), None)
    schedule.step(wait(Message()))
    assert waits.waited.groups == 0


def test_an_error_comes_out_at_the_w_that_the_schedule_asks_for(filling):
    stage, schedule = before_a_long_wait()
    with torch.no_grad():
        groups = stage.backward_state[0][1]
        groups[1]["grads"][0][0].add_(1.0)  # what W reads is changed
    reached = []
    message = Message(lambda: bool(waits._thread.step is None or main_step[0].errors))
    main_step = []

    def begin():
        main_step.append(waits._thread.step)

    with pytest.raises(RuntimeError, match="modified"):
        schedule.step(begin, wait(message), lambda: reached.append(1), lambda: stage.weight_pass(0))
    assert reached == [1], "the wait itself ended well"


def test_an_error_whose_w_does_not_come_keeps_nothing(filling):
    stage, schedule = before_a_long_wait()
    with torch.no_grad():
        stage.backward_state[0][1][0]["grads"][0][0].add_(1.0)
    errors = []
    step = []

    def look():
        step.append(waits._thread.step)

    schedule.step(look, wait(Message(lambda: bool(step[0].errors))), lambda: errors.extend(step.pop().errors.values()))
    assert [error.__traceback__ for error in errors] == [None]


def test_a_weight_that_was_replaced_since_i_is_refused_by_the_w_that_the_schedule_asks_for(filling):
    stage, schedule = before_a_long_wait()
    old = stage.submod[1].weight
    stage.submod[1].weight = nn.Parameter(old.detach().clone())
    step = []
    message = Message(lambda: bool(step[0].errors))
    with pytest.raises(ValueError, match="not among the 6 weights"):
        schedule.step(lambda: step.append(waits._thread.step), wait(message), lambda: stage.weight_pass(0))
    assert old.grad is None


def test_stages_of_the_rank_that_share_a_parameter_are_left_alone(filling):
    stage, other = Stage(layers()), Stage(layers(), index=2)
    other.submod[0].weight = stage.submod[2].weight
    schedule = Schedule(stage, ["I0", "W0"], [other])
    expect(schedule, [10.0])
    stage.input_pass(0)
    schedule.step(wait(Message()))
    assert left(stage) == 3


def test_no_more_is_filled_than_was_waited(filling, monkeypatch):
    stage, schedule = before_a_long_wait()
    begun = threading.Event()
    original = waits.passes.stage_backward_weight
    arrivals = []

    def slow(weights, groups):
        """Until the message is there, and as long again."""
        begun.set()
        arrivals[0].done.wait()
        return original(weights, groups)

    def watch(arrival, groups, watch=waits.threads.watch_receive):
        arrivals.append(arrival)
        watch(arrival, groups)

    monkeypatch.setattr(waits.threads, "watch_receive", watch)
    monkeypatch.setattr(waits.passes, "stage_backward_weight", slow)
    schedule.step(wait(Message(begun.is_set)))
    assert waits.waited.groups == 1
    assert 0 < waits.waited.filled <= waits.waited.seconds


class Group:
    """A process group, as far as threads look at it."""


def test_the_thread_of_a_receive_gives_up_with_the_group():
    group, ended = Group(), threading.Event()

    class Late:
        """A work whose message never comes."""

        def wait(self, timeout=None):
            if timeout == threads._AT_ONCE:
                ended.set()
                raise RuntimeError("timed out")
            ended.wait()
            raise RuntimeError("timed out")

    arrival = waits.Arrival([Late()])
    threads.watch_receive(arrival, [threads.number_of(group)])
    assert not arrival.done.wait(0.05)
    del group
    assert arrival.done.wait(60)
    assert ended.is_set()


def test_where_no_thread_can_be_had_the_next_send_gets_one(monkeypatch):
    group = Group()
    arrival = waits.Arrival([Message()])

    def cannot(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        for watch in (lambda: threads.watch(group, 1, arrival), lambda: threads.watch_receive(arrival, [])):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                watch()
    threads.watch(group, 1, arrival)
    assert arrival.done.wait(60)


def test_an_error_of_the_message_comes_out_at_its_wait(filling):
    stage, schedule = before_a_long_wait()
    with pytest.raises(OSError, match="the peer is gone"):
        schedule.step(wait(Message(lambda: left(stage) < 3, OSError("the peer is gone"))))
    assert left(stage) < 3
    assert waits._thread.step is None
    assert waits._learned[schedule].waits == [10.0], "a step that failed teaches nothing"


def test_an_interrupted_wait_does_not_keep_the_next_steps_from_hearing(filling):
    stage, schedule = before_a_long_wait()
    never = threading.Event()
    original = waits.passes.stage_backward_weight

    def interrupted(weights, groups):
        raise KeyboardInterrupt

    waits.passes.stage_backward_weight = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            schedule.step(wait(Message(never.is_set)))
    finally:
        waits.passes.stage_backward_weight = original
    schedule.step(wait(Message(lambda: left(stage) == 0)))
    assert left(stage) == 0
    never.set()


def test_nothing_is_filled_on_an_accelerator_or_in_an_evaluation(filling):
    for change in ({"device": "meta"}, {"_has_backward": False}):
        stage = Stage(layers())
        schedule = Schedule(stage, ["I0", "W0"])
        vars(stage).update({key: value for key, value in change.items() if key == "device"})
        vars(schedule).update({key: value for key, value in change.items() if key != "device"})
        expect(schedule, [10.0])
        stage.input_pass(0)
        schedule.step(wait(Message()))
        assert left(stage) == 3


def test_what_is_held_for_a_watched_stage_counts_groups_that_ran_in_a_wait(filling):
    """The recording knows a stage's methods; a group that runs in a wait belongs to the same microbatch."""
    held = {}
    for fill in (False, True):
        stage = Stage(layers())
        for weight in stage.submod.parameters():
            weight.grad = torch.zeros_like(weight)
        schedule = Schedule(stage, ["I0", "W0"])
        expect(schedule, [10.0 if fill else 0.0])
        stage.forward_one_chunk = lambda fwd_chunk_id: None
        stage.backward_one_chunk = lambda bwd_chunk_id, full_backward=False: stage.input_pass(bwd_chunk_id)  # noqa: B023
        stage.backward_weight_one_chunk = lambda bwd_chunk_id: stage.weight_pass(bwd_chunk_id)  # noqa: B023
        with zbpipe.memory.record() as recording:
            recording.watch(stage)
            stage.backward_one_chunk(0, full_backward=False)
            message = Message(lambda: not fill or left(stage) == 0)  # noqa: B023
            schedule.step(wait(message), lambda: stage.backward_weight_one_chunk(0))  # noqa: B023
        held[fill] = [(of.stage, of.microbatch, of.bytes) for of in recording.held]
    assert held[True] == held[False]
    assert held[True][0][2] > 0


class HandsOver(Product):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), zbpipe.defer(lambda x, grad: x.t() @ grad, weights=1, saved=(x, grad))


def test_only_groups_that_run_nothing_of_the_programs_only_add():
    x = torch.randn(3, 4, requires_grad=True)
    w, v = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def answers(out, **policy):
        with zbpipe.policy(**policy):
            groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w, v])[1]
        found = [group._only_adds for group in groups]
        zbpipe.stage_backward_weight([w, v], groups)
        assert not any(group._only_adds for group in groups), "spent"
        return found

    def region(x):
        return (x @ w).sin() @ v

    assert answers(region(x)) == [True, True]
    packed = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
    assert answers(packed, checkpoint="recompute") == [False, False]
    packed = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
    assert answers(packed, checkpoint="keep") == [True, True]
    assert sorted(answers(HandsOver.apply(x, w) @ v)) == [False, True]
    with torch.autograd.set_detect_anomaly(True):
        assert answers(region(x)) == [False, False]
