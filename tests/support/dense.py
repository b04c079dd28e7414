"""Small dense programs: two to eight operations on matrices, weights in several roles, some microbatches, in I and W.

`draw(seed)` gives one, which prints as the code that runs it again (`support.dense_runs.judge`). They are small and
plain, so that a million of them can run.
"""

import random
from dataclasses import dataclass, field

INPUTS, MATRICES, VECTORS = ("x0", "x1"), ("w0", "w1", "w2"), ("v0", "v1")
CALLS = ("at once", "each", "one", "pieces", "mixed")
HOOKS = ("tensor", "changes", "added", "takes", "before", "behind")

# Text between the bars. {a}, {b}, {c}: matrices of N x N, as the result is; {r}, {s}: rows of N.
LINES = """{a} @ {b}|{a} @ {b}|{a} @ {b}|torch.addmm({c}, {a}, {b})|torch.addmm({c}, {a}, {b})|torch.addmm({c}, {a}, {b})
torch.addmm({r}, {a}, {b})|torch.addmm({c}, {a}, {b}, beta=0.5, alpha=2)|F.linear({a}, {b})|F.linear({a}, {b}, {r})
torch.baddbmm({c}[None], {a}[None], {b}[None])[0]|({a}.expand(2, N, N) @ {b}).sum(0)|torch.einsum('ij,kj->ik', {a}, {b})
({a}.to(OTHER) @ {b}.to(OTHER)).to(DTYPE)|{a} + {b}|{a} + {b}|{a} - {b}|{a} * {b}|{a} * {r}|{a} + {r}|{a}.tanh()|{a}.t()
{a} + {a}.sum(0, keepdim=True)|F.layer_norm({a}, (N,), {r}, {s})"""
# A weight {w}, or a vector {v}, as a matrix and as a row.
USES = """{w}|{w}|{w}|{w}|{w}|{w}|{w}.t()|{w}.t()|{w}.t()|{w}.view(1, N, N)[0]|{w}[None].permute(2, 1, 0).squeeze(2)
{w}.reshape(N * N).reshape(N, N)|{w}[0].expand(N, N)|{w}.to(OTHER).to(DTYPE)|{w}.to(OTHER).t().to(DTYPE)|{w}.clone()
({w} + {u})|{v}.expand(N, N)"""
ROWS = "{v}|{v}|{v}|{v}|{w}[0]|{w}.sum(0)|{v}.to(OTHER).to(DTYPE)|({v} * 2)"
GRADIENTS = "g0|g0|g0|g0|g0|g0|g1|g0.t()|g0[:1].expand(N, N)|None"
LINES, USES, ROWS, GRADIENTS = (text.replace("\n", "|").split("|") for text in (LINES, USES, ROWS, GRADIENTS))


@dataclass(frozen=True)
class Program:
    """
    source: `forward` of the k-th microbatch, its inputs and all weights; `gradients` of its outputs.
    seed: of all values, and of the order of the groups.
    strided: what lies transposed in memory. frozen: leaves that require no gradient. existing: weights that have one already.
    late: the forwards of all microbatches run first.
    calls: W runs "at once" behind each I; or for "each" microbatch, for all in "one" call or in "pieces", or with their
        groups "mixed".
    retain: the calls of W are made twice, with retain_graph at first.
    listed: I is given the weights.
    """

    source: str
    seed: int = 0
    side: int = 3
    dtype: str = "float64"
    microbatches: int = 1
    strided: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    existing: tuple[str, ...] = ()
    hooks: dict = field(default_factory=dict)
    late: bool = False
    calls: str = "each"
    retain: bool = False
    defer: str = "matrices"
    exclude: tuple[str, ...] = ()
    listed: bool = True

    def __repr__(self):
        given = (f"{name}={value!r}" for name, value in vars(self).items() if name != "source")
        return f'judge(Program("""\n{self.source}\n""", {", ".join(given)}))'


def draw(seed):
    choose = random.Random(seed)
    values = list(INPUTS[: choose.randint(1, 2)])
    matrices, vectors = MATRICES[: choose.randint(1, 3)], VECTORS[: choose.randint(1, 2)]

    def use(kinds):
        w, u, v = choose.choice(matrices), choose.choice(matrices), choose.choice(vectors)
        return choose.choice(kinds).format(w=w, u=u, v=v)

    def matrix(weights):
        return use(USES) if choose.random() < weights else choose.choice(values[-3:])

    def some(names, chance):
        return tuple(name for name in names if choose.random() < chance)

    def line():
        return choose.choice(LINES).format(a=matrix(0.2), b=matrix(0.7), c=matrix(0.5), r=use(ROWS), s=use(ROWS))

    is_uneven = choose.random() < 0.2  # microbatches differ
    source = [f"def forward({', '.join(('k', *INPUTS, *MATRICES, *VECTORS))}):"]
    for i in range(choose.randint(2, 8)):
        other = f" if k % 2 else {line()}" if is_uneven and choose.random() < 0.4 else ""
        source.append(f"    h{i} = {line()}{other}")
        values.append(f"h{i}")
    last = [value for value in values[-4:] if value[0] == "h"]
    results = choose.sample(last, choose.randint(1, min(3, len(last))))
    grads = ["g0", *(choose.choice(GRADIENTS) for _ in results[1:])]
    source += [f"    return {', '.join(results)},", "def gradients(g0, g1):", f"    return {', '.join(grads)},"]
    calls, weights = choose.choice(CALLS[:-1] if is_uneven else CALLS), matrices + vectors
    return Program(
        source="\n".join(source),
        seed=seed,
        side=choose.randint(2, 4),
        dtype=choose.choice(["float64", "float32"]),
        microbatches=choose.randint(1, 3),
        strided=some(INPUTS + matrices + tuple(f"{w}.grad" for w in matrices), 0.1),
        frozen=some(INPUTS + weights, 0.05),
        existing=some(weights, 0.3),
        hooks={w: choose.choice(HOOKS) for w in some(weights, choose.choice([0, 0.2]))},
        late=choose.random() < 0.5,
        calls=calls,
        retain=calls != "at once" and choose.random() < 0.1,
        defer=choose.choice(["matrices", "matrices", "all", "nothing"]),
        exclude=some(weights, choose.choice([0, 0.2])),
        listed=choose.random() < 0.5,
    )
