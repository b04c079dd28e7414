"""The configurations in which test_torchtitan.py trains torchtitan's debug model. Imports neither torch nor torchtitan."""

from dataclasses import dataclass

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

CASES = {
    "defaults": Case(loss="chunked", checkpointing="selective", on_torch=EXTRA_TIME, long=False),
    "ZBV": Case(long=False),
    "ZBV, chunked loss": Case(loss="chunked", on_torch="wrong", long=False),
    "ZBV, fully_shard, reshard always": Case(reshard="always", on_torch="wrong", long=False),
    "ZBV, fully_shard, reshard never": Case(reshard="never"),
    "ZBV, fully_shard, chunked loss": Case(reshard="never", loss="chunked", on_torch="wrong"),
    "ZBV, full checkpointing": Case(checkpointing="full"),
    "ZBV, selective checkpointing": Case(checkpointing="selective", on_torch=EXTRA_TIME),
    "ZBV, bf16": Case(dtype="bfloat16"),
    "ZBV, aot_eager": Case(backend="aot_eager", on_torch=DONATED),
    "ZBV, aot_eager, selective checkpointing": Case(backend="aot_eager", checkpointing="selective", on_torch=DONATED),
    "ZBV, zbpipe compiles": Case(backend="zbpipe", on_torch=DONATED, exact=False),
    "interleaved": Case("InterleavedZeroBubble"),
    # The loss reduces what is there of the last norm's gradient, which shares a group with the head it calls; here that
    # is two microbatches' W at a time.
    "interleaved, chunked loss": Case("InterleavedZeroBubble", loss="chunked", on_torch="wrong", exact=False),
    "interleaved, full checkpointing": Case("InterleavedZeroBubble", checkpointing="full"),
    "interleaved, selective checkpointing": Case(
        "InterleavedZeroBubble", checkpointing="selective", on_torch=EXTRA_TIME
    ),
    "interleaved, bf16": Case("InterleavedZeroBubble", dtype="bfloat16"),
    "interleaved, aot_eager": Case("InterleavedZeroBubble", backend="aot_eager", on_torch=DONATED),
    "interleaved, fully_shard, reshard always": Case("InterleavedZeroBubble", reshard="always", on_torch="wrong"),
    "interleaved, fully_shard, reshard never": Case("InterleavedZeroBubble", reshard="never"),
    "DualPipeV": Case("DualPipeV"),
    "DualPipeV, chunked loss": Case("DualPipeV", loss="chunked", on_torch="wrong"),
    "DualPipeV, full checkpointing": Case("DualPipeV", checkpointing="full"),
    "DualPipeV, selective checkpointing": Case("DualPipeV", checkpointing="selective", on_torch=EXTRA_TIME),
    "DualPipeV, bf16": Case("DualPipeV", dtype="bfloat16"),
    "DualPipeV, aot_eager": Case("DualPipeV", backend="aot_eager", on_torch=DONATED),
    "DualPipeV, fully_shard, reshard always": Case("DualPipeV", reshard="always", on_torch="wrong"),
    "DualPipeV, fully_shard, reshard never": Case("DualPipeV", reshard="never"),
}
