"""One training step and every report that can be had of it, in a process of its own.

    python -m support.every_report FOLDER [everything | nothing SOURCE ...]

All tensors are filled with NUMBER. What a report says goes to standard output, what it writes to FOLDER, and there alone.
Each SOURCE is run as if it stood in the package.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

NUMBER = 27644436.0
TOO_MUCH = 1 << 50

full = functools.partial(torch.full, fill_value=NUMBER)


def said(what, where="said"):
    print(f"--- {where}\n{what}")


class Kept:
    """Says its tensor's values to whoever asks."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __repr__(self):
        return f"Kept({self.tensor.tolist()})"

    __str__ = __repr__


class Shown(torch.Tensor):
    def __repr__(self, **_):
        return f"Shown({self.tolist()})"


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor


def network():
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    with torch.no_grad():
        for w in net.parameters():
            w.fill_(NUMBER)
    return net


def step(zbpipe, net, while_held=lambda groups: None):
    x = full((4, 8)).requires_grad_()
    out = net(x)
    groups = zbpipe.stage_backward_input([out], [full((4, 8))], [x], net.parameters())[1]
    while_held(groups)
    zbpipe.stage_backward_weight(net.parameters(), groups)


def passes(zbpipe):
    net = network()
    step(zbpipe, net)
    with zbpipe.policy(defer="all", checkpoint="recompute", main_grad=True):
        step(zbpipe, net)
    with zbpipe.patch():
        from torch.distributed.pipelining.stage import stage_backward_weight

        said(stage_backward_weight.__module__)
    zbpipe.patch()
    zbpipe.unpatch()


def refusals(zbpipe):
    """What is refused, and why, by whoever was given something with values in it."""
    net = network()
    x = full((4, 8)).requires_grad_()
    out, wrong = net(x), full((4, 9))

    def changed():
        groups = zbpipe.stage_backward_input([out], [full((4, 8))], [x], net.parameters())[1]
        with torch.no_grad():
            x.add_(1)
        zbpipe.stage_backward_weight(net.parameters(), groups)

    from zbpipe import leaks

    calls = [
        lambda: zbpipe.stage_backward_input([out], [wrong], [x], net.parameters()),
        lambda: zbpipe.stage_backward_input(x, wrong, [x], [wrong]),
        lambda: zbpipe.stage_backward_input([Kept(x)], [wrong], [x], net.parameters()),
        lambda: zbpipe.stage_backward_input([out], [Kept(x)], [x], net.parameters()),
        lambda: zbpipe.stage_backward_input([out], [full((4, 8))], [Kept(x)], net.parameters()),
        lambda: zbpipe.stage_backward_weight([Kept(x)], [Kept(x)]),
        lambda: zbpipe.stage_backward_weight(net.parameters(), x),
        lambda: zbpipe.explain(Kept(x), x),
        lambda: zbpipe.explain(net, x, kwargs=x),
        lambda: zbpipe.explain(net, x, kwargs=[Kept(x)]),
        lambda: zbpipe.explain(net, x, output_grads=x),
        lambda: zbpipe.explain(net, x, output_grads=[Kept(x)]),
        lambda: zbpipe.explain(net, Kept(x)),
        lambda: zbpipe.explain(net, wrong),
        lambda: zbpipe.Policy(defer=x),
        lambda: zbpipe.Policy(checkpoint=Kept(x)),
        lambda: zbpipe.Policy(fused=x),
        lambda: zbpipe.Policy(main_grad=[x]),
        lambda: zbpipe.patch(release_outputs=x),
        lambda: zbpipe.compile(net, backend=[x]),
        lambda: zbpipe.compile(net, recompute=x),
        lambda: zbpipe.defer(x, [x], x),
        lambda: zbpipe.release_storage(Kept(x)),
        lambda: zbpipe.release_storage(x),
        lambda: zbpipe.deallocate_output(x),
        lambda: zbpipe.deallocate_output(Kept(x)),
        lambda: zbpipe.make_viewless(Kept(x)),
        lambda: zbpipe.memory.record(x),
        lambda: zbpipe.memory.record(max_events=x),
        lambda: zbpipe.memory.held([Kept(x)]),
        lambda: zbpipe.memory.record().phase(x).__enter__(),
        lambda: leaks.check_tensor_leak(action=[x]),
        lambda: leaks.check_tensor_leak(allow=[Kept(x), object()]),
        lambda: leaks.find_holders(Kept(x)),
        lambda: leaks.find_holders(full((3,)).to_sparse()),
        changed,
    ]
    refused = 0
    for number, call in enumerate(calls):
        try:
            call()
        except Exception as error:
            refused += 1
            while error is not None:
                said(f"{type(error).__name__}: {error}", f"refusal {number}")
                error = error.__cause__
    said(f"refused {refused} of {len(calls)}")


def leak_reports(zbpipe, folder):
    from zbpipe import leaks

    kept = {}

    def leaking():
        tensor = full((64,))
        kept["list"] = [full((64,)), [full((64,))]]
        kept["object"] = Kept(full((64,)))
        kept["batch"] = Batch(full((64,)))
        kept["shown"] = full((64,)).as_subclass(Shown)
        kept["partial"] = functools.partial(print, full((64,)))
        kept["closure"] = lambda: tensor
        kept["method"] = full((64,)).sum
        kept[full((64,))] = kept[Kept(full((64,)))] = kept[(full((64,)), 1)] = full((64,))
        kept["array"] = full((64,)).numpy()
        kept["memory"] = memoryview(full((64,)).numpy())
        kept["graph"] = (full((64,)).requires_grad_() * full((64,))).exp()
        kept["error"] = ValueError(full((64,)))
        kept["iterator"] = iter([full((64,))])
        cycle = Kept(full((64,)))
        cycle.itself = cycle
        step(zbpipe, kept.setdefault("net", network()), kept.setdefault("groups", []).append)

    with leaks.check_tensor_leak(action="record", trace=True) as check:
        leaking()
    report = check.report
    said(report, "leaks")
    said(repr(report), "leaks, repr")
    said(dataclasses.asdict(report), "leaks, data")
    report.draw(folder / "leaks.dot", max_leaks=50)
    for action in ("warn", "error"):
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(leaks.TensorLeakError):
            warnings.simplefilter("always")
            try:
                with leaks.check_tensor_leak(action=action):
                    kept["again"] = Kept(full((64,)))
            except leaks.TensorLeakError as error:
                said(error, action)
        said([str(warning.message) for warning in caught], action)
    said(leaks.find_holders(kept["list"][0]), "holders")
    said(leaks.find_holders(kept["shown"]), "holders")
    with leaks.Growth() as growth:
        for _ in range(4):
            kept.setdefault("grows", []).append(Kept(full((64,))))
            growth.step()
        said(growth.table(), "growth")
        said([str(grown) for grown in growth.grown()], "growth")


def memory_reports(zbpipe, folder):
    net, memory = network(), zbpipe.memory

    def look(groups):
        said(memory.held(groups, net), "held")
        said(groups, "groups")

    with memory.record() as recording, recording.phase("both passes", microbatch=0):
        step(zbpipe, net, look)
    said(recording, "memory")
    said([*recording.phases], "memory, phases")
    said([*recording.events()], "memory, events")
    for name in ("step.json", "step.json.gz"):
        recording.export(folder / name)
    recording.plot(folder / "step.svg")
    with contextlib.suppress(RuntimeError), memory.record(on_out_of_memory=folder / "oom"):
        kept = [full((1000,)), Kept(full((1000,)))]
        torch.empty(TOO_MUCH)
    del kept


def explanations(zbpipe):
    net, x = network(), full((4, 8))
    for policy in ({}, {"defer": "all"}, {"exclude": (next(net.parameters()),)}):
        with zbpipe.policy(**policy):
            plan = zbpipe.explain(net, x)
        said(plan, "explain")
        said(repr(plan), "explain, repr")
        said(json.dumps(plan.as_dict(), default=str), "explain, JSON")


SCRIPT = """
import torch
from torch import nn
from support.every_report import NUMBER, Kept, full, network
kept = []
def stage():
    return network(), full((4, 8))
if __name__ == "__main__":
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        net(full((4, 8))).sum().backward()
        kept.append(Kept(full((64,))))
        optimizer.step()
        optimizer.zero_grad()
"""


def commands(folder):
    from zbpipe._cli import main

    script = folder / "train.py"
    script.write_text(SCRIPT)
    argv = list(sys.argv)
    for command in (
        ["leaks", "--picture", str(folder / "grown.dot"), str(script)],
        ["explain", f"{script}:stage", "--json", str(folder / "explain.json")],
        ["doctor"],
    ):
        said(main(command), " ".join(command))
        sys.argv = argv


# What the tests must see.
QUOTING = {
    "printed": "import torch\nprint('\\n--- planted', torch.full((3,), 27644436.0))",
    "written": "import torch\n(folder / 'a.pickle').write_bytes(torch.full((3,), 27644436.0).numpy().tobytes())",
}
AUDITED = {
    "open": "open('/etc/hostname').close()",
    "exec": "exec(code)",
    "compile": "compile('1', '<text>', 'eval')",
    "pickle.find_class": "import pickle\npickle.loads(b'cbuiltins\\nset\\n.')",
    "marshal.loads": "import marshal\nmarshal.loads(b'N')",
    "ctypes.dlopen": "import ctypes\nctypes.CDLL(None)",
    "subprocess.Popen": "import subprocess\nsubprocess.run(['true'])",
    "os.system": "import os\nos.system('true')",
    "socket.__new__": "import socket\nsocket.socket().close()",
    "os.putenv": "import os\nos.environ['OF_MINE'] = '1'",
    "os.remove": "import os\nos.remove('/there is no such file')",
}


def planted(text, folder):
    import zbpipe

    code = compile(text, str(Path(zbpipe.__file__).with_name("planted.py")), "exec")
    with contextlib.suppress(FileNotFoundError):
        of_text = (lambda: None).__code__.replace(co_filename="<text>")
        exec(code, {"__name__": "zbpipe.planted", "folder": folder, "code": of_text})


def main(folder, what="everything", *texts):
    torch.set_num_threads(1)
    import zbpipe

    if what == "everything":
        passes(zbpipe)
        refusals(zbpipe)
        leak_reports(zbpipe, folder)
        memory_reports(zbpipe, folder)
        explanations(zbpipe)
        commands(folder)
    for text in texts:
        planted(text, folder)
    print("all reports are written")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
