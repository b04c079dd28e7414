"""Each kind of leak is found, the program's own place is named and not a library's, and nothing is left of what was let go of."""

import concurrent.futures
import contextlib
import re
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from leaks import kinds
from leaks.kinds import BLAMED, CHAINS, ELSEWHERE, EXCUSED, HOLDERS, IN_CYCLES, KINDS, OF_LIBRARIES, PLACE
from support.checks import checked
from torch import multiprocessing

from zbpipe.leaks import check_tensor_leak

SOURCE = Path(kinds.__file__).read_text().splitlines()
ALL = [*KINDS, *ELSEWHERE]


def size_of(kind):
    return 1000 + 2 * ALL.index(kind)


def made_by_all(keep):
    """The errors of those kinds that could not be made."""
    errors = {}
    for kind in ALL:
        kinds.SIZE = size_of(kind)
        try:
            keep(kind)
        except Exception as error:
            errors[kind] = error.with_traceback(None)
    return errors


@contextlib.contextmanager
def checked_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with check_tensor_leak(action="record") as check:
            yield check


@pytest.fixture(scope="module")
def found():
    """The report on all kinds, and the report on what they left when all was let go of."""

    def keep(kind):
        if kind in ELSEWHERE:
            stack.enter_context(ELSEWHERE[kind]())
        else:
            kinds.KEPT[kind] = KINDS[kind]()

    with checked_without_warnings() as left, contextlib.ExitStack() as stack:
        with check_tensor_leak(action="record") as check:
            errors = made_by_all(keep)
        assert str(check.report)
        kinds.KEPT["coroutine"].close()
        kinds.KEPT.clear()
    return types.SimpleNamespace(errors=errors, report=check.report, left=left.report)


@pytest.fixture
def leaks_of(found):
    def leaks_of(kind):
        if kind in found.errors:
            raise found.errors[kind]
        item, size = f"dict item {kind!r}", 4 * size_of(kind)
        return [
            leak for leak in found.report.leaks if leak.bytes == size or item in [one.text for one in leak.chain[1:2]]
        ]

    return leaks_of


def texts(chain):
    return [holder.text for holder in chain]


@pytest.mark.parametrize("kind", ALL)
def test_it_is_found_and_the_programs_place_is_to_blame(kind, leaks_of):
    whole = [leak for leak in leaks_of(kind) if leak.bytes == 4 * size_of(kind)]
    assert whole and {leak.fate for leak in whole} == {"alive"}
    first = whole[0].blame
    assert re.match(BLAMED.get(kind, re.escape(PLACE)), first.text), str(whole[0])
    for leak in whole:
        assert leak.blame.is_library == (kind in OF_LIBRARIES), str(leak)


@pytest.mark.parametrize(("kind", "chain"), [(kind, chain) for kind, *chain in CHAINS])
def test_its_chain_says_each_link(kind, chain, leaks_of):
    n = size_of(kind)
    wanted = [text.format(n=n, next=n + 1, bytes=4 * n) for text in chain]
    chains = [texts(leak.chain) for leak in leaks_of(kind)]
    if kind in KINDS:
        wanted = [PLACE, f"dict item {kind!r}", *wanted]
    assert wanted in chains, chains


@pytest.mark.parametrize(("kind", "words", "holder", "comment"), HOLDERS)
def test_a_link_has_its_kind_and_its_line(kind, words, holder, comment, leaks_of):
    links = [link for leak in leaks_of(kind) for link in leak.chain if link.text.startswith(words)]
    assert links and {link.kind for link in links} == {holder}
    if comment:
        (line,) = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {comment}")]
        assert links[0].where.endswith(f"leaks/kinds.py:{line}")


def test_files_of_libraries_are_named_as_they_are_imported(leaks_of):
    (leak,) = leaks_of("optimizer")
    places = [holder.where for holder in leak.chain if holder.is_library]
    assert places and all(place.startswith("torch/optim/") for place in places)


def test_nothing_else_is_said_of_them_and_all_can_be_drawn(found, tmp_path):
    assert found.report.notes == [] and found.report.unseen == []
    assert "udcff" in str(found.report.draw(tmp_path / "leaks.dot", max_leaks=1000).read_text(encoding="utf-8"))
    str(found.report).encode("utf-8")


def test_nothing_is_left_when_all_was_let_go_of(found):
    of_size = {4 * size_of(kind): kind for kind in ALL}
    assert {of_size.get(leak.bytes) for leak in found.left.leaks} <= IN_CYCLES, found.left


@pytest.fixture(scope="module")
def found_in_cycles():
    """The report on all kinds, each in a cycle of its own."""

    def keep(kind):
        held = [KINDS[kind]()] if kind in KINDS else []
        held.append(held)

    with checked_without_warnings() as check:
        made_by_all(keep)
    return check.report


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_in_a_cycle(kind, found_in_cycles):
    leaks = [leak for leak in found_in_cycles.leaks if leak.bytes == 4 * size_of(kind)]
    assert leaks or kind in EXCUSED, found_in_cycles.notes
    assert {leak.fate for leak in leaks} <= {"freed by the collector", "uncollectable"}, leaks


# ---- what holds nothing


def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.ones(7).exp()
    KEPT.append(profiler)


def compiled():
    torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(torch.ones(7))


def garbage_of_numpy():
    np.frombuffer(torch.ones(7).numpy(), dtype=np.int8).sum()


def done_in_a_pool():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: torch.ones(7).sum().item(), range(5)))


def shared():
    torch.ones(7).share_memory_()


def raised_and_caught():
    with contextlib.suppress(ValueError):
        tensor = torch.ones(7)
        raise ValueError(tensor.shape)


def queued_for_a_process():
    """It lives in a file descriptor alone: no memory of this process is left behind."""
    waiting = multiprocessing.SimpleQueue()
    waiting.put(torch.ones(7))
    waiting.get()
    waiting.close()


def empty_array_of_objects():
    KEPT.append(np.empty((0, 3), dtype=object))


def without_memory():
    KEPT.append([torch.empty(10, device="meta"), torch.empty(0)])


KEPT = []
QUIET = [profiled, compiled, garbage_of_numpy, done_in_a_pool, shared, raised_and_caught, queued_for_a_process]
QUIET += [empty_array_of_objects, without_memory]


@pytest.mark.parametrize("act", QUIET)
def test_nothing_is_held(act):
    act()
    report = checked(act)
    assert not report and report.unseen == [], report
