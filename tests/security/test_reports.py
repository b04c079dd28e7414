"""The passes and every report of them, once under Python's audit hook: what zbpipe opens, runs, loads and starts has each
its reason, and no report, printed or written, quotes what is in a tensor, though all are full of one number."""

import gzip
import json
import re
import struct
import subprocess
import sys

import pytest
from support.every_report import AUDITED, NUMBER, QUOTING
from support.processes import environment

pytestmark = pytest.mark.slow

DIGITS = re.compile(rb"2764443|2\.7644")
IN_MEMORY = [struct.pack(kind, NUMBER) for kind in ("<f", "<d", ">f", ">d")]
WRITTEN = {
    *("leaks.dot", "grown.dot", "step.json", "step.json.gz", "step.svg"),
    *("explain.json", "oom.json.gz", "oom.png", "oom.txt"),
}


class Run:
    """What was said, by name, and written, by file; the audit's events, and those that nothing accounts for."""

    def __init__(self, folder, *arguments):
        out = folder / "out"
        out.mkdir()
        audited = ["-W", "ignore", "-m", "support.audited"]
        command = [sys.executable, *audited, str(folder / "events"), str(out), *arguments]
        done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, timeout=900)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        self.texts = {"standard error": done.stderr}
        for number, text in enumerate(done.stdout.split(b"\n--- ")):
            self.texts[f"{number} {text.decode(errors='replace').partition(chr(10))[0]}"] = text
        for file in out.rglob("*.*"):
            data = file.read_bytes()
            data = gzip.decompress(data) if file.suffix == ".gz" else data
            self.texts[re.sub(r"process\d+", "oom", file.name)] = data
        told = json.loads((folder / "events").read_text())
        self.unaccounted, self.counts = told["unaccounted"], told["counts"]

    def quoting(self):
        """Pictures and pickles hold bytes, too."""
        return sorted(
            name for name, text in self.texts.items() if DIGITS.search(text) or any(n in text for n in IN_MEMORY)
        )


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("everything"), "everything")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("planted"), "nothing", *QUOTING.values(), *AUDITED.values())


def test_every_report_was_had(everything):
    texts = everything.texts
    assert texts.keys() >= WRITTEN
    names = {re.sub(r"^\d+ ", "", name) for name in texts}
    assert names >= {"leaks", "error", "warn", "holders", "growth", "memory", "held", "groups", "explain", "doctor"}
    assert sum(name.startswith("refusal") for name in names) >= 30
    said = b"".join(texts.values())
    assert (
        b"attribute tensor of support.every_report.Kept" in said
        and b"Shown float32 [64]" in said
        and b"AddmmBackward0" in said
    )


def test_no_report_quotes_a_tensor(everything):
    assert everything.quoting() == []


def test_every_event_is_accounted_for(everything):
    assert everything.unaccounted == []
    # The hook was there: zbpipe's modules were read and run, its reports written.
    assert all(everything.counts[event] > 60 for event in ("import", "exec", "open"))


def test_quotes_are_seen(planted):
    quoting = planted.quoting()
    assert len(quoting) == len(QUOTING)
    assert any("planted" in name for name in quoting) and "a.pickle" in quoting


def test_events_of_the_packages_own_are_seen(planted):
    assert [event.split()[0] for event in planted.unaccounted] == list(AUDITED)
