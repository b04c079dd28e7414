"""Installs packages into the virtual environment that it runs in; the Makefile calls it.

python tools/env.py torch 2.13.0     torch, setuptools and ninja
python tools/env.py extras demo test the packages of zbpipe's extras, once zbpipe itself is installed
python tools/env.py file FILE        the packages in a requirements file, for the installed torch
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pip_install(*arguments):
    """Whether pip install succeeds."""
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=False).returncode == 0


def install_torch(version):
    """Installs torch `version`, the CPU build unless this machine has an NVIDIA driver.

    On Linux the plain name brings gigabytes of CUDA libraries. So the CPU build is asked for by its local version, from
    pip's own index and then from PyTorch's. TORCH_INDEX names another index. Without a CPU build the CUDA build is
    installed, which runs on a CPU, too.
    """
    if importlib.util.find_spec("torch") is not None:
        found = importlib.metadata.version("torch")
        if found.split("+")[0] == version:
            print(f"torch {found} is installed")
            return
    plain = f"torch=={version}"
    index = os.environ.get("TORCH_INDEX")
    wants_cpu = sys.platform == "linux" and shutil.which("nvidia-smi") is None
    if index:
        attempts = [[plain, "--extra-index-url", index]]
    elif wants_cpu:
        attempts = [[f"{plain}+cpu"], [f"{plain}+cpu", "--retries", "1", "--extra-index-url", CPU_INDEX], [plain]]
    else:
        attempts = [[plain]]
    for attempt in attempts:
        print("pip install", *attempt, flush=True)
        if pip_install(*attempt):
            return
    raise SystemExit(
        f"torch {version} cannot be installed for Python {sys.version.split()[0]} (pip says why, above); name an index "
        "that has it in TORCH_INDEX"
    )


def install_extras(names):
    """Installs the packages of zbpipe's extras `names`."""
    wanted = []
    for requirement in importlib.metadata.requires("zbpipe") or []:
        package, _, marker = requirement.partition(";")
        if any(marker.strip() == f'extra == "{name}"' for name in names):
            wanted.append(package.strip())
    if wanted and not pip_install(*sorted(set(wanted))):
        raise SystemExit(f"cannot install {', '.join(sorted(set(wanted)))}: see pip's words above.")


def main():
    if sys.prefix == sys.base_prefix:
        raise SystemExit(f"{sys.executable} is not in a virtual environment: run this through make.")
    command, *names = sys.argv[1:]
    if command == "torch":
        install_torch(*names)
        if not pip_install("setuptools>=77.0.3", "ninja"):
            raise SystemExit("cannot install setuptools and ninja: see pip's words above.")
    elif command == "extras":
        install_extras(names)
    elif command == "file":
        if not pip_install("-r", names[0], f"torch=={importlib.metadata.version('torch')}"):
            raise SystemExit(f"cannot install what {names[0]} names: see pip's words above.")
    else:
        raise SystemExit(f"unknown command {command!r}: use torch, extras or file.")


if __name__ == "__main__":
    main()
