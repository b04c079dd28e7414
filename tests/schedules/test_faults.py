"""Faults in the middle of a step: torch's own module beside the patch, fault by fault. fault_cases.py has the faults.

What the rank raises is what it raises on torch's own module, its peer hears of it as soon as there, nothing stays registered or
alive, and the next step has the bits of an ordinary backward. The table of faults.md is compared with what was seen;
ZBPIPE_TABLES=write writes it.
"""

import functools
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from schedules.fault_cases import WORLD, ordinary
from schedules.fault_ranks import LANES, PLANTED
from support import allocations
from support.oracle import needs_zbpipe
from support.processes import results, run_ranks
from support.ranks import MODULES

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,  # runs both modules itself
    pytest.mark.skipif(allocations.COMPILER is None, reason="needs a C compiler"),
]
PAGE = Path(__file__).parent / "faults.md"
SAYS_LOST = ("Connection closed by peer", "Connection reset by peer", "Read error", "Broken pipe", "writev")
NAMES = {
    "ScheduleZBVZeroBubble": "ZBV",
    "ScheduleInterleavedZeroBubble": "Interleaved zero bubble",
    "ScheduleDualPipeV": "DualPipeV",
}
SENDS_ARE_OURS = pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch's own schedules let go of sends there")
AGAIN = "again, with the schedule that failed"
numbers = functools.cache(ordinary)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @functools.cache
    def folder(lane):
        folder = tmp_path_factory.mktemp(lane)
        run_ranks("schedules/fault_ranks.py", WORLD, folder, lane, timeout=1500, **preloaded())
        return folder

    @functools.cache
    def preloaded():
        return allocations.preloading(tmp_path_factory.mktemp("allocations"))

    folder.preloaded = preloaded
    return folder


# What was seen, in words.


def outcome(got, step):
    """ "right" if losses and gradients have the bits of an ordinary backward, "wrong", or an error's types."""
    if isinstance(got, str):
        return got.partition(":")[0]
    losses, grads = got
    wanted_losses, wanted = numbers(step)
    is_right = losses in ([], wanted_losses) and all(grad == wanted[name] for name, grad in grads.items())
    return "right" if is_right else "wrong"


def raised(got):
    """What an error says of itself, in words that are the same in every run."""
    if not isinstance(got, str):
        return "nothing"
    if any(text in got for text in SAYS_LOST):
        return f"{outcome(got, 1)}: connection lost"
    return f"{outcome(got, 1)}: timed out" if "Timed out waiting" in got else outcome(got, 1)


def of_ranks(fault, ranks, what, step):
    """Of all ranks that have something to say."""
    said = [outcome(seen[what], step) for seen in ranks if what in seen]
    return "right" if set(said) == {"right"} else "wrong" if "wrong" in said else "raises"


def seen_of(fault, folder, module):
    ranks = results(folder, f"{fault.id}.{module}", WORLD)
    mine, peers = ranks[fault.rank], ranks[1 - fault.rank]
    killed = "fault" not in mine
    left = [f"{what}: {before} -> {now}" for seen in ranks for what, (before, now) in seen.get("left", {}).items()]
    left += [f"{count} connections" for seen in ranks if (count := seen.get("left of the group"))]
    assert of_ranks(fault, ranks, "first", 0) == "right" or module == "torch"
    return {
        "the rank raises": "killed" if killed else raised(mine["fault"]) if mine["fired"] else "never called",
        "says": "" if killed or "lost" in raised(mine["fault"]) else str(mine["fault"]).partition(": ")[2],
        "its peer hears": raised(peers["fault"]),
        "the next step": of_ranks(fault, ranks, "new schedule", 1),
        AGAIN: of_ranks(fault, ranks, "same schedule", 1) if fault.again else None,
        "left behind": "; ".join(left) or "nothing",
    }


@functools.cache
def seen(fault, folder):
    return {module: seen_of(fault, folder, module) for module in MODULES}


def as_told_later(error):
    """From torch 2.13 on its module tells an I's error as the cause of one that says where it was."""
    return error if torch.__version__ >= (2, 13) or " from " in error else f"RuntimeError from {error}"


def check(fault, folder):
    torchs, ours = seen(fault, folder)["torch"], seen(fault, folder)["zbpipe"]
    if torchs["the rank raises"] != "never called" and ours["the rank raises"] != "never called":
        assert ours["the rank raises"] in (torchs["the rank raises"], as_told_later(torchs["the rank raises"]))
        assert ours["its peer hears"] == torchs["its peer hears"]
        assert plain(ours["says"]) == plain(torchs["says"])
    elif ours["the rank raises"] != "never called":
        assert ours["says"] == "planted" or (fault.what == "memory" and "DefaultCPUAllocator" in ours["says"])
    assert ours["the next step"] == "right"
    assert ours["left behind"] == "nothing"
    assert ours[AGAIN] != "wrong"
    assert torchs[AGAIN] != "right" or ours[AGAIN] == "right"


def plain(text):
    """Without what differs from run to run, and how much memory was asked for."""
    return re.sub(r"\d+", "N", text.partition(" you tried")[0])


IN_ALL_RUNS, LONG = ("ordinary", "again"), ("others", "signals", "requests")


@pytest.mark.parametrize(
    ("lane", "fault"),
    [
        pytest.param(lane, fault, marks=[pytest.mark.long] if lane in LONG else [], id=f"{lane} {fault.id}")
        for lane in IN_ALL_RUNS + LONG
        for fault in LANES[lane]
    ],
)
def test_a_fault_is_as_on_torch_and_the_next_step_is_right_or_refused(lane, fault, folders):
    check(fault, folders(lane))


# The table.

COLUMNS = ("the rank raises", "its peer hears", "the next step", "left behind")


def cell(fault, what, folder):
    torchs, ours = (seen(fault, folder)[module][what] for module in MODULES[::-1])
    return ours if ours == torchs else f"torch: {torchs}, zbpipe: {ours}"


def rows(faults, columns, folder):
    """A row for all faults of a schedule that are the same in every column."""
    alike = {}
    for fault in faults:
        cells = tuple(cell(fault, what, folder) for what in columns)
        alike.setdefault((NAMES[fault.schedule], *cells), []).append(fault.name)
    for (schedule, *cells), names in alike.items():
        yield f"| {schedule} | {'<br>'.join(dict.fromkeys(names))} | {' | '.join(cells)} |"


def table(faults, columns, folder):
    head = ("schedule", "fault", *columns)
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows(faults, columns, folder)])


def as_seen(page, folders):
    """The page with the tables of what was seen in the place of its own."""
    for name, columns in (("ordinary", COLUMNS), ("again", (AGAIN, COLUMNS[2]))):
        begin, end = f"<!-- {name}: written by tests/schedules/test_faults.py -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{table(LANES[name], columns, folders(name))}\n\n{end}{after}"
    return page


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is torch 2.13's")
def test_the_page_says_what_was_seen(folders):
    page = PAGE.read_text()
    wanted = as_seen(page, folders)
    if os.environ.get("ZBPIPE_TABLES") == "write":
        PAGE.write_text(wanted)
    assert page == wanted, "run again with ZBPIPE_TABLES=write"


# The instruments.


def run_planted(name, tmp_path, folders, lane="plain", timeout=300):
    run_ranks("schedules/fault_ranks.py", WORLD, tmp_path, lane, name, timeout=timeout, **folders.preloaded())
    (fault,) = LANES[lane]
    return seen_of(fault, tmp_path, "zbpipe")


@pytest.mark.parametrize(
    ("planted", "lane", "found"),
    [
        ("leave_a_hook", "plain", "hooks on weights: 0 -> 1"),
        ("keep_groups", "plain", "groups: 0 -> "),
        pytest.param("keep_sends", "plain", "sends: 0 -> ", marks=SENDS_ARE_OURS),
        pytest.param("keep_the_group", "held", " connections", marks=SENDS_ARE_OURS),
    ],
)
def test_what_is_left_is_found(planted, lane, found, tmp_path, folders):
    assert found in run_planted(planted, tmp_path, folders, lane)["left behind"]


def test_a_bit_is_found(tmp_path, folders):
    assert run_planted("turn_a_bit", tmp_path, folders)["the next step"] == "wrong"


@pytest.mark.parametrize("planted", ["hang", "stay_stopped"])
def test_a_hang_is_found_and_nothing_of_it_left(planted, tmp_path, folders):
    with pytest.raises(subprocess.TimeoutExpired):
        run_planted(planted, tmp_path, folders, timeout=15)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.started.*")]
    assert len(pids) == WORLD
    while any(lives(pid) for pid in pids):  # killed, and not gone at once; a hang here is the test's
        time.sleep(0.05)


def lives(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_every_planted_fault_is_looked_for():
    named = {"leave_a_hook", "keep_groups", "keep_sends", "keep_the_group", "turn_a_bit", "hang", "stay_stopped"}
    assert named == set(PLANTED)
