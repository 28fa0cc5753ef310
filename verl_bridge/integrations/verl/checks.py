"""What must hold before a run starts, and the config as verl has to see it. Every refusal names key, value and fix."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_bridge.bilevel.schedule import PHASED
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.checks import check_policy_loss, named_estimator, trains_adapter
from verl_bridge.integrations.verl.correction import LOSS_AGG_MODES
from verl_bridge.integrations.verl.retrieval_tool import check_tools
from verl_bridge.plugin import AGENT_LOOP, ESTIMATOR, TOOL_AGENT_LOOP, TRAINERS


def prepare_config(config: DictConfig, settings: VerlBridgeConfig, verl_mode: str) -> str:
    """Check ``config`` and turn it into one that verl's own ``verl_mode`` trainer understands; the base estimator.

    verl compares ``trainer_mode`` and ``adv_estimator`` with its own names in many places, so ours are replaced by the
    mode we extend and the estimator we build on.

    Raises:
        ConfigError: a setting the methods cannot work with.
    """
    for name in ("index", "corpus"):
        if needs_files(settings) and getattr(settings.retriever, name) is None:
            served = " (the learner reads it, also where servers answer the searches)" if settings.retriever.url else ""
            raise ConfigError(
                f"verl_bridge.retriever.{name} is not set: give its path{served} "
                "(`verl-bridge index build` makes an index from a corpus and an encoder)"
            )
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=false: the methods need verl's V1 trainer, set trainer.use_v1=true")
    mode = config.trainer.v1.trainer_mode
    if mode in TRAINERS:
        raise ConfigError(f"trainer.v1.trainer_mode={mode} is verl's own trainer: set it to {TRAINERS[mode]}")
    base = named_estimator(config, settings, set(ADV_ESTIMATOR_REGISTRY) - {ESTIMATOR})
    check_policy_loss(config, settings)
    if settings.gca.enable and settings.gca.salience != "uniform":
        _check_logits(config)
    if settings.gca.enable and settings.gca.yes_no == "drop":
        _drop_yes_no(config)
    if settings.bridge.enable:
        _check_schedule(settings)
        if settings.bridge.estimator == "two_state":
            _check_two_state(config)
    if verl_mode == "separate_async":
        _check_separate_async(config)
    default_loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if default_loop == TOOL_AGENT_LOOP:
        check_tools(config.actor_rollout_ref.rollout.multi_turn)
    elif default_loop != AGENT_LOOP:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={default_loop} writes no search traces: "
            f"set it to {AGENT_LOOP}, or to {TOOL_AGENT_LOOP} for a function-calling model"
        )
    with open_dict(config):
        config.trainer.v1.trainer_mode = verl_mode
        config.algorithm.adv_estimator = base
    return base


def _check_logits(config: DictConfig) -> None:
    """Raise ConfigError where the pass for old_log_probs shows no logits to our engine."""
    actor = config.actor_rollout_ref.actor
    reasons = (
        (
            config.actor_rollout_ref.model.get("use_fused_kernels", False),
            "actor_rollout_ref.model.use_fused_kernels=true makes no logits",
        ),
        (
            (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False),
            "algorithm.rollout_correction.bypass_mode=true skips the pass for old_log_probs",
        ),
        (
            actor.strategy not in ("fsdp", "fsdp2"),
            f"actor_rollout_ref.actor.strategy={actor.strategy} has no hook for the logits (fsdp and fsdp2 have)",
        ),
    )
    for broken, reason in reasons:
        if broken:
            raise ConfigError(
                f"{reason}, which verl_bridge.gca.salience=margin_entropy reads: change that, or set "
                "verl_bridge.gca.salience=uniform"
            )


def _check_separate_async(config: DictConfig) -> None:
    """Raise ConfigError for what verl asserts once its workers start; what is not filled in is verl's to name."""
    keys = (
        "data.train_batch_size",
        "trainer.v1.separate_async.parameter_sync_step",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
    )
    batch, updates, mini, nodes, backend = (OmegaConf.select(config, key) for key in keys)
    mode, host = TRAINERS["separate_async"], "on a CPU +verl_bridge_host=cpu_separate_async does"
    if None not in (batch, updates, mini) and batch != updates * mini:
        raise ConfigError(
            f"{keys[0]}={batch} with trainer.v1.trainer_mode={mode}, a step of which is {keys[1]}={updates} updates of "
            f"{keys[2]}={mini} prompts: set {keys[0]}={updates * mini}"
        )
    if nodes == 0:
        raise ConfigError(
            f"{keys[3]}=0 with trainer.v1.trainer_mode={mode}, whose rollout has devices of its own: set it to 1 or "
            f"more, and actor_rollout_ref.rollout.n_gpus_per_node ({host})"
        )
    if backend == "naive":
        raise ConfigError(
            f"{keys[4]}=naive with trainer.v1.trainer_mode={mode}: it reaches no other device; set nccl ({host} with "
            "ray_cpu)"
        )


def _check_schedule(settings: VerlBridgeConfig) -> None:
    """Raise ConfigError for settings of BRIDGE's schedule and estimator that exclude each other."""
    bridge = settings.bridge
    if bridge.schedule != "bridge" and bridge.estimator != "bridge":
        raise ConfigError(
            f"verl_bridge.bridge.schedule={bridge.schedule} with verl_bridge.bridge.estimator={bridge.estimator}: "
            "estimators differ only in schedule bridge; set one of the two to bridge"
        )
    if bridge.schedule_steps is not None and bridge.schedule not in PHASED:
        raise ConfigError(
            f"verl_bridge.bridge.schedule_steps={bridge.schedule_steps} with schedule={bridge.schedule}, which has one "
            f"phase: set it to null, or schedule to {' or '.join(PHASED)}"
        )
    if bridge.estimator == "two_state" and bridge.interval != 1:
        raise ConfigError(
            f"verl_bridge.bridge.interval={bridge.interval} with verl_bridge.bridge.estimator=two_state: every policy "
            "gradient is corrected by the retriever update before it; set interval=1"
        )


def _check_two_state(config: DictConfig) -> None:
    """Raise ConfigError where the correction's rows would get another gradient than the formula's."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    mode, entropy = actor.get("loss_agg_mode", "token-mean"), actor.get("entropy_coeff", 0)
    distilled = (config.get("distillation") or {}).get("enabled", False)
    reasons = (
        (loss != "vanilla", f"{key}.policy_loss.loss_mode={loss}", "has another gradient at ratio 1: use vanilla"),
        (
            mode not in LOSS_AGG_MODES,
            f"{key}.loss_agg_mode={mode}",
            f"gives a row no definite weight: use {' or '.join(LOSS_AGG_MODES)}",
        ),
        (actor.get("use_kl_loss", False), f"{key}.use_kl_loss=true", "would hold the answers back, too: set it false"),
        (entropy != 0, f"{key}.entropy_coeff={entropy}", "would spread the answers, too: set it to 0"),
        (actor.get("shuffle", False), f"{key}.shuffle=true", "mixes the mini-batches the rows are for: set it false"),
        (distilled, "distillation.enabled=true", "has a loss of its own: set it false"),
    )
    for broken, what, fix in reasons:
        if broken:
            raise ConfigError(
                f"{what} with verl_bridge.bridge.estimator=two_state, whose correction terms are rows of the policy "
                f"update: it {fix}, or set estimator=bridge"
            )


def _drop_yes_no(config: DictConfig) -> None:
    """Have verl read its datasets through ours, which leaves yes/no questions out of the training data."""
    with open_dict(config):
        custom = config.data.setdefault("custom_cls", {}) or {}
        if custom.get("path"):
            raise ConfigError(
                f"verl_bridge.gca.yes_no=drop with data.custom_cls.path={custom.get('path')!r}: the questions are left "
                "out by a dataset class of ours; leave them out of your own files or class, and set yes_no: gate"
            )
        config.data.custom_cls = {"path": "pkg://verl_bridge.integrations.verl.dataset", "name": "WithoutYesNo"}


def needs_files(settings: VerlBridgeConfig) -> bool:
    """Whether the job opens corpus and index itself: to serve them, or to learn."""
    return trains_adapter(settings) or settings.retriever.url is None
