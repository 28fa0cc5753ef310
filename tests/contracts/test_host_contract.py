"""All that this package asks of verl and TransferQueue, against the installed ones: one test, one list of differences.

Imports, calls of imported names and overridden methods are read from our own source, so nobody has to keep them up to
date; what cannot be read from it (methods of objects verl hands us, fields, habits of its code) stands in the tables.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")

from tests.contracts import host

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PACKAGE = "verl_bridge.integrations.verl"
FOLDER = Path(__file__).parents[2] / PACKAGE.replace(".", "/")
SOURCES = [*sorted(FOLDER.parent.glob("*.py")), *sorted(FOLDER.rglob("*.py"))]

V1, LOOP = "verl.trainer.ppo.v1", "verl.experimental.agent_loop.agent_loop"
TOOLS = "verl.experimental.agent_loop.tool_agent_loop"
ENGINE, ROLLOUT = "verl.workers.engine.fsdp.transformer_impl", "verl.workers.rollout"

# What we call on objects, or register: path, positional arguments (self included), keywords.
CALLS = [
    (f"{V1}:register_trainer", 1, ()),
    (f"{V1}:get_trainer_cls", 1, ()),
    (f"{LOOP}:register", 1, ()),
    ("verl.trainer.ppo.core_algos:register_adv_est", 1, ()),
    ("verl.workers.engine:EngineRegistry.register", 1, ("model_type", "backend", "device")),
    ("verl.workers.engine:EngineRegistry.register", 1, ("model_type", "backend", "device", "vendor")),
    ("verl.plugin.platform:PlatformRegistry.register", 1, ("platform",)),
    (f"{ROLLOUT}.replica:RolloutReplicaRegistry.register", 3, ()),
    ("verl.checkpoint_engine:CheckpointEngineRegistry.register", 1, ()),
    (f"{LOOP}:AgentLoopBase.ct_build_initial_tokens", 2, ()),
    (f"{ROLLOUT}.llm_server:LLMServerClient.generate", 1, ("request_id", "prompt_ids", "sampling_params")),
    # how verl calls what we hand it
    (f"{PACKAGE}.agent_loop:SearchAgentLoop.run", 2, ("raw_prompt", "extra_info", "reward_model", "agent_name")),
    (f"{PACKAGE}.tool_loop:SearchToolAgentLoop.run", 2, ("raw_prompt", "extra_info", "reward_model", "tools_kwargs")),
    (f"{PACKAGE}.retrieval_tool:RetrievalTool.execute", 3, ("agent_data",)),
    (f"{PACKAGE}.trainer:SearchTrainerMixin.fit", 2, ()),
    # the actor's workers, for the likelihood
    ("verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob", 2, ()),
    ("verl.single_controller.base.worker:Worker._query_dispatch_info", 2, ()),
    # TransferQueue, which has no type checker's word on its functions
    ("transfer_queue:kv_batch_get", 0, ("keys", "partition_id", "select_fields")),
    ("transfer_queue:kv_batch_put", 0, ("keys", "partition_id", "fields", "tags")),
    ("transfer_queue:kv_clear", 0, ("keys", "partition_id")),
    # vLLM's server takes the stop parameters of the loop within sampling_params
    (f"{ROLLOUT}.replica:TokenOutput", 0, ("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields")),
]

FIELDS = {
    "transfer_queue:KVBatchMeta": ("keys", "tags", "partition_id", "fields", "extra_info"),
    f"{LOOP}:AgentLoopOutput": (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "num_turns",
        "metrics",
        "extra_fields",
        "as_dict",
    ),
    f"{LOOP}:AgentLoopMetrics": ("generate_sequences", "tool_calls"),
    f"{ROLLOUT}.replica:TokenOutput": ("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields"),
    f"{V1}:PPOTrainer": (
        *("on_init_end", "on_step_begin", "on_step_end", "on_sample_begin", "on_sample_end"),
        *("init", "_step_once", "_compute_old_log_prob", "_compute_advantage", "_update_critic", "_update_actor"),
        *("_init_dataloader", "_init_resource_pool_mgr", "_save_checkpoint", "_load_checkpoint", "_validate", "fit"),
    ),
    "verl.workers.config:RolloutConfig": (
        *("name", "dtype", "seed", "response_length", "max_model_len", "max_num_seqs", "engine_kwargs"),
        *("log_prob_max_token_len_per_gpu", "logprobs_mode", "free_cache_engine", "enable_sleep_mode", "load_format"),
    ),
    "verl.workers.config:HFModelConfig": ("local_path", "tokenizer", "hf_config", "lora_rank", "use_fused_kernels"),
    ENGINE + ":FSDPEngineWithLMHead": ("_gather_and_unpad_packed", "get_data_parallel_size"),
}

# Habits of verl's code, where a change would not raise but be wrong.
MENTIONS = {
    # the order in which a step calls our hooks
    f"{V1}:PPOTrainer._step_once": ("_compute_old_log_prob", "_compute_advantage", "_update_actor"),
    # how mini-batches are cut and what their loss is divided by: the rows of estimator two_state are weighed for that
    f"{V1}:PPOTrainer._update_actor": ("actor.ppo_mini_batch_size", "rollout.n", "update_actor("),
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("make_iterator(", "get_data_parallel_size()"),
    f"{ENGINE}:FSDPEngine.forward_backward_batch": ('data["loss_mask"].sum()', "batch_num_tokens"),
    "verl.trainer.ppo.core_algos:agg_loss": ("/ batch_num_tokens * dp_size", "/ global_batch_size * dp_size"),
    # the names our trainers pass themselves off as
    f"{V1}.trainer_base": ("self.trainer_mode", "trainer_mode", '"sync"'),
    f"{V1}:PPOTrainer.__init__": ("config.trainer.v1.trainer_mode", "self.parameter_sync_step", "local_trigger_step"),
    f"{V1}:PPOTrainer._init_dataloader": ("self.total_training_steps",),
    # rows made to fill a batch
    "verl.trainer.ppo.padding_utils": ("is_padding",),
    # workers write every tensor of their output back
    "verl.utils.transferqueue_utils:_async_update_meta_with_output": ("isinstance(v, torch.Tensor", "async_put("),
    # where a loop's own fields end up
    f"{LOOP}:AgentLoopOutput.as_dict": ("extra_fields", "rm_scores", "rollout_log_probs"),
    LOOP: ("_agent_loop_registry", "_target_"),
    f"{ROLLOUT}.base": ("_ROLLOUT_REGISTRY",),
    # what the loop for function-calling models reads between verl's steps, and when an observation is dropped
    f"{TOOLS}:AgentData.__init__": (
        *("self.messages", "self.prompt_ids", "self.response_ids", "self.response_mask", "self.tool_calls"),
    ),
    f"{TOOLS}:ToolAgentLoop.run": ("agent_data._active_tools", "prompt_ids[-len(agent_data.response_mask) :]"),
    f"{TOOLS}:ToolAgentLoop._handle_generating_state": ("extract_tool_calls(", "agent_data.messages.append("),
    f"{TOOLS}:ToolAgentLoop._handle_processing_tools_state": (
        "agent_data.tool_calls[: self.max_parallel_calls]",
        "if len(response_mask) >= self.response_length:\n            return AgentState.TERMINATED",
    ),
    # where the engine leaves labels and temperature for us
    f"{ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs": ("input_ids_rmpad_rolled", "temperature"),
    f"{ENGINE}:FSDPEngine.__init__": ("self.engine_config", "self.model_config"),
    "verl.single_controller.base.decorator": ("_dispatch_info",),
    # the weights' version that vLLM's server reports
    f"{V1}.agent_loop_tq": ("extra_fields", "global_steps"),
}


def test_the_installed_hosts_are_as_this_package_expects():
    """Reads like a list of what to look at after an upgrade."""
    differences = [
        *host.import_differences(SOURCES),
        *host.override_differences(host.our_classes(PACKAGE)),
        *host.call_differences(CALLS),
        *host.field_differences(FIELDS),
        *host.source_differences(MENTIONS),
    ]
    assert not differences, "\n  " + "\n  ".join(differences)


def test_the_steps_hooks_are_called_in_our_order():
    """GCA reads what the log-prob pass left, and the policy update what GCA left."""
    source = inspect.getsource(host.resolve(f"{V1}:PPOTrainer._step_once"))
    order = ["_compute_old_log_prob(", "_compute_advantage(", "_update_actor("]
    places = [source.index(name) for name in order]
    assert places == sorted(places)


def test_enough_is_looked_at():
    """The readers of our source find what is known to be there."""
    classes = host.our_classes(PACKAGE)
    overridden = {f"{ours.__name__}.{name}" for cls in classes for name, ours, *_ in host.overrides(cls)}
    assert {
        "SearchTrainerMixin._compute_advantage",
        "SearchAgentLoop.run",
        "SearchToolAgentLoop._call_tool",
        "SalienceFSDPEngine.prepare_model_outputs",
        "CPURollout.update_weights",
        "CPUActorRolloutRefWorker.init_model",
        "PlatformCPU.current_device",
    } <= overridden
    assert len(SOURCES) > 15


def theirs(self, batch, metrics, *, deep=False): ...


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        (lambda self, batch, metrics, *, deep=False: None, []),
        (lambda self, batch, metrics, **more: None, []),
        (lambda *everything, **more: None, []),
        (lambda self, batch, metrics, extra=None, *, deep=False: None, []),
        (lambda self, batch, *, deep=False: None, ["no parameter 'metrics' at position 2"]),
        (lambda self, data, metrics, *, deep=False: None, ["no parameter 'batch' at position 1", "'data'"]),
        (lambda self, batch, metrics: None, ["no parameter 'deep'"]),
        (lambda self, batch, metrics, extra, *, deep=False: None, ["would not give 'extra'"]),
    ],
)
def test_what_counts_as_a_difference(ours, says):
    found = host.not_substitutable(ours, theirs)
    assert len(found) == len(says) and all(part in line for part, line in zip(says, found, strict=True)), found


def test_a_coroutine_in_place_of_a_function():
    async def ours(self, batch, metrics, *, deep=False): ...

    assert host.not_substitutable(ours, theirs) == ["one is a coroutine, the other is not"]


def test_keywords_that_only_pass_through_are_ours_to_name():
    def host_method(self, **kwargs): ...

    assert host.not_substitutable(lambda self, board, transfer: None, host_method) == []


def test_changes_of_the_host_are_named(tmp_path):
    """A release that drops a name, an argument, a field or a habit: each is a line with the place in our code."""
    source = tmp_path / "ours.py"
    source.write_text(
        "import transfer_queue as tq\n"
        "from verl.utils.profiler import simple_timer, no_such_timer\n"
        "from verl.no_such_module import anything\n"
        "def use(**more):\n"
        "    simple_timer('gen', {}, 1, 2, 3)\n"
        "    tq.kv_batch_get(key=[])\n"
        "    tq.kv_batch_gets([])\n"
        "    tq.kv_clear(['a'], **more)\n"
    )
    found = "\n".join(host.import_differences([source]))
    for part in (
        "import no_such_timer: ModuleNotFoundError",
        "from verl.no_such_module import anything",
        "ours.py:5: simple_timer('gen', {}, 1, 2, 3): too many positional arguments",
        "ours.py:6: tq.kv_batch_get(key=[])",
        "ours.py:7: tq.kv_batch_gets is not there any more",
    ):
        assert part in found, found
    assert len(found.splitlines()) == 5
    assert "has no wings" in host.field_differences({"transfer_queue:KVBatchMeta": ("keys", "wings")})[0]
    (call,) = host.call_differences([("transfer_queue:kv_clear", 0, ("keys", "partition"))])
    assert "missing a required argument: 'partition_id'" in call or "unexpected keyword argument 'partition'" in call
    (gone,) = host.call_differences([("transfer_queue:kv_gone", 0, ())])
    assert gone.startswith("transfer_queue:kv_gone: AttributeError")
    (habit,) = host.source_differences({f"{V1}:PPOTrainer._step_once": ("_compute_wings",)})
    assert "does not say '_compute_wings'" in habit
