"""How a user names the backend."""

import logging
import re
from pathlib import Path

import pytest
import torch
from support.compiled import Block, not_split, run_input
from support.processes import python

import zbpipe
from zbpipe._compile import compile_backend  # the entry point's function

pytestmark = pytest.mark.drops_groups

FLOOR = 4 * 12 * (16 + 16 + 16 + 64 + 48 + 16 + 64 + 16) + 4 * 4 * 16
"""Bytes that wait for W if the block is split."""


@pytest.mark.parametrize("how", ["function", "in place", "decorator"])
def test_other_ways_to_name_the_backend(how, caplog):
    caplog.set_level(logging.INFO, logger="zbpipe")
    net = Block()
    if how == "function":
        compiled = torch.compile(net, backend=compile_backend, options={"backend": "aot_eager"})
    elif how == "in place":
        net.compile(backend=compile_backend, options={"backend": "aot_eager", "recompute": True})
        compiled = net
    else:
        compiled = zbpipe.compile(backend="aot_eager")(net)
    groups = run_input(net, torch.randn(2, 6, 16, requires_grad=True), compiled)
    assert not_split(caplog) == []
    assert sum(group.bytes_held for group in groups) == FLOOR


def test_by_its_name(tmp_path):
    """As pip installs it: torch finds backends among the entry points of what is installed."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (entry,) = re.findall(r'\[project.entry-points.torch_dynamo_backends\]\nzbpipe = "(.*?)"', project)
    installed = tmp_path / "zbpipe-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: zbpipe\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nzbpipe = {entry}\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(zbpipe.__file__).parents[1])!r}]\n"
        "import torch\n"
        "net = torch.compile(torch.nn.Linear(4, 4), backend='zbpipe', options={'backend': 'aot_eager'})\n"
        "net(torch.ones(2, 4)).sum().backward()\n"
        "print(net.weight.grad.sum().item(), 'zbpipe' in sys.modules)\n"
    )
    ran = python("-c", code)
    assert ran.stdout == "32.0 True\n", ran.stderr


def test_equal_backends_share_compiled_code():
    net = Block()
    x = torch.randn(2, 6, 16)
    zbpipe.compile(net, backend="aot_eager")(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        zbpipe.compile(net, backend="aot_eager")(x)
