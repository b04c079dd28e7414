"""The table of what zbpipe expects of torch's private parts: see Note [What is probed], probe.py."""

from __future__ import annotations

import enum
from typing import NamedTuple

from zbpipe._torch.pipelining import BACKWARD, SCHEDULES, STAGE

TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # the whole suite has run on these, and on no others
OLDEST = (2, 11)
NEWEST = (2, 15)

_BASE = f"{STAGE}:_PipelineStageBase"
_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param:FSDPParam"
_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_DDP = "torch.nn.parallel.distributed"
_COMPOSABLE = "torch.distributed._composable"
_INDUCTOR = "torch._inductor.compile_fx"


class Weight(enum.Enum):
    """What zbpipe does if a need is not met."""

    NUMBERS = "patch() refuses"
    SOME_NUMBERS = "refused where it is met"
    MEMORY = "patch() goes without"
    TOOL = "raises where it is used"


class Thing(NamedTuple):
    """A name in torch: ``module:path``. ``kind`` is "function", "property", "attribute" (of instances, or of a module)
    or "callable" (without a known signature). ``parameters`` are a function's, by name."""

    name: str
    kind: str
    parameters: tuple[str, ...] = ()
    may_be_missing: bool = False

    def __str__(self) -> str:
        return f"function of ({', '.join(self.parameters)})" if self.kind == "function" else self.kind


class Way(NamedTuple):
    """Things that belong together, and the releases of torch, "2.11 to 2.14", that have them."""

    releases: str
    things: tuple[Thing, ...]


class Need(NamedTuple):
    """``consequence`` ends a sentence about a torch that does not meet the need. ``slow`` names a module of torch that
    takes seconds to import."""

    name: str
    weight: Weight
    consequence: str
    ways: tuple[Way, ...]
    slow: str = ""


def _in_all(name: str, weight: Weight, consequence: str, *things: Thing, slow: str = "") -> Need:
    """A need that all releases meet alike."""
    return Need(name, weight, consequence, (Way("2.11 to 2.15", things),), slow)


def _functions(owner: str, signatures: dict[str, str], may_be_missing: bool = False) -> tuple[Thing, ...]:
    return tuple(
        Thing(_join(owner, name), "function", tuple(parameters.split()), may_be_missing)
        for name, parameters in signatures.items()
    )


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"


def _attributes(owner: str, names: str) -> tuple[Thing, ...]:
    return tuple(Thing(_join(owner, name), "attribute") for name in names.split())


def _callables(owner: str, names: str, may_be_missing: bool = False) -> tuple[Thing, ...]:
    return tuple(Thing(_join(owner, name), "callable", (), may_be_missing) for name in names.split())


_PASSES = {
    "stage_backward": "stage_output output_grads input_values outputs_with_grads_idxs",
    "stage_backward_input": "stage_outputs_or_loss output_grads input_values weights",
    "stage_backward_weight": "weights param_groups retain_graph",
}
_NEWER_PASSES = {"_autograd_grad_for_inputs": "outputs inputs grad_outputs retain_graph allow_unused"}
_DRIVES = {
    "forward_maybe_with_nosync": "self args kwargs",
    "backward_maybe_with_nosync": "self backward_type bwd_kwargs last_backward",
    "backward_one_chunk": "self bwd_chunk_id loss full_backward last_backward",
    "backward_weight_one_chunk": "self bwd_chunk_id last_backward",
}
_DRIVEN = (
    *_functions(_BASE, _DRIVES),
    Thing(f"{_BASE}.is_first", "property"),
    Thing(f"{_BASE}.is_last", "property"),
    *_attributes(_BASE, "submod stage_index dw_builder backward_state args_recv_info grad_recv_info"),
    # Without this method, the forward that tells a stage its shapes runs without gradients.
    *_functions(f"{STAGE}:PipelineStage", {"_compute_outputs": "self args module kwargs"}, may_be_missing=True),
)
_RELEASES = {
    "forward_one_chunk": "self fwd_chunk_id args kwargs save_forward_output",
    "get_fwd_recv_ops": "self fwd_chunk_id",
    "get_bwd_recv_ops": "self bwd_chunk_id",
    "get_fwd_send_ops": "self fwd_chunk_id",
    "get_bwd_send_ops": "self bwd_chunk_id",
    "set_local_fwd_input": "self prev_stage_outputs mb_index",
    "set_local_bwd_input": "self next_stage_bwd_outputs mb_index",
    "clear_runtime_states": "self",
}
_CONTEXT = f"{_FSDP}._fsdp_state:FSDPStateContext"
_FINALIZES = "manual_backward_finalization manual_backward_finalization_active"
_SHARDED = (
    Thing("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "function", ("self",)),
    *_attributes(_STATE, "_state_ctx"),
    *_attributes(_CONTEXT, "all_states"),
    *_attributes(_GROUP, "fsdp_params"),
    Thing(f"{_GROUP}.is_unsharded", "property"),
    *_functions(_GROUP, {"unshard": "self async_op", "wait_for_unshard": "self", "reshard": "self"}),
    *_attributes(_PARAM, "sharded_param _unsharded_param"),
    *_functions(_STATE, {"_root_post_backward_final_callback": "self"}),
    *_attributes("torch.distributed._composable_state", "_module_state_mapping"),
)

NEEDS = (
    _in_all(
        "passes",
        Weight.NUMBERS,
        "I and W cannot take the place of torch's",
        *_functions(BACKWARD, _PASSES),
        *_functions(BACKWARD, _NEWER_PASSES, may_be_missing=True),
    ),
    Need(
        "stages",
        Weight.NUMBERS,
        "the gradients of its stages would be wrong",
        (
            Way("2.11 to 2.14", (*_DRIVEN, *_attributes(_BASE, "fwd_cache"))),
            Way(
                "2.15",
                (
                    *_DRIVEN,
                    *_attributes(_BASE, "_forward_chunk_states"),
                    *_attributes(f"{STAGE}:_ForwardChunkState", "live_outputs output_grad_edges"),
                    *_functions(f"{STAGE}:_ForwardChunkState", {"stage_output_for_backward": "self"}),
                ),
            ),
        ),
    ),
    _in_all(
        "the scale of main_grad",
        Weight.SOME_NUMBERS,
        "a schedule's division by the number of microbatches would not reach main_grad",
        *_functions(_BASE, {"scale_grads": "self grad_scale_factor"}),
    ),
    Need(
        "fully_shard",
        Weight.SOME_NUMBERS,
        "the gradients of stages under fully_shard would be wrong",
        (
            Way("2.15", (*_SHARDED, *_attributes(_STATE, "_fsdp_param_groups"), *_attributes(_CONTEXT, _FINALIZES))),
            Way("2.12 to 2.14", (*_SHARDED, *_attributes(_STATE, "_fsdp_param_groups"))),
            Way("2.11", (*_SHARDED, *_attributes(_STATE, "_fsdp_param_group"))),
        ),
    ),
    _in_all(
        "DistributedDataParallel",
        Weight.SOME_NUMBERS,
        "DistributedDataParallel would reduce at the wrong moment, or never",
        *_attributes(
            f"{_DDP}:DistributedDataParallel",
            "reducer module static_graph find_unused_parameters parameters_to_ignore "
            "_static_graph_delay_allreduce_enqueued",
        ),
        *_functions(_DDP, {"_find_tensors": "obj"}),
        *_callables("torch.distributed:Reducer", "prepare_for_backward _delay_all_reduce"),
    ),
    _in_all(
        "the composable replicate",
        Weight.SOME_NUMBERS,
        "replicate would reduce at the wrong moment, or never",
        *_functions(_COMPOSABLE, {"_get_registry": "module"}),
        Thing(f"{_COMPOSABLE}:replicate.state", "callable"),
        *_attributes(f"{_COMPOSABLE}.replicate:_ReplicateState", "_ddp _no_sync _init_args"),
        *_functions(f"{_COMPOSABLE}.replicate:_ReplicateState", {"lazy_init": "self"}),
    ),
    Need(
        "releases",
        Weight.MEMORY,
        "stages and schedules hold as much memory as without zbpipe",
        (
            Way("2.15", _functions(_BASE, {"release_fwd_send_outputs": "self fwd_chunk_id"})),
            Way(
                "2.11 to 2.14",
                (
                    *_functions(_BASE, _RELEASES),
                    *_functions(SCHEDULES, {"_batch_p2p": "p2p_ops desc"}),
                    *_attributes(f"{STAGE}:_RecvInfo", "buffer"),
                    *_attributes(_BASE, "device fwd_cache"),
                    *_attributes("torch.distributed:P2POp", "op tensor group peer"),
                ),
            ),
        ),
    ),
    _in_all(
        "compiled stages",
        Weight.MEMORY,
        "its schedules refuse compiled stages",
        *_functions(SCHEDULES, {"_check_torch_compile_compatibility": "stages schedule_name"}, may_be_missing=True),
    ),
    _in_all(
        "tensors and nodes",
        Weight.TOOL,
        "explain, defer, release and the leak tools",
        *_attributes("torch:Tensor", "_base _version"),
        *_callables("torch:Tensor", "_is_view _make_subclass _use_count"),
        *_callables("torch._C", "_DisableAutocast _autocast_supported_devices DisableTorchFunction"),
        *_callables("torch._C", "_storage_Use_Count _storage_address _swap_tensor_impl"),
        *_attributes("torch:UntypedStorage", "_cdata"),
        *_attributes("torch.nn:Module", "_parameters _buffers _modules"),
        *_attributes("torch.nn.utils.parametrize", "_cache"),
        *_callables("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
        *_callables("torch.utils._pytree", "tree_flatten tree_unflatten tree_map"),
    ),
    _in_all(
        "inner backwards",
        Weight.TOOL,
        "passes under policy(main_grad=True), loops under fully_shard",
        *_functions("torch.autograd", {"_engine_run_backward": "t_outputs args kwargs"}),
        *_callables("torch._C", "_stash_obj_in_tls _get_obj_in_tls _is_key_in_tls _current_graph_task_id"),
    ),
    _in_all(
        "the CUDA allocator",
        Weight.TOOL,
        "zbpipe.memory and the leak tools on CUDA",
        *_callables("torch.cuda.memory", "_record_memory_history _snapshot"),
        # Missing where torch is built without CUDA.
        *_callables("torch._C", "_cuda_isHistoryEnabled _cuda_memoryStats", may_be_missing=True),
    ),
    _in_all(
        "compilers",
        Weight.TOOL,
        "zbpipe.compile and explain of compiled modules",
        *_callables("torch._dynamo.backends.debugging", "aot_eager boxed_nop"),
        *_callables(_INDUCTOR, "compile_fx compile_fx_inner"),
        *_callables("torch._dynamo.eval_frame", "_TorchDynamoContext"),
        *_callables("torch._inductor.utils", "BoxedBool"),
        *_callables("torch", "_TorchCompileInductorWrapper"),
        *_callables("torch._guards", "CompileContext TracingContext compile_context tracing"),
        *_callables("torch._ops", "OpOverload HigherOrderOperator"),
        slow=_INDUCTOR,
    ),
)
