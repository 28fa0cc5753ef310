"""What must hold before a run of verl-tool's starts: in the driver, by a Hydra callback, and again in the trainer."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_bridge.config import VerlBridgeConfig, load_settings
from verl_bridge.config.schema import AgentConfig, ConfigError
from verl_bridge.integrations.checks import check_policy_loss, named_estimator, read_probe, stop_unless, trains_adapter
from verl_bridge.integrations.verl_tool import AGENT_LOOP, ESTIMATOR, REWARD_MANAGER, TOOL

#: verl-tool's estimators that need more than rewards, mask and groups.
UNFIT_ESTIMATORS = ("remax", "mt_grpo")
SERVE = "`python -m verl_bridge.integrations.verl_tool.serve`"


class Preflight(Callback):
    """Hydra's ``on_job_start``: stop the run with a message when it cannot work."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        stop_unless(check_run, config)


def check_run(config: DictConfig) -> None:
    """Raises ConfigError for a setting or a probe that the run cannot work with."""
    settings = load_settings(config)
    base_estimator(config, settings)
    read_probe(settings.retriever.probe)


def base_estimator(config: DictConfig, settings: VerlBridgeConfig) -> str:
    """verl's name of the estimator that GCA builds on, for a config that the methods can work with.

    Raises:
        ConfigError: a setting they cannot work with; names the key, the value and the fix.
    """
    base = named_estimator(config, settings, set(ADV_ESTIMATOR_REGISTRY) - {ESTIMATOR})
    check_policy_loss(config, settings)
    found = (*_host(config), *_advantages(config, base), *_gca(settings, base), *_retriever(settings))
    for broken, reason in found:
        if broken:
            raise ConfigError(reason)
    _check_stop_tokens(config.actor_rollout_ref.agent.get("action_stop_tokens"))
    return base


def _host(config: DictConfig) -> list[tuple[bool, str]]:
    agent, rollout, key = config.actor_rollout_ref.agent, config.actor_rollout_ref.rollout, "actor_rollout_ref.agent"
    loop, side, manager = rollout.agent.default_agent_loop, agent.truncate_obs_side, config.reward_model.reward_manager
    url = agent.get("tool_server_url")
    return [
        (
            loop != AGENT_LOOP or not rollout.agent.get("agent_loop_config_path"),
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop} writes no search traces: add "
            "+verl_bridge=bridge_gca (or gca, bridge, baseline), which names ours and where it is",
        ),
        (
            rollout.mode != "async",
            f"actor_rollout_ref.rollout.mode={rollout.mode} uses no agent loop: set it to async",
        ),
        (not agent.enable_agent, f"{key}.enable_agent=false never calls the tool: set it true"),
        (not url, f"{key}.tool_server_url is not set: start {SERVE} and give its http://HOST:PORT/get_observation"),
        (
            side != "right",
            f"{key}.truncate_obs_side={side} keeps the end of an observation that is too long, without <information> "
            "and its first passages: set it to right, which keeps the head",
        ),
        (
            agent.get("retokenization", False),
            f"{key}.retokenization=true encodes the rollout anew, and its turns are at other tokens: set it false",
        ),
        (
            not agent.get("mask_observations", True),
            f"{key}.mask_observations=false trains the policy to write the passages itself: set it true",
        ),
        (
            not config.data.get("return_raw_chat", False),
            "data.return_raw_chat=false keeps the prompt from our agent loop, which reads the question there where a "
            "row has no other: set it true",
        ),
        (
            manager == "search_r1_qa_em",
            "reward_model.reward_manager=search_r1_qa_em reads the prompt's own <answer> as the rollout's (a gold of "
            f"'Beijing' scores 1.0 without any answer): set it to {REWARD_MANAGER}",
        ),
    ]


def _advantages(config: DictConfig, base: str) -> list[tuple[bool, str]]:
    asked, critic = config.algorithm.adv_estimator, config.critic.enable
    return [
        (
            base == "gae" and not (asked == "gae" if critic is None else critic),
            f"the estimator gae with algorithm.adv_estimator={asked} and critic.enable={critic}, by which verl-tool "
            "makes no critic for it: set algorithm.adv_estimator=gae and critic.enable=null",
        ),
        (
            config.algorithm.get("use_pf_ppo", False),
            "algorithm.use_pf_ppo=true draws the batch anew whenever advantages are computed, which our trainer does "
            "once more than verl-tool's: set it false",
        ),
    ]


def _gca(settings: VerlBridgeConfig, base: str) -> list[tuple[bool, str]]:
    gca = settings.gca
    found = [
        (
            base in UNFIT_ESTIMATORS,
            f"the estimator {base} needs more than verl-tool hands to GCA: choose another "
            "algorithm.adv_estimator or verl_bridge.gca.base_estimator",
        ),
        (
            gca.salience != "uniform",
            f"verl_bridge.gca.salience={gca.salience}: verl-tool's workers hand on no token statistics; set "
            "verl_bridge.gca.salience=uniform",
        ),
        (
            gca.yes_no == "drop",
            "verl_bridge.gca.yes_no=drop is for verl's own datasets: leave the questions out of your files, and set "
            "yes_no=gate",
        ),
    ]
    return found if gca.enable else []


def _retriever(settings: VerlBridgeConfig) -> list[tuple[bool, str]]:
    bridge, retriever = settings.bridge, settings.retriever
    needs = {
        "verl_bridge.bridge.enable=true": trains_adapter(settings),
        "verl_bridge.gca.oracle_query=true": settings.gca.enable and settings.gca.oracle_query,
        "verl_bridge.retriever.probe": retriever.probe is not None,
    }
    needing = next((name for name, holds in needs.items() if holds), None)
    found = [
        (
            needing is not None and retriever.url is None,
            f"{needing} without verl_bridge.retriever.url: the tool server is a process of its own, so both must ask "
            "a third; start `verl-bridge serve` and name it here and in the tool server's VERL_BRIDGE_RETRIEVER_URL",
        ),
        (
            retriever.query_input != "query",
            f"verl_bridge.retriever.query_input={retriever.query_input}: the tool server searches only for the "
            "query; set it to query",
        ),
        (
            settings.agent != AgentConfig(),
            "verl_bridge.agent is for verl's own loop: leave it out, and set actor_rollout_ref.agent.max_turns and "
            "max_obs_length",
        ),
    ]
    if bridge.enable:
        found += [
            (
                bridge.schedule not in ("bridge", "frozen"),
                f"verl_bridge.bridge.schedule={bridge.schedule} needs verl's own trainer: set it to bridge or frozen",
            ),
            (
                bridge.estimator == "two_state",
                "verl_bridge.bridge.estimator=two_state needs verl's own trainer: set it to bridge or drop",
            ),
            (
                bridge.micro_batch_tokens is not None,
                f"verl_bridge.bridge.micro_batch_tokens={bridge.micro_batch_tokens}: verl-tool's workers go only "
                "by actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu; set that, and this to null",
            ),
            *(
                (
                    trains_adapter(settings) and getattr(retriever, name) is None,
                    f"verl_bridge.retriever.{name} is not set: give its path (the learner reads it, also where "
                    "servers answer the searches)",
                )
                for name in ("index", "corpus")
            ),
        ]
    return found


def _check_stop_tokens(path: str | None) -> None:
    """Raises ConfigError unless verl-tool's file of stop texts ends a turn at a search."""
    key = f"actor_rollout_ref.agent.action_stop_tokens={path}"
    if path is None or not Path(path).is_file():
        raise ConfigError(f"{key} is not a file: write '</search>,</answer>' into one and give its path")
    tokens = [token.strip() for token in Path(path).read_text(encoding="utf-8").split(",")]
    if not {"</search>", "</answer>"} <= set(tokens):
        raise ConfigError(f"{key} holds {tokens}: it needs </search> and </answer>, separated by a comma")


def check_tool_server(url: str, *, shown: int, versions: Collection[int] | None = None, timeout: float = 60.0) -> None:
    """Makes one real search through the tool server: it starts healthy without our tool, and without a retriever.

    Args:
        url: its ``/get_observation``.
        shown: ``verl_bridge.retriever.shown``.
        versions: adapter versions the learner knows; None where nothing learns.
        timeout: seconds.

    Raises:
        ConfigError: it does not answer, without our tool, without a retriever, or from another one than the trainer's.
    """
    trajectory, key = "verl_bridge-check", f"actor_rollout_ref.agent.tool_server_url={url!r}"

    def ask(action: str, finish: bool) -> Any:
        body = {"trajectory_ids": [trajectory], "actions": [action], "finish": [finish], "is_last_step": [finish]}
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=timeout
        ) as r:
            return json.load(r)["observations"][0]

    try:
        told = ask("<search>capital of a country</search>", False)
        ask("", True)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{key} gives no observation ({error}): start {SERVE}, and end the url in /get_observation"
        ) from None
    if not isinstance(told, dict) or "status" not in told:
        raise ConfigError(
            f"{key} answers without the tool {TOOL}: a tool server starts healthy without a tool it does not know; "
            f"start it by {SERVE}"
        )
    if told["status"] != "ok":
        raise ConfigError(f"{key} cannot search: {told.get('error')}; see VERL_BRIDGE_RETRIEVER_URL where it runs")
    if told["shown"] != min(shown, len(told["ids"])):
        raise ConfigError(
            f"{key} shows {told['shown']} passages, verl_bridge.retriever.shown is {shown}: set VERL_BRIDGE_SHOWN "
            "where it runs"
        )
    if versions is not None and told["adapter_version"] not in versions:
        raise ConfigError(
            f"{key} serves adapter version {told['adapter_version']}, the learner has {sorted(versions)}: let the tool "
            "server's VERL_BRIDGE_RETRIEVER_URL be verl_bridge.retriever.url"
        )
