"""Files and folders that commands are given."""

import argparse
import os
import sys
from pathlib import Path


def search_first(folder: str) -> None:
    """Puts the script's folder where Python put one for zbpipe, first; under -P, -I, PYTHONSAFEPATH it put none."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def file_to_write(text: str) -> Path:
    """For ``type=`` of an option. The script may change the working directory."""
    path = Path(text).absolute()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: it may not be written; name another file")
    return path
