"""What the CPU host relies on in verl and transformers: another version that changes it is noticed here."""

import dataclasses
import inspect
import os
import subprocess
import sys

import pytest

# Before verl is imported, here or in another test module: it chooses its platform once.
os.environ["VERL_PLATFORM"] = "cpu"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_platform_has_what_verl_asks_for():
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    from verl_bridge.integrations.verl.cpu.platform import PlatformCPU

    assert parameters(PlatformRegistry.register) == ["platform"]
    assert not PlatformCPU.__abstractmethods__
    for name in PlatformBase.__abstractmethods__:
        theirs, ours = getattr(PlatformBase, name), getattr(PlatformCPU, name)
        if not isinstance(theirs, property):
            assert parameters(ours) == parameters(theirs), name


def test_engine_methods_we_override():
    from verl.workers.engine import utils
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

    assert parameters(EngineRegistry.register) == ["model_type", "backend", "device", "vendor"]
    assert parameters(FSDPEngine._build_fsdp_module) == ["self", "module"]
    assert parameters(FSDPEngine._build_module) == ["self"]
    assert parameters(FSDPEngine.forward_backward_batch) == ["self", "data", "loss_function", "forward_only"]
    assert issubclass(FSDPEngineWithValueHead, FSDPEngineWithLMHead)
    for cls in (FSDPEngineWithLMHead, FSDPEngineWithValueHead):
        assert parameters(cls.prepare_model_inputs) == ["self", "micro_batch"]
        outputs = ["self", "output", "output_args", "micro_batch", "logits_processor_func"]
        assert parameters(cls.prepare_model_outputs) == outputs
        assert parameters(cls.forward_step) == ["self", "micro_batch", "loss_function", "forward_only"]
    source = inspect.getsource(FSDPEngineWithLMHead.prepare_model_inputs)
    for key in ("input_ids_rmpad_rolled", "temperature_is_one", '"temperature"'):
        assert key in source
    # Micro-batches are chosen from these, and outputs keep the order of rows unless use_dynamic_bsz restores it.
    source = inspect.getsource(utils.prepare_micro_batches) + inspect.getsource(utils.postprocess_batch_func)
    for key in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "if use_dynamic_bsz:"):
        assert key in source
    # The only two uses of what _build_fsdp_module sees replaced.
    source = inspect.getsource(FSDPEngine._build_fsdp_module)
    assert "self.engine_config.offload_policy or self.engine_config.forward_only" in source


def test_workers_we_override():
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from verl_bridge.integrations.verl.cpu import worker

    assert parameters(TrainingWorker.__init__) == ["self", "config"]
    assert parameters(ActorRolloutRefWorker.init_model) == ["self"]
    for ours in (worker.CPUActorRolloutRefWorker, worker.CPUDetachActorWorker):
        assert getattr(ours.init_model, MAGIC_ATTR) == getattr(ActorRolloutRefWorker.init_model, MAGIC_ATTR)
    assert isinstance(DetachActorWorker.copy_handler, property)
    assert "self.copy_handler(self.actor.engine.module)" in inspect.getsource(DetachActorWorker.save_model_to_cpu)
    assert "not torch.distributed.is_initialized()" in inspect.getsource(initialize_global_process_group_ray)


def test_rollout_classes_we_subclass():
    from verl.workers.rollout import base, llm_server, replica

    from verl_bridge.integrations.verl.cpu import ROLLOUT
    from verl_bridge.integrations.verl.cpu.rollout import CPURollout, CPURolloutReplica, RolloutServer

    assert parameters(replica.RolloutReplicaRegistry.register) == ["name", "loader"]
    assert not CPURollout.__abstractmethods__
    assert not CPURolloutReplica.__abstractmethods__
    assert base.get_rollout_class(ROLLOUT, "async") is CPURollout
    assert replica.get_rollout_replica_class(ROLLOUT) is CPURolloutReplica
    assert parameters(CPURollout.__init__)[:4] == parameters(base.BaseRollout.__init__)[:4]
    assert set(parameters(base.BaseRollout.update_weights)) <= set(parameters(CPURollout.update_weights))
    # Every remote call the replica and the client make exists on the server.
    source = inspect.getsource(replica.RolloutReplica)
    called = {
        line.split("server.")[1].split(".remote")[0]
        for line in source.splitlines()
        if "server." in line and ".remote" in line
    }
    assert called == {
        "wake_up",
        "sleep",
        "abort_all_requests",
        "resume_generation",
        "clear_kv_cache",
        "release_kv_cache",
        "resume_kv_cache",
        "start_profile",
        "stop_profile",
    }
    assert all(inspect.iscoroutinefunction(getattr(RolloutServer, name)) for name in called)
    client = inspect.getsource(llm_server.LLMServerClient.generate)
    for keyword in ("request_id=", "prompt_ids=", "sampling_params=", "image_data=", "video_data="):
        assert keyword in client
    assert {"token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields"} <= set(
        replica.TokenOutput.model_fields
    )


def test_checkpoint_engine_we_register():
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
    from verl.checkpoint_engine.base import CheckpointEngineWorker
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from verl_bridge.integrations.verl.cpu import CHECKPOINT_ENGINE

    engine = CheckpointEngineRegistry.get(CHECKPOINT_ENGINE)
    assert engine.__module__ == "verl_bridge.integrations.verl.cpu.checkpoint_engine"
    assert not engine.__abstractmethods__
    for name in ("prepare", "build_topology", "finalize", "send_weights", "receive_weights"):
        assert parameters(getattr(engine, name)) == parameters(getattr(CheckpointEngine, name)), name
    # How the two kinds of workers make one, and in which order a transfer calls it.
    assert "bucket_size=bucket_size, **engine_kwargs" in inspect.getsource(CheckpointEngineWorker.__init__)
    assert "is_master=(torch.distributed.get_rank() == 0)" in inspect.getsource(ActorRolloutRefWorker.init_model)
    source = inspect.getsource(CheckpointEngineManager.build_process_group)
    source += inspect.getsource(CheckpointEngineManager.update_weights)
    order = ['"prepare"', "build_topology(", '"init_process_group"', "actor_wg.update_weights(", '"finalize"']
    assert sorted(order, key=source.index) == order
    # A standalone replica's worker hands what it receives to the same adapter, with its replica's rank.
    assert "replica_rank" in inspect.getsource(CheckpointEngineWorker.get_replica_rank)


def test_sampling_parameters_verl_sends_are_known():
    from verl.trainer.ppo.v1 import agent_loop_tq

    from verl_bridge.integrations.verl.cpu.sampling import SamplingParams

    known = {field.name for field in dataclasses.fields(SamplingParams)}
    source = inspect.getsource(agent_loop_tq.AgentLoopWorkerTQ.generate_sequences)
    block = source.split("sampling_params = dict(")[1].split(")\n")[0]
    assert {line.split("=")[0].strip() for line in block.splitlines() if "=" in line} <= known


def test_trainer_and_replay_buffer():
    from verl.trainer.ppo.v1 import PPOTrainerSync, replay_buffer

    assert "self.role_worker_mapping[role] = ray.remote(" in inspect.getsource(PPOTrainerSync._init_resource_pool_mgr)
    sources = inspect.getsource(replay_buffer)
    assert "self.poll_interval = poll_interval" in sources and "time.sleep(self.poll_interval)" in sources


def test_transformers_calls_we_build_on():
    from transformers import DynamicCache, GenerationMixin, LogitsProcessor, StoppingCriteria

    assert {"logits_processor", "stopping_criteria", "generation_config"} <= set(parameters(GenerationMixin.generate))
    assert parameters(DynamicCache.batch_select_indices) == ["self", "indices"]
    assert parameters(LogitsProcessor.__call__) == ["self", "input_ids", "scores"]
    assert parameters(StoppingCriteria.__call__)[:3] == ["self", "input_ids", "scores"]


def test_register_is_light_and_reaches_every_registry():
    """A process that only imports verl loads no engine, trainer or rollout because of us."""
    code = """
import sys, verl
heavy = [m for m in ("verl.workers.engine", "verl.workers.rollout", "verl.trainer", "peft") if m in sys.modules]
assert not heavy, heavy
from verl.plugin.platform import get_platform
assert get_platform().device_name == "cpu"
from verl.workers.engine import EngineRegistry
for model_type, name in (("language_model", "CPULanguageModelEngine"), ("value_model", "CPUValueModelEngine")):
    assert EngineRegistry.get_engine_cls(model_type, "fsdp2").__name__ == name
"""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_bridge.plugin"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_swap_replaces_every_role_or_refuses():
    from types import SimpleNamespace

    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import Role

    from verl_bridge.integrations.verl.cpu import cpu_worker_classes, swap_cpu_workers

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "another"}}})
    for mode in ("sync", "colocate_async", "separate_async"):
        trainer = SimpleNamespace(
            role_worker_mapping={Role.ActorRolloutRef: "theirs", Role.Critic: "theirs"},
            config=config,
            trainer_mode=mode,
        )
        swap_cpu_workers(trainer)
        made = {role.name: remote.__ray_actor_class__ for role, remote in trainer.role_worker_mapping.items()}
        classes = cpu_worker_classes(mode)
        assert made == {name: classes[name] for name in ("ActorRolloutRef", "Critic")}
        assert hasattr(made["ActorRolloutRef"], "save_model_to_cpu") == (mode == "separate_async")
        assert set(classes) <= {role.name for role in Role}
    with pytest.raises(ValueError, match="'RewardModel' has no worker for device cpu"):
        swap_cpu_workers(SimpleNamespace(role_worker_mapping={Role.RewardModel: "theirs"}, trainer_mode="sync"))


@pytest.mark.parametrize(
    ("mode", "hybrid", "replicas"),
    [("sync", True, 2), ("colocate_async", True, 2), ("separate_async", True, 5), ("separate_async", False, 3)],
)
def test_rollout_servers_of_every_mode_are_started_ahead(mode, hybrid, replicas):
    """As verl ranks them: the trainer's own from 0, standalone ones from where those end."""
    from types import SimpleNamespace

    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync
    from verl.workers.rollout.llm_server import LLMServerManager

    from verl_bridge.integrations.verl.cpu import rollout_replicas

    config = OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
            "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 3}},
        }
    )
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _enable_hybrid_replicas=hybrid)
    assert rollout_replicas(trainer) == replicas
    source = inspect.getsource(PPOTrainerSeparateAsync._setup)
    assert "hybrid_num_replicas = len(self.llm_server_manager.rollout_replicas)" in source
    assert "start_rank=hybrid_num_replicas" in source
    source = inspect.getsource(LLMServerManager._initialize_llm_servers)
    assert "else self.rollout_config.n_gpus_per_node * self.rollout_config.nnodes" in source
