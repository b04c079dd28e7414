"""Runs support.every_report under an audit hook, and writes to a file what its events are that nothing accounts for.

python -m support.audited FILE FOLDER WHAT [SOURCE]
"""

import importlib.util
import json
import os
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.pipelining
import torch.utils.checkpoint

TESTS = Path(__file__).parents[1]
PACKAGE = Path(importlib.util.find_spec("zbpipe").origin).parent  # its modules are to be read under the hook


def folders(*paths):
    return tuple(os.path.realpath(path) + os.sep for path in paths)


OWN = folders(PACKAGE)
INSTALLED = folders(*map(sysconfig.get_path, ("purelib", "platlib")), torch.__path__[0])
STANDARD = tuple(set(folders(*map(sysconfig.get_path, ("stdlib", "platstdlib")))) - set(INSTALLED))
SHIPPED = (*STANDARD, *INSTALLED, *folders(TESTS))
# What makes classes of texts.
GENERATORS = ("dataclasses.py", os.path.join("collections", "__init__.py"), "typing.py", "enum.py")

# Events of the interpreter's own objects: nothing comes in or goes out.
HARMLESS = {
    *("object.__getattr__", "object.__setattr__", "object.__delattr__", "code.__new__", "function.__new__"),
    *("builtins.id", "sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referents", "gc.get_referrers"),
    *("sys.excepthook", "sys.unraisablehook", "sys.settrace", "sys.setprofile", "sys.addaudithook", "weakref"),
    *("cpython._PySys_ClearAuditHooks", "cpython.PyInterpreterState_Clear", "sys._getframemodulename"),
    *("import", "os.listdir", "os.scandir", "time.sleep", "_thread.start_new_thread"),
    "sys.monitoring.register_callback",
}


def frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of(places, file):
    return os.path.realpath(file).startswith(places)


def is_reading_source(files):
    """A chain of holders names variables, which stand in the source: that is parsed, and not run."""
    return files[0].endswith("ast.py") and files[1] == str(PACKAGE / "leaks" / "_python.py")


def is_standard(file):
    return file.startswith("<frozen ") or (is_of(STANDARD, file) and not is_of(INSTALLED, file))


class Audit:
    def __init__(self, folder):
        self.out = folders(folder)
        self.on = False
        self.counts = Counter()
        self.unaccounted = []

    def __call__(self, event, arguments):
        if self.on:
            self.counts[event] += 1
            if event not in HARMLESS:
                self.on = False
                self.look(event, arguments)
                self.on = True

    def look(self, event, arguments):
        files = [frame.f_code.co_filename for frame in frames(sys._getframe(2))]
        imports = "importlib" in files[0]
        files = [file for file in files if "importlib" not in file]
        # Who asked for it: of what the standard library does, who called that.
        caller = next((file for file in files if not is_standard(file)), "")
        own = is_of(OWN, caller) and not imports
        if not self.is_accounted(event, arguments, files, own):
            said = " ".join([event, *(str(argument)[:100] for argument in arguments)])
            self.unaccounted.append(f"{said} by {files[:6]}")

    def is_accounted(self, event, arguments, files, own):
        if event == "open":
            return self.may_open(*arguments, own)
        if event == "exec":
            return self.may_run(arguments[0].co_filename, files, own)
        if event == "compile":
            return self.may_run(os.fsdecode(arguments[1] or ""), files, own)
        if event == "os.mkdir" and is_of(self.out, arguments[0]):
            return True
        if event == "subprocess.Popen":
            # `doctor` asks another Python what ZBPIPE_PATCH=1 does there.
            return str(PACKAGE / "_cli" / "doctor.py") in files and arguments[0] == sys.executable
        if event.startswith("ctypes.") and arguments[-1] in (torch._C.__file__, "omp_set_num_threads"):
            return True  # torch's own OpenMP, which is loaded, is asked for one thread
        if event == "socket.gethostname":
            return True  # in the report of an allocation that failed
        return not own

    def may_open(self, path, mode, flags, own):
        if isinstance(path, int):  # a pipe that is open
            return True
        path = os.fsdecode(path)
        if is_of(self.out, path):
            return True
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(mode or "") & set("wax+")
        return not own if writes else is_of((*SHIPPED, *OWN), path) or not own

    def may_run(self, name, files, own):
        """A file that was shipped or asked for, or a text that the standard library made for a class."""
        if name and not name.startswith("<"):
            return is_of((*SHIPPED, *OWN, *self.out), name)
        return not own or files[0].endswith(GENERATORS) or is_reading_source(files)


def main(file, folder, *arguments):
    audit = Audit(folder)
    sys.addaudithook(audit)
    import matplotlib.font_manager  # noqa: F401  which runs fc-list where it has no list of fonts yet

    from support import every_report

    audit.on = True
    every_report.main(Path(folder), *arguments)
    audit.on = False
    Path(file).write_text(json.dumps({"unaccounted": audit.unaccounted, "counts": audit.counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
