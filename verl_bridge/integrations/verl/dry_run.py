"""``verl-bridge train --dry-run``: a run up to the point where workers would start, and what it comes to.

The arguments are those of ``python -m verl.trainer.main_ppo``. The config is composed by Hydra over verl's, checked by
the typed schema, by our preflight and by verl's own validation. Files and servers that are not there are listed, not
refused, so that a recipe can be looked at where its data is not.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import ConfigError
from verl_bridge.config.search_r1 import replaced
from verl_bridge.evaluation.estimate import Work, estimate, policy_size
from verl_bridge.integrations.checks import trains_adapter
from verl_bridge.integrations.verl import preflight
from verl_bridge.integrations.verl.checks import needs_files
from verl_bridge.retrieval.encoder import is_hub_name


@dataclass(frozen=True)
class DryRun:
    """What a run would be: ``figures`` by name, for reading, and the files and servers that are ``missing``."""

    figures: dict[str, str]
    missing: list[str]

    def table(self) -> str:
        """All of it as aligned lines."""
        lines = [f"{name:<12} {said}" for name, said in self.figures.items()]
        return "\n".join([*lines, *(f"MISSING      {what}" for what in self.missing)])


def main(arguments: Sequence[str]) -> int:
    """Prints what the run would be. Exit code: 0, 1 when files or servers are missing, 2 when it would be refused."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = examine(compose_run(arguments))
    except (ValueError, OSError, AssertionError, HydraException, OmegaConfBaseException) as error:
        print(f"verl_bridge: {error}", file=sys.stderr)
        for hint in replaced(list(arguments)):
            print(f"Search-R1's key {hint}", file=sys.stderr)
        return 2
    print(found.table())
    return 1 if found.missing else 0


def compose_run(arguments: Sequence[str]) -> DictConfig:
    """The config that ``main_ppo`` would train with, from its command line.

    Raises:
        ValueError: an option besides ``--config-name`` and ``--config-dir``, or a folder that does not exist.
        hydra.errors.HydraException: what Hydra refuses.
    """
    import verl  # noqa: F401  its import loads our plugin, which adds the config group
    from hydra import compose, initialize_config_dir, initialize_config_module

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    parser.add_argument("--config-dir", "-cd", type=Path)
    options, overrides = parser.parse_known_args(arguments)
    odd = [override for override in overrides if override.startswith("-")]
    if odd:
        raise ValueError(f"{odd[0]}: a dry run takes overrides, --config-name and --config-dir; leave it out")
    start, elsewhere = partial(initialize_config_module, "verl.trainer.config"), []
    if options.config_dir is not None:
        folder = options.config_dir.resolve()
        if not folder.is_dir():
            raise ValueError(f"--config-dir {options.config_dir} does not exist: give the folder of the recipe")
        elsewhere = [f"file://{folder}"]
        # Hydra looks for the primary config before it reads hydra.searchpath, so its folder comes first.
        if (folder / f"{options.config_name}.yaml").is_file():
            start, elsewhere = partial(initialize_config_dir, str(folder)), ["pkg://verl.trainer.config"]
    search = [f"hydra.searchpath={elsewhere!r}"] if elsewhere else []
    with start(version_base=None):
        return compose(options.config_name, [*overrides, *search])


def examine(config: DictConfig) -> DryRun:
    """Checks a composed config as a run would, and says what it comes to.

    Raises:
        ConfigError: what our checks refuse (a file that exists and cannot be used, too).
        ValueError, AssertionError, hydra.errors.HydraException: what verl refuses.
    """
    settings, prepared = None, config
    if config.get("verl_bridge") is not None:
        settings, prepared = preflight.check_settings(config)
    _check_by_verl(config, prepared)
    missing = list(_missing_files(config, settings))
    if settings is not None:
        if not any(what.startswith("verl_bridge.retriever.") for what in missing):
            built = preflight.check_files(settings.retriever) if needs_files(settings) else None
            preflight.check_probe(settings.retriever)
            if settings.retriever.url is not None:
                missing += _absent(lambda: preflight.check_servers(settings.retriever, built))
        for key, file in preflight.data_files(config):
            if file.is_file():
                preflight.check_rows(key, file)
    return DryRun(_figures(config, settings), missing)


def _check_by_verl(config: DictConfig, prepared: DictConfig) -> None:
    """What ``main_ppo`` and its task runner check before they make workers, and what stops a worker at once."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    get_trainer_cls(config.trainer.v1.trainer_mode)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # verl says that all is well
        warnings.simplefilter("ignore")
        critic = need_critic(prepared)
        validate_config(prepared, use_reference_policy=need_reference_policy(prepared), use_critic=critic)
        omega_conf_to_dataclass(prepared.actor_rollout_ref.rollout)
    policy = prepared.actor_rollout_ref
    for key in ("actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size"):
        if not policy.actor.use_dynamic_bsz and OmegaConf.select(policy, f"{key}_per_gpu") is None:
            raise ConfigError(
                f"actor_rollout_ref.{key}_per_gpu is not set, and verl's workers do not go by {key}: set it, or "
                "actor_rollout_ref.actor.use_dynamic_bsz=true"
            )


def _absent(check: Callable[[], Any]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []


def _missing_files(config: DictConfig, settings: VerlBridgeConfig | None) -> Iterator[str]:
    for key, file in preflight.data_files(config):
        if not file.is_file():
            yield f"{key}={str(file)!r}"
    model = str(config.actor_rollout_ref.model.path)
    if "://" not in model and not Path(model).expanduser().is_dir() and not is_hub_name(model):
        yield f"actor_rollout_ref.model.path={model!r}"
    if settings is None:
        return
    retriever = settings.retriever
    for name in ("corpus", "index") if needs_files(settings) else ():
        if not Path(getattr(retriever, name)).exists():
            yield f"verl_bridge.retriever.{name}={getattr(retriever, name)!r}"
    for name in ("encoder", "probe"):
        path = getattr(retriever, name)
        if path is not None and not Path(path).exists() and not (name == "encoder" and is_hub_name(path)):
            yield f"verl_bridge.retriever.{name}={path!r}"


def _figures(config: DictConfig, settings: VerlBridgeConfig | None) -> dict[str, str]:
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    trainer, batch = config.trainer, config.data.train_batch_size
    steps = trainer.total_training_steps
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    kl = f"KL loss {actor.kl_loss_coef:g} ({actor.kl_loss_type})" if actor.use_kl_loss else "no KL loss"
    figures = {
        "policy": f"{config.actor_rollout_ref.model.path}, {trainer.nnodes} × {trainer.n_gpus_per_node} GPUs",
        "estimator": f"{config.algorithm.adv_estimator}, {actor.policy_loss.loss_mode} loss, {kl}",
        "rate": f"{actor.optim.lr:g}, warm-up over {actor.optim.lr_warmup_steps_ratio:g} of the steps",
        "batch": f"{batch} questions × {rollout.n} rollouts = {batch * rollout.n}; "
        f"{max(1, batch // actor.ppo_mini_batch_size)} policy updates per step",
        "steps": "by trainer.total_epochs" if steps is None else f"{steps} ({steps * batch} questions)",
        "tokens": f"prompt {data.max_prompt_length} + response {data.max_response_length}",
        "trainer": f"trainer.v1.trainer_mode={trainer.v1.trainer_mode}",
    }
    if settings is not None:
        gca, bridge, retriever, agent = settings.gca, settings.bridge, settings.retriever, settings.agent
        turn = "of any length" if agent.turn_tokens is None else f"of at most {agent.turn_tokens} tokens"
        figures["agent"] = (
            f"at most {agent.max_turns} turns {turn}, observations of {agent.observation_tokens}; "
            f"{retriever.shown} of {retriever.top_k} candidates shown"
        )
        figures["GCA"] = f"ρ {gca.rho}, κ {gca.kappa}, salience {gca.salience}" if gca.enable else "off"
        figures["BRIDGE"] = (
            f"γ {bridge.gamma}, lr {bridge.lr:g}, every {bridge.interval} steps, rank {retriever.lora_rank}, "
            f"likelihood after the {bridge.likelihood_context}"
            if trains_adapter(settings)
            else f"schedule {bridge.schedule}: no retriever learns"
            if bridge.enable
            else "off"
        )
    figures["estimate"] = _estimate(config, settings, gpus)
    return figures


def _estimate(config: DictConfig, settings: VerlBridgeConfig | None, gpus: int) -> str:
    size = policy_size(str(config.actor_rollout_ref.model.path))
    if size is None:
        return "none: the size of this policy is not known (verl_bridge.evaluation.estimate)"
    try:
        work = Work.of_config(config, settings)
    except ValueError as error:
        return f"none: {error}"
    return estimate(size, work, gpus=gpus).sentence(whole=config.trainer.total_training_steps is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
