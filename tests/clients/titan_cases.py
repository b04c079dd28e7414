"""The configurations in which test_torchtitan.py trains torchtitan's debug model. Imports neither torch nor torchtitan."""

from dataclasses import dataclass, replace

ZERO_BUBBLE = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Case:
    """
    schedule: torchtitan's name of it.
    loss: "plain" cross entropy, or "chunked": torchtitan's default.
    checkpointing: "none", "full", or "selective": torchtitan's default.
    reshard: None without data parallelism, else fully_shard's policy over two ranks beside two of the pipeline.
    backend: what compiles each block.
    on_torch: "right", "wrong" (silently), or words of the error that torch's own module raises.
    exact: whether the kernels and the order of sums are those of the run without a pipeline, and so the bits.
    long: not in an ordinary run.
    """

    schedule: str = "ZBVZeroBubble"
    loss: str = "plain"
    checkpointing: str = "none"
    reshard: str | None = None
    dtype: str = "float32"
    backend: str | None = None
    on_torch: str = "right"
    exact: bool = True
    long: bool = True

    @property
    def data_parallel(self):
        return 1 if self.reshard is None else 2


EXTRA_TIME = "Trying to backward an extra time"  # what a selectively checkpointed region says
DONATED = "non-empty donated buffers"  # what a compiled block says to retain_graph=True

# What torchtitan's options make, by the way that each is put.
OPTIONS = {
    "": {},
    ", chunked loss": {"loss": "chunked", "on_torch": "wrong"},
    ", full checkpointing": {"checkpointing": "full"},
    ", selective checkpointing": {"checkpointing": "selective", "on_torch": EXTRA_TIME},
    ", bf16": {"dtype": "bfloat16"},
    ", aot_eager": {"backend": "aot_eager", "on_torch": DONATED},
    ", fully_shard, reshard always": {"reshard": "always", "on_torch": "wrong"},
    ", fully_shard, reshard never": {"reshard": "never"},
}
SCHEDULES = {"ZBV": "ZBVZeroBubble", "interleaved": "InterleavedZeroBubble", "DualPipeV": "DualPipeV"}
CASES = {
    f"{name}{what}": Case(schedule, **options)
    for name, schedule in SCHEDULES.items()
    for what, options in OPTIONS.items()
}
CASES |= {
    "defaults": Case(loss="chunked", checkpointing="selective", on_torch=EXTRA_TIME),
    "ZBV, fully_shard, chunked loss": Case(reshard="never", loss="chunked", on_torch="wrong"),
    "ZBV, aot_eager, selective checkpointing": Case(backend="aot_eager", checkpointing="selective", on_torch=DONATED),
    "ZBV, zbpipe compiles": Case(backend="zbpipe", on_torch=DONATED, exact=False),
}
for name in ("defaults", "ZBV", "ZBV, chunked loss", "ZBV, fully_shard, reshard always"):
    CASES[name] = replace(CASES[name], long=False)
# The loss reduces what is there of the last norm's gradient, which shares a group with the head it calls; here that is two
# microbatches' W at a time.
CASES["interleaved, chunked loss"] = replace(CASES["interleaved, chunked loss"], exact=False)
