"""The device that runs late (tests/late_device/device/): built, registered with torch as "late", and what tests turn on it.

Importing this registers the device for the whole process, for good: only processes of its own do (tests/late_device/).
"""

import collections
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCES = Path(__file__).resolve().parent.parent / "late_device" / "device"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
ORDERS = ("lazy", "others_first", "random", "at_once")


def build(folder):
    """The shared library, compiled into `folder` unless it has one of the same sources and torch."""
    sources = sorted(SOURCES.glob("*.cpp"))
    key = hashlib.sha256(repr((torch.__version__, torch.version.git_version, sys.version_info[:2], COMPILER)).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"late-{key.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor() as pool:
                compiled = [Path(objects, source.stem + ".o") for source in sources]
                list(pool.map(compile_one, sources, compiled))
                made = library.with_suffix(".new")
                lib = Path(torch.__file__).parent / "lib"
                libraries = ["-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
                run([*map(str, compiled), "-shared", f"-L{lib}", *libraries, "-o", str(made)])
                made.rename(library)
    return library


def compile_one(source, made):
    paths = [*include_paths(), sysconfig.get_paths()["include"]]
    headers = [flag for path in paths for flag in ("-isystem", path)]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    run(["-std=c++20", "-c", "-O1", "-fPIC", "-Wall", "-Wextra", abi, *headers, str(source), "-o", str(made)])


def run(arguments):
    # make asan preloads a sanitizer, which would find the compiler's own leaks.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([COMPILER, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cache_folder():
    return Path(os.environ.get("ZBPIPE_LATE_CACHE") or Path(__file__).resolve().parents[2] / "build" / "late_device")


class Module(types.ModuleType):
    """torch.late, as torch asks for a device's module."""

    device_count = staticmethod(lambda: 2)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)  # random numbers are the CPU's
    get_rng_state = staticmethod(lambda device=None: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(torch.accelerator.set_device_index)
    device = torch.accelerator.device_index
    synchronize = staticmethod(torch.accelerator.synchronize)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def load():
    torch.utils.rename_privateuse1_backend("late")
    made = ctypes.CDLL(str(build(cache_folder())))
    made.late_races.restype = ctypes.c_char_p
    made.late_set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]
    made.late_set_capturing.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_bool]
    made.late_drop_waits.argtypes = [ctypes.c_int, ctypes.c_int64]
    made.late_drop_records.argtypes = [ctypes.c_int64]
    made.late_give_away.argtypes = [ctypes.c_uint64]
    made.late_waits.restype = ctypes.c_int64
    made.late_bytes.restype = ctypes.c_uint64
    made.late_take_calls.restype = ctypes.c_char_p
    made.late_host_waits.restype = ctypes.c_int64
    made.late_end_capture.restype = ctypes.c_bool
    if (2, 12) <= torch.__version__ < (2, 13):  # its schedules ask CUDA for the random numbers of whatever device
        torch.random.fork_rng = functools.partial(torch.random.fork_rng, device_type="late")
    torch._register_device_module("late", Module("torch.late"))
    sys.modules["torch.late"] = torch.late
    torch.utils.generate_methods_for_privateuse1_backend()
    return made


library = load()


def new_group(number, rank, size, coalesces):
    """A rank's backend of a group (device/group.cpp); ``number`` is the same for its ranks."""
    make = ctypes.PyDLL(library._name).late_new_group
    make.argtypes, make.restype = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_bool], ctypes.py_object
    return make(number, rank, size, coalesces)


def begin(order="lazy", seed=0):
    """Nothing is under way, nothing planted, nothing found."""
    finish()
    library.late_set_order(ORDERS.index(order), seed)
    library.late_forget()


def races():
    """What was under way on two streams, on the same bytes, with nothing that says which comes first."""
    return library.late_races().decode().splitlines()


def stream(device=0):
    return torch.Stream(device=f"late:{device}")


JOINS, FOLLOWS, EITHER = range(3)  # of what zbpipe waits for: its caller for the tasks, the tasks for its caller
ALL, NONE = -1, -2


@contextmanager
def without_waits(which, n=ALL):
    """zbpipe's waits are left out, all of a kind or the n-th."""
    library.late_drop_waits(which, n)
    try:
        yield
    finally:
        library.late_drop_waits(EITHER, NONE)


def give_away(tensor):
    """Somebody else gets the memory of a tensor that is still in use."""
    library.late_give_away(tensor.untyped_storage().data_ptr())


def bytes_in_use():
    return library.late_bytes()


@contextmanager
def capturing(a_stream):
    """The stream says of itself that a graph is captured on it."""
    library.late_set_capturing(a_stream.device_index, a_stream.stream_id, True)
    try:
        yield
    finally:
        library.late_set_capturing(a_stream.device_index, a_stream.stream_id, False)


@contextmanager
def captured():
    """As torch.cuda.graph, on a stream of its own: what is called is kept and does not run; yields what runs it, on the
    current stream. Note [Captures] says what streams may do meanwhile."""
    finish()
    with stream():
        library.late_begin_capture()
        try:
            yield library.late_replay
        finally:
            has_come_back = library.late_end_capture()
    assert has_come_back, "a stream of the capture has not come back to its first one"


@dataclass
class Events:
    """Events of streams that zbpipe and libtorch asked for, and how often the host waited.

    The streams of an entry are numbers, of which the same stream always has the same.
    """

    records: list = field(default_factory=list)  # zbpipe's, the stream of each
    waits: list = field(default_factory=list)  # zbpipe's: (the stream that is waited for, the one that waits)
    of_libtorch: list = field(default_factory=list)  # its waits, likewise
    host_waits: int = 0

    def between(self):
        """Of zbpipe's waits, how many there are for each pair of streams."""
        return collections.Counter(map(frozenset, self.waits))


@contextmanager
def events():
    """Yields the events of the block, which are there when it has ended."""
    seen, before = Events(), library.late_host_waits()
    library.late_take_calls()
    yield seen
    seen.host_waits = library.late_host_waits() - before
    for line in library.late_take_calls().decode().splitlines():
        what, is_zbpipes, first, second = line.split()
        if what == "w":
            (seen.waits if is_zbpipes == "1" else seen.of_libtorch).append((int(first), int(second)))
        elif is_zbpipes == "1":
            seen.records.append(int(first))


def finish():
    """Everything runs."""
    for device in range(2):
        torch.accelerator.synchronize(device)
