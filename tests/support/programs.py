"""Random autograd programs: a stage's forward as source text, and what is done with it.

A `Program` is what hypothesis prints when one fails, as small as it could make it: paste it into `judge`
(`support.program_runs`) to see it again.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st

ROWS, WIDTH = 3, 4

# What a line of a program may be. Every value is ROWS x WIDTH; {x}, {y}: values; {w}, {u}: matrices of WIDTH x WIDTH,
# {v}, {s}: vectors; {k}, {r}: a column, a row; {n}: the new value's name. The simplest come first: hypothesis shrinks
# towards them.

PRODUCTS = (
    "{n} = {x} @ {w}",
    "{n} = {x} @ {w}.t()",
    "{n} = F.linear({x}, {w}, {v})",
    "{n} = torch.addmm({v}, {x}, {w})",
    "{n} = torch.addmm({y}, {x}, {w}, beta=0.5, alpha=2)",
    "{n} = torch.einsum('ri,oi->ro', {x}, {w})",
    "{n} = ({x}.unsqueeze(0) @ {w}).squeeze(0)",
    "{n} = torch.bmm({x}.unsqueeze(1), {w}.expand(ROWS, WIDTH, WIDTH)).squeeze(1)",
    "{n} = torch.baddbmm({y}.unsqueeze(1), {x}.unsqueeze(1), {w}.expand(ROWS, WIDTH, WIDTH)).squeeze(1)",
    "{n} = ({w} @ {x}.t()).t()",
    "{n} = {x} @ {w}.view(2, 2, WIDTH).reshape(WIDTH, WIDTH)",
    "{n} = {x} @ {w}[:, [1, 0, 3, 2]]",
    "{n} = torch.stack([row @ {w} for row in {x}])",
    "{n} = F.conv1d({x}.unsqueeze(0), {w}[:ROWS, :ROWS, None], padding=0).squeeze(0)",
    "{n} = torch.cat([{x} @ {w}[:, :2], {x} @ {w}[:, 2:]], 1)",
)
# Operations on other weights: {e}: two experts' matrices of 2 WIDTH x 2 WIDTH; {f}: filters of WIDTH x WIDTH x 3.
OPERATIONS = (
    "{n} = grouped({x}, {e})",
    "{n} = grouped({x}, {e}.mT)",
    "{n} = grouped({x}, {e}, batched=True)",
    "{n} = grouped({x}, {e} * 0.5)",
    "{n} = grouped({x} + {y}, {e}).tanh(); {n} = grouped({n}, {e})",
    "{n} = convolved({x}, {f}, {v})",
    "{n} = convolved({x}, {f}, None)",
    "{n} = convolved({x}, {f}[:, :2], {v}, groups=2)",
    "{n} = convolved({x}, {f}[:, :1], {s}, groups=WIDTH)",
    "{n} = convolved({x}, {f}, {v}, transposed=True)",
    "{n} = convolved({x}, {f} + {v}.unsqueeze(1), {s})",
    "{n} = F.conv2d({x}[None, None], {f}[:1, :1].unsqueeze(2), {v}[:1], stride=1, padding=(0, 1)).view(ROWS, WIDTH)",
)
# Matrices that are computed: {c} is the new one's name, and later lines may take it for a weight.
COMPUTED = (
    "{c} = {w} + {u}",
    "{c} = {w} @ {u}",
    "{c} = {w} * 1.0",
    "{c} = {w}.tanh() * {u}",
    "{c} = {w}.softmax(-1)",
    "{c} = {w} / {w}.norm(dim=1, keepdim=True) * {v}.unsqueeze(1)",
    "{c} = {w}.clone(); {c}[{k}] = {v} * 2",
    "{c} = torch.cat([{w}[:2], {u}[2:]])",
    "{c} = torch.stack([{w}, {u}]).mean(0)",
    "{c} = torch.outer({v}, {s})",
    "{c} = {w}.t().contiguous().t()",
    "{c} = {w} + {u}.detach()",
)
LIGHT = (
    "{n} = {x} + {v}",
    "{n} = {x} * {v}",
    "{n} = {x} * {v}[{k}]",
    "{n} = F.layer_norm({x}, (WIDTH,), {v}, {s})",
    "{n} = F.rms_norm({x}, (WIDTH,), {v})",
    "{n} = torch.addcmul({x}, {y}, {v})",
    "{n} = F.prelu({x}, {v})",
    "{n} = {x} + F.embedding(INDICES, {w})",
    "{n} = {x} + {w}[:ROWS]",
    "{n} = {x} * {w}[{k}]",
    "{n} = torch.where({x}.detach() > 0, {x}, {v})",
    "{n} = {x} + {w}.diagonal()",
)
PLAIN = (
    "{n} = {x}.tanh()",
    "{n} = {x} + {y}",
    "{n} = {x} * {y}.sin()",
    "{n} = {x}.softmax(-1)",
    "{n} = {x}.sort(dim=-1).values",
    "{n} = {x} + {x}.max(dim=1, keepdim=True).values",
    "{n} = torch.cat({x}.chunk(2, dim=1)[::-1], 1)",
    "{n} = torch.cat([{x}.chunk(2, dim=1)[0]] * 2, 1)",
    "{n} = torch.stack([{x}.unbind(0)[{r}]] * ROWS) + {y}",
    "{n} = {x}.T.contiguous().T[:, :]",
    "{n} = ({x} @ {y}.t()).softmax(-1) @ {x}",
    "{n} = F.scaled_dot_product_attention({x}[None], {y}[None], {x}[None])[0]",
    "{n} = {x}.detach() * {y}",
    "{n} = {x}.cumsum(0).flip(1)",
    "{n} = torch.stack([{x}, {w}[:ROWS]]).unbind(0)[1] + {x}",
    "first, second = torch.stack([{x}, {w}[:ROWS]]).unbind(0); {n} = first * second",
    "{n} = F.dropout({x}, 0.5)",
    "{n} = {x}.to(torch.float32).exp().to({x}.dtype)",
)
IN_PLACE = (
    "{n} = {x} * 1.0; {n}.mul_({v})",
    "{n} = {x}.clone(); {n}[:, {k}] += {v}[0]",
    "{n} = {x}.sin(); {n}[{r}].mul_(0.5); {n}.add_({v})",
    "{n} = {x}.clone(); {n}.view(-1)[{k}] = {v}[1]",
    "{n} = {x} @ {w}; {n}.tanh_()",
    "{n} = ({x} @ {w}).mul_(2); {n}[0].copy_({v})",
    "{n} = {x} + 0.0; {n}.t()[{k}].mul_({n}.detach().t()[{k}])",
)
FUNCTIONS = (
    "{n} = Heeding.apply({x}, {w}, m)",
    "{n} = Ignoring.apply({x}, {w}, m)",
    "{n} = Ignoring.apply({x}, {w} + {u}, m)",
    "{n} = AddsItself.apply({x}, {p}, (m, '{p}'))",
    "{n}, _ = TwoOutputs.apply({x}, {w}, {v}, m)",
    "_, {n} = TwoOutputs.apply({x}, {w}, {v}, m)",
    "first, second = TwoOutputs.apply({x}, {w}, {v}, m); {n} = first + second",
    "{n} = {x} @ SameTensorTwice.apply({w}, {u}, m)",
    "{n} = SameTensorTwice.apply({x}, {w}[:ROWS], m)",
    "{n} = SameTensorTwice.apply({x}, {x} * {v}, m)",
    "{n} = HandedOver.apply({x}, {p}, m)",
)
# Functions and hooks that keep what they return, each in a buffer of its own, which the next microbatch overwrites.
KEEPING = (
    "{n} = Keeps.apply({x}, {w}, (m, '{n}', 'weight'))",
    "{n} = Keeps.apply({x}, {w}, (m, '{n}', 'unseen'))",
    "{n} = Keeps.apply({x}, {w}, (m, '{n}', 'view'))",
    "{n} = Keeps.apply({x}, {w}, (m, '{n}', 'dummy'))",
    "{n} = Keeps.apply({x}, {w}, (m, '{n}', 'activation'))",
    "{n} = Keeps.apply(x0, {w}, (m, '{n}', 'both'))",
    "{n} = {x} @ KeepsTwo.apply({w}, {u}, (m, '{n}'))",
    "{n} = HandsOverKept.apply({x}, {p}, (m, '{n}'))",
    "{n} = {y} + HostSum.apply({x}, {v}, m).to({y})",
    "{n} = {x} @ {w}; m.hook({n}, 'buffer')",
    "{n} = F.linear({x}, {w}, {v}); m.hook({n}, 'buffer pre')",
    "{n} = {x} @ {w}; m.hook({n}, 'buffer post')",
    "{n} = Ignoring.apply({x}, {w}, m); m.hook({n}, 'buffer post')",
    "{n} = {x} + {v}; m.hook({n}, 'buffer pre')",
    "{n} = {x} + {y}; m.hook({n}, 'buffer between')",
    "{n} = {x}.sin(); m.hook(x0, 'buffer')",
    "{c} = {w} @ {u}; m.hook({c}, 'buffer')",
    "{c} = {w} + {u}; m.hook({c}, 'buffer post')",
)
# What is kept here may be what a product saves, which is a limit: W refuses what was written.
LIMITS = ("'activation')", "'buffer between'")
# None of these within regions: hooks are told apart by the order in which a forward registers them.
HOOKS = (
    "{n} = convolved({x}, {f}, {v}); m.hook({n}, 'post')",
    "{n} = {x} * 1.0; m.hook({n}, 'register_hook')",
    "{n} = {x} @ {w}; m.hook({n}, 'register_hook')",
    "{n} = {x} @ {w}; m.hook({n}, 'changes')",
    "{n} = {x} @ {w}; m.hook({n}, 'pre')",
    "{n} = {x} @ {w}; m.hook({n}, 'post')",
    "{n} = {x} @ {w}; m.hook({n}, 'removed')",
    "{n} = {x} @ {w}; m.hook({n}, 'retain_grad')",
    "{n} = {x} + {y}; m.hook({n}, 'retain_grad')",
    "{n} = {x} * {v}; m.hook({n}, 'post')",
    "{c} = {w} * 2; m.hook({c}, 'register_hook')",
    "{c} = {w} @ {u}; m.hook({c}, 'changes')",
    "{c} = {w} + {u}; m.hook({c}, 'pre')",
    "{c} = {w} + {u}; m.hook({c}, 'retain_grad')",
)
# Lines with a backward, a transform or other kernels of their own.
NESTED = (
    "{n} = torch.vmap(lambda row: row @ {w} + {v})({x})",
    "{n} = torch.autograd.grad(({x} @ {w}).tanh().sum(), {x}, create_graph=True)[0]",
    "{n} = {x} @ torch.autograd.grad(({x} @ {w}).sin().sum(), {w}, create_graph=True)[0]",
    "{n} = torch.func.grad(lambda h: (h @ {w}).sin().sum())({x})",
    "{n} = torch.func.jvp(lambda h: (h @ {w}).sin(), ({x},), ({y},))[1]",
)
# Regions: a line around lines, which compute {x} from the values around it.
REGIONS = (
    "{n} = checkpoint({region}, {x}, use_reentrant=False)",
    "with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t): {n} = {region}({x})",
    "with save_on_cpu(): {n} = {region}({x})",
    "{n} = checkpoint({region}, {x}, use_reentrant=False, context_fn=keep_products)",
    "{n} = checkpoint({region}, {x}, use_reentrant=True)",
    "with torch.no_grad(): {n} = {region}({x})",
    "with torch.autocast('cpu', torch.bfloat16): {n} = {region}({x})\n{n} = {n}.to({x}.dtype)",
)

COMPILED = ("{n} = torch.compile({region}, backend='aot_eager')({x})",)

GROUPS = (PLAIN, PRODUCTS, LIGHT, COMPUTED, IN_PLACE, FUNCTIONS, HOOKS, NESTED, KEEPING, OPERATIONS)
MATRICES, VECTORS, EXPERTS, FILTERS = ("w0", "w1", "w2"), ("v0", "v1"), ("e0", "e1"), ("f0", "f1")
WEIGHTS = MATRICES + VECTORS + EXPERTS + FILTERS


@dataclass(frozen=True)
class Program:
    """
    forward: lines of Python, from the values x0.. and the stage's weights w0.., v0.. to `return` of some values.
    passes: what runs, in order. "F0": the forward of microbatch 0. "I0". "W0": all its groups that are left;
        "W0/2": the first of what is left, of 2 pieces; "W0/-2": the last; "W0+1": what is left of both, in one call.
        "V0", "U0": W0 within a hook of a torch.autograd.grad(), or of a backward(inputs=).
        "D0": its groups are dropped. "!3" behind one: its 4th operator fails; then what failed is tried again.
    dtype: of weights and inputs.
    inputs: which of them require a gradient.
    frozen: weights that do not.
    watched: weights with hooks that log.
    existing: the weights have a gradient already.
    policy: what `zbpipe.policy` is given.
    """

    forward: str
    passes: str
    dtype: str = "float64"
    inputs: tuple[bool, ...] = (True,)
    frozen: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    existing: bool = False
    policy: dict = field(default_factory=dict)

    def __repr__(self):
        given = [f"Program('''\n{self.forward}\n''', {self.passes!r}"]
        for name in ("dtype", "inputs", "frozen", "watched", "existing", "policy"):
            if getattr(self, name) != getattr(Program("", ""), name):
                given.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(given) + ")"

    def _repr_pretty_(self, printer, cycle):  # what hypothesis asks
        printer.text(repr(self))


class Writer:
    """Turns what was drawn into lines: each choice counts from the newest, so that a line less is still a program."""

    def __init__(self, inputs):
        self.values = [f"x{i}" for i in range(inputs)]
        self.matrices = list(MATRICES)
        self.names = 0

    def new(self, letter):
        self.names += 1
        return f"{letter}{self.names}"

    def write(self, drawn):
        template, picks, inner = drawn
        x, y, w, u, v = picks
        chosen = {
            "x": self.values[-1 - x % len(self.values)],
            "y": self.values[-1 - y % len(self.values)],
            "w": self.matrices[w % len(self.matrices)],
            "u": self.matrices[u % len(self.matrices)],
            "p": MATRICES[w % len(MATRICES)],
            "v": VECTORS[v % len(VECTORS)],
            "s": VECTORS[(u + v) % len(VECTORS)],
            "e": EXPERTS[w % len(EXPERTS)],
            "f": FILTERS[w % len(FILTERS)],
            "k": y % WIDTH,
            "r": y % ROWS,
            "region": "",
            "n": "",
            "c": "",
        }
        lines = []
        if "{region}" in template:
            chosen["region"] = self.new("region")
            lines += self.region(chosen["region"], inner, reenters(template))
        if "{n}" in template:
            chosen["n"] = self.new("h")
        if "{c}" in template:
            chosen["c"] = self.new("c")
        lines += template.format(**chosen).split("\n")
        self.values += [chosen["n"]] * bool(chosen["n"])
        self.matrices += [chosen["c"]] * bool(chosen["c"])
        return lines

    def region(self, name, inner, reentrant):
        """A reentrant one's own backward goes wherever what it captures has a history."""
        values, matrices = list(self.values), list(self.matrices)
        self.values = ["x"] if reentrant else [*values, "x"]
        self.matrices = list(MATRICES) if reentrant else list(matrices)
        lines = [line for drawn in inner for line in self.write(drawn)]
        lines.append(f"return {self.values[-1]}")
        self.values, self.matrices = values, matrices
        return [f"def {name}(x):", *(f"    {line}" for line in lines)]


def lines(groups, regions, kinds):
    picks = st.tuples(*[st.integers(0, 5)] * 5)
    line = st.tuples(st.sampled_from(groups).flatmap(st.sampled_from), picks, st.just(()))
    if not regions:
        return line
    within = (PLAIN, PRODUCTS, LIGHT, COMPUTED, OPERATIONS) + (() if kinds is COMPILED else (FUNCTIONS,))
    inner = st.lists(lines(within, regions - 1, kinds), min_size=1, max_size=4)
    region = st.tuples(st.sampled_from(kinds), picks, inner)
    return st.one_of(line, line, line, line, line, region)


@st.composite
def passes(draw, microbatches, faults="IW", reentrant=False):
    """F before I before W, of each microbatch; W whole, in pieces, or together with another's.

    faults: of which passes one may fail. reentrant: no groups are dropped; W runs within no other backward, where torch
    refuses such a checkpoint.
    """
    left = dict.fromkeys(range(microbatches), "FIW")
    order, begun = [], set()
    while left:
        k = draw(st.sampled_from(sorted(left)))
        step, word = left[k][0], f"{left[k][0]}{k}"
        if step == "W":
            kind = draw(st.integers(0, 11))
            others = [o for o in left if o != k and left[o] == "W"]
            if kind in (8, 9):
                word += "/2" if kind == 8 else "/-2"  # and W again
                begun.add(k)
            elif kind == 10 and others:
                word += f"+{others[0]}"
                del left[others[0]]
            elif kind == 11 and not reentrant and k not in begun:
                word = f"D{k}"
            if word[0] == "W" and not reentrant:
                word = draw(st.sampled_from("WWWWVU")) + word[1:]
        if step in faults and draw(st.integers(0, 7)) == 7:
            word += f"!{draw(st.integers(0, 30))}"
        order.append(word)
        if "/" not in word:
            left[k] = left[k][1:]
        if not left[k]:
            del left[k]
    return " ".join(order)


POLICIES = (
    {},
    {"defer": "all"},
    {"defer": "nothing"},
    {"checkpoint": "recompute"},
    {"checkpoint": "input_pass"},
    {"fused": True},
    {"main_grad": True},
    {"defer": "all", "checkpoint": "recompute", "fused": True},
    {"defer": "all", "checkpoint": "keep"},
)


def reenters(source):
    return "use_reentrant=True" in source


@st.composite
def programs(draw, most_lines=12, most_microbatches=3, regions=REGIONS):
    inputs = tuple(draw(st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=2)))
    writer = Writer(len(inputs))
    drawn = draw(st.lists(lines(GROUPS, 1 if regions is COMPILED else 2, regions), min_size=1, max_size=most_lines))
    body = [line for one in drawn for line in writer.write(one)]
    results = [
        (writer.values[-1 - i % len(writer.values)])
        for i in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    ]
    if draw(st.integers(0, 9)) == 9:
        results.append(writer.matrices[-1])
    body.append(f"return {', '.join(results)},")
    source = "\n".join(body)
    # torch lets nobody compute a selectively checkpointed region twice, as a W that failed would; a reentrant one adds
    # to the weights in I; a compiled one does not see that an operator is to fail.
    faults = "I" if "keep_products" in source else "IW"
    if reenters(source) or "torch.compile" in source:
        faults = ""
    some = st.lists(st.sampled_from(WEIGHTS), max_size=2, unique=True).map(sorted).map(tuple)
    return Program(
        source,
        draw(passes(draw(st.integers(2, most_microbatches)), faults, reenters(source))),
        draw(st.sampled_from(["float64", "float64", "float64", "float32", "bfloat16"])),
        inputs,
        draw(some) if draw(st.integers(0, 3)) == 3 else (),
        draw(some),
        draw(st.booleans()),
        dict(draw(st.sampled_from(POLICIES))),
    )
