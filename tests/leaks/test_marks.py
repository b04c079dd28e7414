"""The mark is the lowest holder whose items grow: one for each cause, exactly, and the program's own."""

import atexit
import contextvars
import dataclasses
import functools
import linecache
import re
import weakref

import pytest
import torch
from support.processes import python
from torch import nn

from zbpipe.leaks import Growth, check_tensor_leak

KEPT = []


class Grid:
    def __init__(self):
        self.points = torch.ones(4, 2)


@dataclasses.dataclass(frozen=True)
class Config:
    size: int


@functools.cache
def table(size):
    return Grid()


class Agent:
    """As transformers#45412: the cached method returns a number, and its key keeps the object."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @functools.cache  # noqa: B019  that is the leak
    def count(self):
        return 7


class Cached:
    def __init__(self, make=dict):
        self.cache = make()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = {}

    def forward(self, x):
        self.memory[f"length:{len(self.memory)}"] = torch.ones(4)
        return x


class Link:
    def __init__(self, value, link):
        self.value, self.link = value, link


class Writer:
    def __init__(self):
        self.batch = torch.ones(4)

    def close(self):
        pass


class Tracker:
    @staticmethod
    def forget(tensor):
        pass


WRITERS = weakref.WeakSet()
LAST = contextvars.ContextVar("last_seen")


def under_keys(make_key):
    holder = Cached()
    KEPT.append(holder)

    def step(number):
        holder.cache[make_key(number)] = Grid()

    return step


def in_a_set():
    holder = Cached(set)
    KEPT.append(holder)
    return lambda number: holder.cache.add(Grid())


def of_layers():
    model = nn.Sequential(Layer(), Layer(), Layer())
    KEPT.append(model)
    return lambda number: model(torch.ones(1))


def set_by_the_program():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(record)
    KEPT.append(layer)
    layer.activations_of_all = []
    return lambda number: layer(torch.ones(1, 2))


def record(module, args, output):
    module.activations_of_all.append(output.detach())


def linked():
    holder = Cached()
    holder.cache = None
    KEPT.append(holder)

    def step(number):
        holder.cache = Link(torch.ones(4), holder.cache)

    return step


def in_contexts():
    """A context for each task, as asyncio's, kept by who waits for an innocent event."""
    waiters = KEPT

    def step(number):
        context = contextvars.copy_context()
        context.run(LAST.set, torch.ones(4))
        waiters.append(context)

    return step


def bound_methods():
    """Which C has: nothing of the program stands above them."""

    def step(number):
        writer = Writer()
        WRITERS.add(writer)
        atexit.register(writer.close)

    return step


def bounded_within():
    """Each is full after three steps; what grows is the list of them."""
    holder = Cached(list)
    KEPT.append(holder)

    def step(number):
        if number % 3 == 0:
            holder.cache.append(Layer())
        holder.cache[-1](torch.ones(1))

    return step


def deep():
    """Deeper than any chain is looked at."""
    at = Cached(list)
    KEPT.append(at)
    history = at.cache

    def step(number):
        inner = torch.ones(4)
        for _ in range(12):
            inner = [(inner,)]
        history.append(inner)

    return step


def finalizers():
    anchor = Cached()
    KEPT.append(anchor)
    return lambda number: weakref.finalize(anchor, Tracker.forget, torch.ones(4))


MARKS = {
    "tuples as keys": (functools.partial(under_keys, lambda n: (n, n)), "attribute cache of Cached"),
    "configurations as keys": (functools.partial(under_keys, Config), "attribute cache of Cached"),
    "objects as keys": (functools.partial(under_keys, lambda n: Grid()), "attribute cache of Cached"),
    "a set": (in_a_set, "attribute cache of Cached"),
    "lru_cache": (lambda: lambda number: table(number), "module global table"),
    "a method's lru_cache": (lambda: lambda number: Agent().count(), "class attribute count of Agent"),
    "the same attribute of several layers": (of_layers, "attribute memory of Layer"),
    "an attribute that the program sets on a library's object": (
        set_by_the_program,
        "attribute activations_of_all of torch.nn.modules.linear.Linear",
    ),
    "a linked list": (linked, "attribute cache of Cached"),
    "a context variable in contexts": (in_contexts, "context variable last_seen"),
    "what is full soon, in a list": (bounded_within, "attribute cache of Cached"),
    "very long chains": (deep, "attribute cache of Cached"),
    "bound methods that C has": (bound_methods, "bound method Writer.close"),
    "weakref.finalize": (finalizers, "arguments of weakref.finalize's callback Tracker.forget"),
}


@pytest.fixture(autouse=True)
def _no_caches():
    yield
    table.cache_clear()
    Agent.count.cache_clear()
    for writer in [*WRITERS]:
        atexit.unregister(writer.close)


def marks_of(said):
    """Without modules and places."""
    found = re.findall(r">> (.*?)(?: \(\S+:\d+\))?$", said, re.MULTILINE)
    return [text.replace(f"{__name__}.", "") for text in found]


@pytest.mark.parametrize("name", MARKS)
def test_the_mark(name):
    make, mark = MARKS[name]
    step = make()
    with Growth() as growth:
        for number in range(14 if name.startswith("what is full") else 7):
            step(number)
            growth.step()
        said = "\n".join(map(str, growth.grown()))
    assert marks_of(said) == [mark], said
    assert ("held by a set that was never cleared" in said) == (name == "a set"), said


# What grows, seen from the function that adds to it: the last look says it.


def given_to_a_call(look):
    given = []

    def keep(log):
        log.append(torch.ones(4))
        return look()

    for _ in range(7):
        said = keep(given)
    return [said]


def of_a_closure(look):
    enclosed = []

    def keep():
        enclosed.append(torch.ones(4))
        return look()

    return [keep() for _ in range(7)]


def given_without_a_name(look):
    def keep(own):
        fresh = (lambda own: own)(torch.ones(4))  # another's argument
        for _ in range(7):
            own.append(fresh + 1.0)
            said = look()
        return [said]

    return keep([])


def of_a_match(look):
    match [[], 1]:
        case [caught, *_]:
            pass
    return [caught.append(torch.ones(4)) or look() for _ in range(7)]


def of_an_except(look):
    try:
        raise ValueError
    except ValueError as failed:
        failed.caught_by = []
        return [failed.caught_by.append(torch.ones(4)) or look() for _ in range(7)]


def of_a_global(look):
    global history
    history = []
    try:
        return [history.append(torch.ones(4)) or look() for _ in range(7)]
    finally:
        del history


FRAMES = {
    given_to_a_call: ("variable given of given_to_a_call", "given = []"),
    of_a_closure: ("variable enclosed of of_a_closure", "enclosed = []"),
    given_without_a_name: ("variable own of given_without_a_name.<locals>.keep", "def keep(own):"),
    of_a_match: ("variable caught of of_a_match", "case [caught, *_]:"),
    of_an_except: ("variable failed of of_an_except", "except ValueError as failed:"),
    of_a_global: ("module global history", "history = []"),
}


@pytest.mark.parametrize("program", FRAMES, ids=lambda program: program.__name__)
def test_the_mark_of_a_variable_is_where_it_was_made(program):
    mark, line = FRAMES[program]
    with Growth() as growth:
        *_, said = program(lambda: growth.step() or "\n".join(map(str, growth.grown())))
    assert [text.replace("()", "") for text in marks_of(said)] == [mark], said
    where = re.search(r">> .*?(\d+)\)", said)
    assert where and linecache.getline(__file__, int(where[1])).strip() == line, said


def test_a_state_that_is_not_detached_is_told_once_and_not_at_what_was_computed_with_it():
    """The output leads to the same graph, by a shorter chain."""
    lstm, state = nn.LSTM(4, 4), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with Growth() as growth:
        for _ in range(9):
            y, state = lstm(torch.ones(3, 2, 4), state)
            growth.step()
        (grown,) = growth.grown()
    assert [text.split(" of ")[0] for text in marks_of(str(grown))] == ["variable state"], y
    assert re.match(
        rf"a graph of \d+ autograd nodes, with {len(grown.leaks) - 1} tensors from steps 2 to 8:", str(grown)
    )


def test_a_larger_graph_that_was_there_before_is_not_the_one_that_grew():
    before = torch.ones(1, requires_grad=True)
    for _ in range(500):
        before = before.sin()
    total = torch.zeros(())
    with Growth() as growth:
        for _ in range(9):
            total = total + torch.ones(1, requires_grad=True).sum()
            growth.step()
        (grown,) = growth.grown()
    assert [text.split(" of ")[0] for text in marks_of(str(grown))] == ["variable total"], before


def test_a_check_tells_items_apart_by_identity():
    holder = Cached()
    with check_tensor_leak(action="record") as check:
        for number in range(3):
            holder.cache[number, number] = Grid()
    assert marks_of(str(check.report)) == ["attribute cache of Cached"]


def test_what_no_line_of_the_program_sets_is_the_librarys():
    """On an object of a library's."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with check_tensor_leak(action="record") as check:
        optimizer._set_by_nobody_else_here = torch.ones(4)
        vars(optimizer)["_not_a_line_of_the_program"] = torch.ones(4)
    links = [link for leak in check.report.leaks for link in leak.chain if link.text.startswith("attribute _")]
    assert {link.text.partition(" of ")[0]: (link.is_library, link.where is None) for link in links} == {
        "attribute _set_by_nobody_else_here": (False, False),
        "attribute _not_a_line_of_the_program": (True, True),
    }


class Own:
    of_the_body = None

    def __init__(self):
        self.of_self = None


def set_them(module, own):
    module.of_the_body = own.of_self = Own.of_the_class = None


@pytest.mark.parametrize("name", ["of_the_body", "of_self", "of_the_class"])
def test_a_name_of_the_programs_own_class_says_nothing_of_a_librarys_object(name):
    """Another test's ``Function.seen = []`` was said to have set a plain module's buffer."""
    KEPT.append(torch.nn.Module())
    with check_tensor_leak(action="record") as check:
        KEPT[-1].register_buffer(name, torch.ones(4))
    (link,) = [link for link in check.report.leaks[0].chain if link.text.startswith("buffer ")]
    assert link.is_library
    assert link.where is None
    assert check.report.leaks[0].blame.text == f"module global {__name__}.KEPT"


def nested(depth):
    """A chain that is longer than what is shown."""
    inner = Cached()
    inner.cache["here"] = torch.ones(4)
    for number in range(depth):
        outer = type(f"Outer{number}", (), {})()
        setattr(outer, f"inner_{number}", inner)
        inner = outer
    KEPT.append(inner)


def test_no_link_that_the_program_names_is_left_out():
    with check_tensor_leak(action="record") as check:
        nested(7)
    said = str(check.report)
    assert all(f"attribute inner_{number} of" in said for number in range(7)), said
    assert " more ..." not in said


END_AT_ONCE = """
import os, sys, torch
kept = []
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    kept.append(torch.ones(100))
if os.fork() == 0:
    os._exit(9)  # a child has nothing to report
os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("given", "status"), [("0", 3), ("5", 5)])
def test_os_exit_reports_first(given, status, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(END_AT_ONCE)
    done = python("-m", "zbpipe", "leaks", "--error", script, given)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count(">> module global __main__.kept") == 1


ON_A_THREAD = """
import threading, torch
kept, is_done, net = [], threading.Event(), torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train():
    while True:
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        kept.append(torch.ones(100))
    is_done.set()
threading.Thread(target=train).start()
is_done.wait()
"""


def test_the_last_step_ends_the_script_on_any_thread(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ON_A_THREAD)
    done = python("-m", "zbpipe", "leaks", "--error", "--steps", "8", script)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count(">> module global __main__.kept") == 1


@pytest.mark.parametrize(("line", "said"), [(1, "no statement begins"), (99, "no statement begins"), (4, "12 steps")])
def test_a_line_that_can_never_run_ends_no_step(line, said, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text("# a comment\nimport torch\nfor _ in range(14):\n    x = torch.ones(4)\n")
    done = python("-m", "zbpipe", "leaks", "--step-at", f"{script}:{line}", script)
    assert said in done.stdout + done.stderr
    assert (done.returncode == 2) == (line != 4)


AUTOCAST = """
import torch
net = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(12):
        torch.nn.Linear(32, 32)(net(torch.ones(8, 32))).mean().backward()
        optimizer.step()
"""


def test_the_command_gives_the_checks_advice(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(AUTOCAST)
    done = python("-m", "zbpipe", "leaks", script)
    assert "some as large as autocast's weight cache, which lasts until its outermost region ends" in done.stdout
    assert "check one step with check_tensor_leak(trace=True)" in done.stdout
