"""The asynchronous trainers keep what verl makes depend on its own mode's name, and on its own classes."""

import ast
import inspect

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODES = ("sync", "colocate_async", "separate_async")


def functions_that(condition):
    """Names of the functions of verl's trainer_base that hold a node for which ``condition`` is true, in order."""
    from verl.trainer.ppo.v1 import trainer_base

    tree = ast.parse(inspect.getsource(trainer_base))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f.name for f in sorted(functions, key=lambda f: f.lineno) for node in ast.walk(f) if condition(node)]


def is_mode(node):
    return isinstance(node, ast.Attribute) and node.attr == "trainer_mode" and ast.unparse(node.value) == "self"


def test_verl_compares_its_mode_in_these_places():
    """Each sees verl's own name, because ours is replaced before any of them runs."""
    compared = functions_that(
        lambda node: (
            isinstance(node, ast.Compare)
            and is_mode(node.left)
            and [ast.unparse(value) for value in node.comparators] == ["'sync'"]
        )
    )
    assert compared == [
        "_build_replay_buffer",  # the class: ReplayBuffer or ReplayBufferAsync
        "_init_dataloader",  # gen_batch_size: 1 when asynchronous
        "_load_checkpoint",  # TransferQueue's state is restored
        "_reissue_inflight_prompts",
        "_save_checkpoint",  # TransferQueue's state is saved
        "_submit_batch_to_rollout",  # prompts are kept, to be issued again after a resume
    ]
    # Everything else it does with the name: reads it once, from the config, and looks up that mode's section.
    used = functions_that(lambda node: is_mode(node) and isinstance(node.ctx, ast.Load))
    assert sorted(used) == sorted([*compared, "__init__", "_build_replay_buffer", "_build_replay_buffer"])
    written = functions_that(lambda node: is_mode(node) and isinstance(node.ctx, ast.Store))
    assert written == ["__init__"]
    assert functions_that(
        lambda node: (
            isinstance(node, ast.Assign)
            and is_mode(node.targets[0])
            and ast.unparse(node.value) == "self.config.trainer.v1.trainer_mode"
        )
    ) == ["__init__"]


@pytest.fixture(scope="module")
def composed():
    import verl  # noqa: F401  its import loads our plugin, which adds the config groups
    from hydra import compose, initialize_config_module

    def config(mode, *overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(
                "ppo_trainer",
                [
                    "+verl_bridge=bridge_gca",
                    "+verl_bridge_host=cpu_separate_async",
                    f"trainer.v1.trainer_mode=bridge_{mode}",
                    "trainer.v1.separate_async.parameter_sync_step=2",
                    "algorithm.adv_estimator=grpo",
                    "data.train_batch_size=4",
                    "actor_rollout_ref.model.path=none",
                    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                    "verl_bridge.retriever.corpus=c.jsonl",
                    "verl_bridge.retriever.index=index",
                    *overrides,
                ],
            )

    return config


@pytest.mark.parametrize("mode", MODES)
def test_our_trainers_run_under_verls_name(composed, mode):
    """verl's own constructors, up to where workers would start."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    theirs, ours = get_trainer_cls(mode), get_trainer_cls(f"bridge_{mode}")
    assert issubclass(ours, theirs) and ours.verl_mode == mode
    config = composed(mode)
    trainer = ours(config)
    assert trainer.trainer_mode == config.trainer.v1.trainer_mode == mode
    assert type(trainer.replay_buffer).__name__ == ("ReplayBuffer" if mode == "sync" else "ReplayBufferAsync")
    assert trainer.replay_buffer.trainer_mode == mode
    assert trainer.replay_buffer.trainer_config == config.trainer.v1[mode]
    assert trainer.parameter_sync_step == (2 if mode == "separate_async" else 1)


@pytest.mark.parametrize("mode", MODES[1:])
def test_hooks_of_verls_mode_are_not_overridden(mode):
    """What makes a mode: when generation pauses, when weights and the adapter are seen, what the policy π_old is."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    theirs, ours = get_trainer_cls(mode), get_trainer_cls(f"bridge_{mode}")
    hooks = [name for name in vars(theirs) if name.startswith("on_")] + ["get_llm_client"]
    assert {"on_step_end", "on_sample_end", "on_init_end", "on_train_begin"} <= set(hooks)
    assert all(getattr(ours, name) is getattr(theirs, name) for name in hooks)


def test_the_order_of_a_step():
    """The retriever learns between sampling, which pauses colocated generation, and the end, which resumes it."""
    from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync

    once = inspect.getsource(PPOTrainer._step_once)
    order = ["self.on_sample_end()", "self._compute_old_log_prob(", "self._compute_advantage(", "self._update_actor("]
    assert sorted(order, key=once.index) == order
    fit = inspect.getsource(PPOTrainer.fit)
    order = ["self.step(", "self._save_checkpoint()", "self.on_step_end()"]
    assert sorted(order, key=fit.index) == order
    assert "abort_replicas()" in inspect.getsource(PPOTrainerColocateAsync.on_sample_end)
    assert "resume_generation_replicas()" in inspect.getsource(PPOTrainerColocateAsync.on_step_end)


def test_standalone_rollout_alone_survives_verls_log_line(composed, monkeypatch):
    """With hybrid_engine=false verl 0.9.1 hands a logger print's flush=."""
    import logging

    from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls, trainer_separate_async

    class Managed:
        rollout_replicas, server_addresses = (), ()

        @classmethod
        def create(cls, **kwargs):
            return cls()

        def get_replicas(self):
            return []

    monkeypatch.setattr(trainer_separate_async, "LLMServerManager", Managed)
    monkeypatch.setattr(trainer_separate_async, "CheckpointEngineManager", lambda **kwargs: None)
    monkeypatch.setattr(PPOTrainer, "_setup", lambda self: None)
    logger = logging.getLogger(trainer_separate_async.__name__)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    trainer = get_trainer_cls("bridge_separate_async")(
        composed("separate_async", "actor_rollout_ref.hybrid_engine=false")
    )
    trainer.llm_server_manager, trainer.actor_rollout_wg = Managed(), None
    with pytest.raises(TypeError, match="flush"):
        trainer_separate_async.PPOTrainerSeparateAsync._setup(trainer)
    trainer._setup()
    assert trainer.current_mode is trainer_separate_async.HybridEngineMode.TRAINER


def test_the_cpu_host_of_separate_async(composed):
    config = composed("separate_async")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.nnodes, rollout.n_gpus_per_node) == ("hf_cpu", 1, 1)
    assert rollout.checkpoint_engine.backend == "ray_cpu"
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node + rollout.nnodes * rollout.n_gpus_per_node
    assert config.ray_kwargs.ray_init.num_gpus == gpus == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=6", r"data\.train_batch_size=6 .*=2 updates of .*=2 prompts: set .*train_batch_size=4"),
        ("actor_rollout_ref.rollout.nnodes=0", r"rollout\.nnodes=0 with .*devices of its own: set it to 1"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=naive", r"backend=naive .*set nccl \(.*with ray_cpu"),
    ],
)
def test_what_verl_would_assert_late_is_refused_early(composed, override, message):
    from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, get_trainer_cls

    from verl_bridge.config.schema import ConfigError

    with pytest.raises(AssertionError):  # verl's own, in a worker
        PPOTrainerSeparateAsync(composed("separate_async", override))
    with pytest.raises(ConfigError, match=message):
        get_trainer_cls("bridge_separate_async")(composed("separate_async", override))
    get_trainer_cls("bridge_sync")(composed("sync", override))
