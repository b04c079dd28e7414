import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Before anything imports torch's stages: torch_2_11/sitecustomize.py says what it changes, here and in ranks' processes.
# First in sys.path, which ranks get as PYTHONPATH: Python imports the first module of that name that it finds.
if torch.__version__ < (2, 12):
    sys.path.insert(0, str(Path(__file__).parent / "torch_2_11"))
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")

import zbpipe
from zbpipe._torch import probe  # what it has found is a process's, and a test has its own

HERE = Path(__file__).parent
# Whole programs, in three quarters of all tests' time: what is installed, commands, the docs' own code, random programs,
# models on ranks and ranks that fail, trainings under the leak tools, a device that runs late. `make test` leaves them to
# `make test-system`.
SYSTEM = (
    "cli/test_doctor.py",
    "clients",
    "docs/test_code_blocks.py",
    "docs/test_upstream.py",
    "examples",
    "install",
    "late_device",
    "leaks/test_clean_training.py",
    "leaks/test_command.py",
    "leaks/test_growth.py",
    "leaks/test_history.py",
    "leaks/test_history_schedules.py",
    "leaks/test_jobs.py",
    "leaks/test_plugin.py",
    "leaks/test_threads.py",
    "leaks/test_verdict.py",
    "memory/test_foreign_allocators.py",
    "memory/test_out_of_memory.py",
    "passes/test_exit.py",
    "passes/test_programs.py",
    "schedules/test_differential.py",
    "schedules/test_faults.py",
    "schedules/test_in_step.py",
    "schedules/test_models.py",
    "schedules/test_release.py",
    "security/test_reports.py",
    "stacks",
    "test_processes.py",
)

torch.set_num_threads(1)  # the tensors are tiny; a pool of threads costs a hundred times what it saves


def pytest_report_header():
    return f"zbpipe: {Path(zbpipe.__file__).parent}, torch: {torch.__version__}"


def pytest_configure(config):
    if gone := [programs for programs in SYSTEM if not (HERE / programs).exists()]:
        raise pytest.UsageError(f"tests/conftest.py's SYSTEM names {', '.join(gone)}, which is not there")
    if torch.__version__ < (2, 13):  # said once in a process, of any use of the profiler
        config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events")


def pytest_sessionstart():
    """With ZBPIPE_UNDER set (make asan), refuse to test any other zbpipe than the one built there."""
    expected = os.environ.get("ZBPIPE_UNDER")
    if expected and not Path(zbpipe.__file__).is_relative_to(Path(expected).resolve()):
        raise pytest.UsageError(f"zbpipe comes from {zbpipe.__file__}, not from under {expected}")


def is_system(path):
    return any(path.is_relative_to(HERE / programs) for programs in SYSTEM)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """In the order that takes least time: what looks through all of Python's objects while they are few; then the files that
    take long, so that none of them comes last, when one process would run it and the others nothing."""
    for item in items:
        if is_system(item.path):
            item.add_marker(pytest.mark.system)
        if "drops_groups" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings("ignore:a parameter group was freed:ResourceWarning"))
    slow = {item.path for item in items if {"slow", "dist"} & item.keywords.keys()}
    items.sort(key=lambda item: (item.path.parent.name != "leaks", item.path not in slow))
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_is_probed_anew():
    """A test may change what torch has, as no program does."""
    probe.refusal.cache_clear()


@pytest.fixture
def alone():
    """This process is a pipeline's one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    zbpipe.unpatch()
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _dropped_groups_warn_here(request):
    """What a module's tests drop on purpose is not freed in another module's test, which would hear of it."""
    yield
    if request.node.get_closest_marker("drops_groups"):
        gc.collect()


@pytest.fixture(scope="module")
def quick_collections():
    """The collector looks at what the module's tests make alone: all that torch has imported takes a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """torch.compile stops compiling a function that other tests of the process have had compiled often enough."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
