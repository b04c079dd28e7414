"""The verdict follows the table: what rises is told with its holder, and the same training that lets go of it is clean."""

import random
import sys

import pytest
from support.places import CLEAN, LEAKS, each, requests
from support.processes import python

from zbpipe._cli import main
from zbpipe.leaks import _growth  # whose searches become rare where they find much

HEAD = """
import collections, sys, threading, uuid, warnings, torch
from torch import nn
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for i in range({steps}):
    y = model(torch.randn(4, 8))
    opt.zero_grad()
    loss = y.square().mean()
    loss.backward()
    opt.step()
    y = y.detach()
    {body}
    {let_go}
"""
TRANSITIONS = """
class Transition:
    def __init__(self, obs):
        self.obs = obs
class Buffer:
    def __init__(self):
        self.items = []
buffer = Buffer()
"""
METER = """
class Meter:
    def __init__(self):
        self.sum = 0
    def update(self, value):
        self.sum += value * 32
meter = Meter()
"""
CACHE = """
class Cache:
    def __init__(self):
        self.keys = [torch.empty(0, 8) for _ in range(6)]
        self.values = [torch.empty(0, 8) for _ in range(6)]
    def add(self, y):
        self.keys = [torch.cat([key, y]) for key in self.keys]
        self.values = [torch.cat([value, y]) for value in self.values]
cache = Cache()
"""
METRIC = """
class Metric:
    def __init__(self):
        self.preds = []
    def forward(self, preds):
        self.preds = [p.clone() for p in self.preds] + [preds]
metric = Metric()
"""
TRIAL = """
class Trial:
    def __init__(self, leaky=True):
        self.lr = rate = 1.0
        self.optimizer = torch.optim.Adam(model.parameters())
        by_rate = (lambda step: self.lr) if leaky else (lambda step: rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, by_rate)
    def run(self):
        for _ in range(2):
            self.optimizer.zero_grad()
            model(torch.randn(4, 8)).mean().backward()
            self.optimizer.step()
"""
DATA = """
class Storage:
    def __init__(self, parent, x):
        self.parent, self.x = parent, x
class Data:
    def __init__(self, x):
        self.store = Storage(self, x)
"""
RUNNING_SUM = """
class Trainer:
    def __init__(self):
        self.tr_loss = torch.tensor(0.0)
trainer = Trainer()
"""
NAMES = "names = []\ndef name():\n    names.append('r' + uuid.uuid4().hex)\n    return names[-1]\n"
OWN = f"{NAMES}class Own:\n    pass\nown = Own()\n"
WORK = "import gc\ndef work(x):\n    y, z = x * 2, x * 3\n    try:\n        1 / 0\n    except ArithmeticError as e:\n        kept = e\n"
CYCLES = "reference cycles, which at most the collector opens"
GLOBAL = ">> module global __main__."

# name: what is set up, what each step keeps, how it would be let go of, the line that is marked, what else is said
KINDS = {
    "numbers": ("cache = {}", "cache[i] = y", "cache.clear()", f"{GLOBAL}cache", "held by a dict that was never"),
    "names": ("cache = {}", 'cache[f"step_{i}"] = y', "cache.clear()", f"{GLOBAL}cache", "item 'step_3' and 11 like it"),
    "uuids": ("cache = {}", "cache[uuid.uuid4().hex] = y", "cache.clear()", f"{GLOBAL}cache", "and 11 like it"),
    "attributes": (OWN, "setattr(own, name(), y)", "own.__dict__.clear()", f"{GLOBAL}own", "and in 11 other ways"),
    "globals": (NAMES, "globals()[name()] = y", 'exec(f"del {names[-1]}")', f"{GLOBAL}r", "and in 11 other ways"),
    "buffers": (
        "net = nn.Module()",
        "net.register_buffer(f'mask_{i}', y)",
        "net._buffers.clear()",
        f"{GLOBAL}net",
        "buffer mask_3",
    ),
    "adapters": (
        "adapters = nn.ModuleDict()",
        'adapters[f"task{i}"] = nn.Linear(8, 2, bias=False)',
        "adapters.clear()",
        f"{GLOBAL}adapters",
        "parameters of modules",
    ),
    "a peak beside": ("kept = []", "kept.append(y)\n    big = [y.clone() for _ in range(30 * (i == 10))]", "kept.clear()", f"{GLOBAL}kept", ""),
    "many that become larger": (CACHE, "cache.add(y)", "cache = Cache()", ">> attribute keys of Cache", "larger than any"),
    "made anew": (METRIC, "metric.forward(y)", "metric.preds = []", ">> attribute preds of Metric", "made anew, and more than before"),
    "optimizers": (TRIAL, "Trial().run()", "", ">> attribute optimizer of Trial", "closure variable self"),
    "nodes": (RUNNING_SUM, "trainer.tr_loss += loss", "trainer.tr_loss.detach_()", ">> attribute tr_loss of Trainer", "autograd nodes"),
    "a backward with its graph": (
        "",
        "x = torch.randn(4, requires_grad=True); x.square().sum().backward(create_graph=True)",
        "x.grad = None",
        ">> self, saved: Tensor float32 [4]",
        CYCLES,
    ),
    "parents": (DATA, "data = Data(y)", "data.store.parent = None", ">> attribute x of Storage", "attribute parent of Storage"),
    "an exception": (WORK, "work(y)", "gc.collect()", ">> variable ", CYCLES),
    "objects in a list": (TRANSITIONS, "buffer.items.append(Transition(y))", "buffer.items.clear()", ">> attribute items of Buffer", ""),
    "graphs": (METER, "meter.update(loss)", "meter.sum = 0", ">> attribute sum of Meter", "other, saved: Tensor"),
}  # fmt: skip


@pytest.fixture
def run(run):
    return lambda source, *options: run(source, options=["--error", *options])


def script(setup, body, let_go="", steps=16):
    return HEAD + setup + LOOP.format(steps=steps, body=body, let_go=let_go)


@pytest.mark.parametrize("name", KINDS)
def test_what_rises_is_told_with_its_holder(run, name):
    setup, body, _, marked, words = KINDS[name]
    status, said = run(script(setup, body))
    assert status == 3 and "nothing grew" not in said, said
    lines = [line.strip() for line in said.splitlines() if ">>" in line]
    assert lines and lines[0].startswith(marked), said
    assert len(lines) == (2 if name == "many that become larger" else 1), said
    assert words in said, said
    assert (CYCLES in said) == (name in ("optimizers", "a backward with its graph", "parents", "an exception")), said


@pytest.mark.parametrize("name", KINDS)
def test_the_same_that_is_let_go_of_is_quiet(run, name):
    setup, body, let_go, _, _ = KINDS[name]
    body = body.replace("Trial()", "Trial(leaky=False)")
    status, said = run(script(setup, body, let_go))
    assert status == 0 and said.splitlines()[-1] == "nothing grew", said


LBFGS = """
opt = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)
x = torch.randn(16, 8)
def closure():
    opt.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss
for _ in range(16):
    opt.step(closure)
"""
FILLING = {
    "the history of LBFGS": (LBFGS, "attribute state of torch.optim.lbfgs.LBFGS"),
    "a deque": ("window = collections.deque(maxlen=50)" + LOOP.format(steps=16, body="window.append(y)", let_go=""), "window"),
    "a cache": (
        "import functools\n@functools.lru_cache(maxsize=50)\ndef mask(n):\n    return torch.ones(n)\n"
        + LOOP.format(steps=16, body="mask(i)", let_go=""),
        "mask",
    ),
}  # fmt: skip


REPLAY = "import random\nrandom.seed({seed})\nclass Buffer:\n    def __init__(self):\n        self.episodes = []\nbuffer = Buffer()"
VARIED = "buffer.episodes.append(torch.randn(random.randint(8, 200), 8))"
DROPS = "buffer.episodes.pop(0) if len(buffer.episodes) > {most} else None"


@pytest.mark.parametrize(("steps", "most"), [(60, 36), (60, 45), (40, 20), (40, 24), (24, 16)])
@pytest.mark.parametrize("seed", range(2))
def test_a_list_that_drops_its_oldest_items_is_a_window(run, seed, steps, most):
    """Episodes of varied length: bytes rise where their number does not (alexis-jacq/rl_algorithms#261)."""
    setup = REPLAY.format(seed=seed)
    status, said = run(script(setup, VARIED, DROPS.format(most=most), steps))
    assert status == 0 and "never cleared" not in said, said
    status, said = run(script(setup, VARIED, "", steps))
    assert status == 3 and ">> attribute episodes of Buffer" in said and "never cleared" in said, said


def test_of_a_window_it_is_said_that_the_oldest_go(run):
    status, said = run(script(REPLAY.format(seed=0), VARIED, DROPS.format(most=45), 60))
    assert status == 0 and "the oldest of which go:" in said and "held by a list" not in said, said


def test_a_window_beside_a_leak_hides_nothing(run):
    setup = "both = {'window': [], 'leak': []}"
    keeps = "both['window'].append(y); both['leak'].append(y.clone())"
    status, said = run(script(setup, keeps, "both['window'].pop(0) if len(both['window']) > 5 else None", 60))
    assert (
        status == 3 and f"{GLOBAL}both" in said and "the oldest of which go" not in said.partition("and may be")[0]
    ), said


@pytest.mark.parametrize("many", [sys.maxsize, 0], ids=["searched often", "searched rarely"])
def test_a_window_beside_what_comes_and_goes_is_quiet(run, monkeypatch, many):
    monkeypatch.setattr(_growth, "_MANY", many)
    keeps = "queue.append(y); other = [y.clone() for _ in range(i % 5)]"
    status, said = run(script("queue = []", keeps, "queue.pop(0) if len(queue) > 30 else None", 60))
    assert status == 0 and "never cleared" not in said, said


def test_a_queue_that_is_filled_faster_than_it_is_emptied_is_no_window(run):
    keeps = "queue.append(y); queue.append(y.clone())"
    status, said = run(script("queue = []", keeps, "queue.pop(0)", 60))
    assert status == 3 and f"{GLOBAL}queue" in said, said
    assert "never cleared" not in said


def test_a_few_of_many_requests_that_stay_are_told(run):
    setup = "import random\nrandom.seed(0)\nopen_ = {}\ndef close():\n    for n, end in [*open_]:\n        if end == i:\n            del open_[n, end]"
    keeps = "open_[i, i + random.randint(1, 4)] = y; open_[-i, 0 if i % 4 == 0 else i + 2] = y.clone(); close()"
    status, said = run(script(setup, keeps, steps=50))
    assert status == 3 and f"{GLOBAL}open_" in said and "never cleared" not in said, said
    status, said = run(script(setup, keeps.replace("0 if i % 4 == 0 else ", ""), steps=50))
    assert status == 0, said


def test_what_came_after_the_last_look_is_said(run):
    status, said = run(script("kept = []", "kept.append(y)", steps=20))
    assert (
        status == 3 and said.splitlines()[-1] == "(as of step 14; 3 more since, for whose holders give --steps 18)"
    ), said
    status, said = run(script("kept = []", "kept.append(y)", steps=30), "--steps", "18")
    assert status == 3 and said.splitlines()[-1] == "(as of step 18)", said


LONGEST = "longest = torch.zeros(0)\nlengths = [3, 7, 7, 2, 9, 9, 30, 4, 31, 6] + 10 * [5] + [60] + 9 * [7] + [70] + 9 * [70] + [71] + 20 * [3]"


def test_a_buffer_as_long_as_the_longest_so_far_is_quiet(run):
    """Three jumps in the later half (lucidrains/rotary-embedding-torch#15)."""
    grows = "longest = torch.ones(1000 * max(lengths[i], len(longest) // 1000))"
    status, said = run(script(LONGEST, grows, steps=60))
    assert status == 0 and said.splitlines()[-1] == "nothing grew", said
    status, said = run(script(LONGEST, "longest = torch.cat([longest, torch.ones(9)])", steps=60))
    assert status == 3 and f"{GLOBAL}longest" in said and "larger than any of earlier steps" in said, said


def test_two_rises_are_said(run):
    grows = "longest = torch.ones(1000 * (1 + (i > 11) + (i > 15)))"
    status, said = run(script("longest = torch.zeros(0)", grows, steps=20))
    assert status == 0, said
    assert said.splitlines()[-1] == "nothing grew; memory rose 2 times in the later half: watch more steps"


@pytest.mark.parametrize("name", FILLING)
def test_a_window_that_is_not_full_yet_is_listed_as_that(run, name):
    source, words = FILLING[name]
    status, said = run(HEAD + source)
    assert status == 0 and "grew, and is held by" not in said and "nothing grew" not in said, said
    assert words in said.partition("grew, and may be a window that is not full yet")[2] and "never" not in said, said


@pytest.mark.parametrize(("steps", "after"), [(22, 0), (40, 15), (30, 13), (50, 35)])
def test_what_begins_to_rise_late_is_named_though_its_variable_is_gone(run, steps, after):
    body = f"if i > {after}: kept.append(torch.ones(4, 8))"
    loop = LOOP.format(steps=steps, body=body, let_go="").replace("\n", "\n    ")
    status, said = run(f"{HEAD}def train():\n    kept = []{loop}\ntrain()\n")
    assert status == 3 and "\ngrew, and is" in said, said
    assert ">> variable kept of train()" in said, said


def test_steps_that_nobody_steps(run, tmp_path, capsys):
    source = "import torch\nkept = []\ndef serve(x):\n    y = (x +\n  x\n  )\n    kept.append(y)\nfor _ in range(12):\n    serve(torch.ones(4))\n"
    status, said = run(source)
    assert status == 4 and "give --step-at FILE:LINE, the first line in the body of the loop" in said
    status, said = run(source.replace("range(12)", "range(0)"), "--step-at", "train.py:4")
    assert status == 4 and "A step ends whenever the line of --step-at is about to run" in said
    status, said = run(source, "--step-at", "train.py:4")
    assert status == 3 and "10 steps (--step-at) after 2 of warm-up" in said and f"{GLOBAL}kept" in said
    assert sys.gettrace() is None or "zbpipe" not in repr(sys.gettrace())
    status, said = run(source, "--step-at", "train.py:4", "--steps", "5")
    assert status == 3 and "5 steps (--step-at)" in said
    for wrong in ("train.py", "absent.py:3", "train.py:x"):
        with pytest.raises(SystemExit):
            main(["leaks", "--step-at", wrong, "train.py"])
        assert "is not FILE:LINE of a file that is there" in capsys.readouterr().err


def test_of_several_optimizers_it_is_said_that_ones_steps_count(run):
    source = (
        HEAD
        + TRIAL.replace("range(2)", "range(1)")
        + "trials = [Trial() for _ in range(12)]\nfor trial in trials:\n    trial.run()\n"
    )
    status, said = run(source)
    assert status == 4
    assert "1 steps (Optimizer.step) were seen; 12 optimizers have stepped, and one's steps count" in said


STEPS_WITHIN = "".join(f"    {line}\n" for line in LOOP.format(steps=20, body="kept.append(y)", let_go="").splitlines())


def test_the_end_by_steps_is_one_whatever_the_script_catches(run):
    more = LOOP.format(steps=9, body="kept.append(y)", let_go="")
    status, said = run(f"{HEAD}kept = []\ntry:\n{STEPS_WITHIN}except:\n    pass\n{more}", "--steps", "6")
    assert status == 3 and "6 steps (Optimizer.step)" in said and f"{GLOBAL}kept" in said


def test_the_end_by_steps_on_a_thread_is_the_process_s(tmp_path):
    begins = "log = open('log', 'w')\nlog.write('so far')\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()\nprint('it went on')\n"
    (tmp_path / "train.py").write_text(f"{HEAD}kept = []\ndef train():\n{STEPS_WITHIN}{begins}")
    command = ["-m", "zbpipe", "leaks", "--error", "--steps", "6", "train.py"]
    done = python(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    said = done.stdout + done.stderr
    assert done.returncode == 3 and "6 steps (Optimizer.step)" in said and f"{GLOBAL}kept" in said, said
    assert "Traceback" not in said and "it went on" not in said
    assert (tmp_path / "log").read_text() == "so far"


CLOSED = {
    "closed": "sys.stdout.close()",
    "none": "sys.stdout.close(); sys.stdout = sys.stderr = None",
    "captured": "import io; sys.stdout = io.StringIO()",
    "forked": "import os; pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)",
}


@pytest.mark.parametrize("how", CLOSED)
def test_there_is_one_report_whatever_the_script_does_to_its_output(how, tmp_path):
    (tmp_path / "train.py").write_text(script("kept = []", "kept.append(y)") + CLOSED[how] + "\n")
    done = python("-m", "zbpipe", "leaks", "--error", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 3, done.stderr
    assert (done.stdout + done.stderr).count("zbpipe leaks: 14 steps") == 1


PLACES = """
class Place(dict):
    def turn(self, plan, size, step):
        for at, (born, end) in enumerate(plan):
            if born == step:
                self[at] = torch.zeros(size, dtype=torch.uint8)
            elif end == step:
                del self[at]
"""
FAMILIES = {f"place_{at}": family for at, family in enumerate([*LEAKS.values(), each(10), requests, *CLEAN.values()])}
LEAKING = {place for place, family in FAMILIES.items() if family not in CLEAN.values()}


@pytest.mark.parametrize("are_clean", [True, False], ids=["clean", "clean and leaky"])
@pytest.mark.parametrize("seed", range(3))
def test_places_of_all_families_at_once(run, seed, are_clean):
    """Each stands for itself, whatever its items' sizes: from 4 bytes to a megabyte."""
    chance = random.Random(seed)
    setup, turns = PLACES, []
    for place, family in FAMILIES.items():
        plan, size = family(60, chance), int(4 * 2 ** chance.uniform(0, 18))
        if not (are_clean and place in LEAKING):
            setup += f"{place} = Place()\n"
            turns.append(f"{place}.turn({plan}, {size}, i - 1)")
    status, said = run(script(setup, "; ".join(turns), steps=62), "--steps", "60")
    marked = {
        line.split(GLOBAL)[1].split()[0] for line in said.partition("and may be")[0].splitlines() if GLOBAL in line
    }
    assert marked == (set() if are_clean else LEAKING), said
    assert status == (0 if are_clean else 3)


def test_what_is_made_anew_beside_a_larger_leak_is_told_too(run):
    setup, keeps, let_go, marked, words = KINDS["made anew"]
    both = f"{keeps}; kept += [y.clone() for _ in range(3)]"
    status, said = run(script(f"{setup}\nkept = []", both, steps=40))
    assert status == 3 and f"{GLOBAL}kept" in said and marked in said and words in said, said
    status, said = run(script(f"{setup}\nkept = []", both, let_go, steps=40))
    assert f"{GLOBAL}kept" in said and marked not in said, said
