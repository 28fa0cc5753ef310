"""recipes/: each composes over the installed verl, is accepted by verl and by us, and has its paper's numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from verl_bridge.config import load_settings
from verl_bridge.evaluation.estimate import Work, policy_size, table
from verl_bridge.integrations.verl.dry_run import compose_run, examine
from verl_bridge.retrieval.families import FAMILIES

RECIPES = Path(__file__).parents[2] / "recipes"
README = (RECIPES / "README.md").read_text()
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@cache
def composed(name, *overrides):
    """The recipe as Hydra puts it together for main_ppo."""
    return compose_run(["--config-dir", str(RECIPES), "--config-name", name, *overrides])


def handed(script, folder, *arguments):
    """The module that a launch script runs, and the overrides it hands to it."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    run = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=True)
    module, *overrides = run.stdout.removesuffix("\0").split("\0")[1:]
    return module, dict(override.split("=", 1) for override in overrides)


def paper_values():
    """(recipe, key, value) of each cell of the README's table."""
    section = README[README.index("## Paper value → key") :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    header = rows[0]
    width = next(number for number, row in enumerate(rows) if len(row) != len(header))
    return [
        (recipe, row[1].strip("`"), yaml.safe_load(re.sub(r"^(\d+)e-", r"\1.0e-", value)))
        for row in rows[2:width]
        for recipe, value in zip(header[2:], row[2:], strict=True)
        if value != "–"
    ]


def test_every_recipe_is_in_the_table():
    assert {recipe for recipe, _, _ in paper_values()} == set(NAMES) and len(paper_values()) > 90
    assert all(f"| `{name}`" in README or f", `{name}`" in README for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers(name, monkeypatch):
    for variable in ("MODEL", "ENCODER"):
        monkeypatch.delenv(variable, raising=False)
    config = composed(name)
    for recipe, key, value in paper_values():
        if recipe == name:
            assert OmegaConf.select(config, key, throw_on_missing=True) == value, key


@pytest.mark.parametrize("name", NAMES)
def test_it_is_accepted_up_to_its_workers(name):
    """Nothing is wrong with it but that its files are not here."""
    found = examine(composed(name))
    assert [what.split("=")[0] for what in found.missing] == [
        "data.train_files",
        "data.val_files",
        "verl_bridge.retriever.corpus",
        "verl_bridge.retriever.index",
    ]
    assert found.figures["trainer"] == "trainer.v1.trainer_mode=bridge_sync"
    assert " h in all" in found.figures["estimate"]


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_turns_fit_a_micro_batch(name):
    config, agent = composed(name), load_settings(composed(name)).agent
    longest = config.data.max_prompt_length + config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    assert actor.ppo_max_token_len_per_gpu >= longest
    # five turns of reasoning and four observations have room
    rollout = agent.max_turns * (agent.turn_tokens or 500) + (agent.max_turns - 1) * agent.observation_tokens
    assert config.data.max_response_length >= rollout
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    family = FAMILIES[config.verl_bridge.retriever.family]
    assert (family.query_prefix, family.passage_prefix) == ("query: ", "passage: ")


def flat(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    ("name", "baseline", "differ"),
    [
        ("bridge_qwen2.5-3b", "vt_search_qwen2.5-3b", {"verl_bridge.bridge.enable"}),
        ("bridge_qwen2.5-7b", "bridge_qwen2.5-3b", {"actor_rollout_ref.model.path"}),
        (
            "gca_qwen2.5-3b",
            "search_r1_qwen2.5-3b",
            {"verl_bridge.gca.enable", "actor_rollout_ref.actor.kl_loss_coef"},
        ),
    ],
)
def test_a_method_and_its_baseline_differ_in_nothing_else(name, baseline, differ):
    ours, theirs = (dict(flat(OmegaConf.to_container(composed(which)))) for which in (name, baseline))
    assert ours.keys() == theirs.keys()
    assert {key for key in ours if ours[key] != theirs[key]} - {"trainer.experiment_name"} == differ


def test_the_policys_fragment_knows_nothing_of_us():
    """grpo.yaml is a recipe of verl's own, but for the trainer's name."""
    plain = yaml.safe_load((RECIPES / "fragments/grpo.yaml").read_text())
    assert "verl_bridge" not in plain and plain["trainer"].pop("v1") == {"trainer_mode": "bridge_sync"}
    assert not [value for _, value in flat(plain) if "bridge" in str(value) and value != "verl_bridge"]


def test_another_arm_is_one_override():
    settings = load_settings(composed("bridge_gca_qwen2.5-3b", "verl_bridge=gca"))
    assert settings.gca.enable and not settings.bridge.enable
    assert settings.retriever.encoder == "intfloat/e5-base-v2"


def test_run_sh_composes_the_same_and_passes_dry_run_on():
    """The script on its own, from another folder: what Hydra prints is what the tests above looked at."""
    run = subprocess.run(
        [RECIPES / "run.sh", "gca_qwen2.5-3b", "--cfg", "job"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert run.returncode == 0, run.stderr
    assert OmegaConf.create(run.stdout[run.stdout.index("model_engine:") :]) == composed("gca_qwen2.5-3b")
    script = (RECIPES / "run.sh").read_text()
    assert "verl_bridge.cli train" in script and '"${@:2}"' in script


def test_the_retriever_is_set_up_for_all_of_wikipedia_as_the_readme_says():
    for name in NAMES:
        retriever = load_settings(composed(name)).retriever
        assert f"`threads: {retriever.threads}`" in README and retriever.threads > 1
        assert f"`load_timeout: {retriever.load_timeout:.0f}`" in README and retriever.load_timeout > 300
        assert f"`deadline: {retriever.deadline:.0f}`" in README and retriever.deadline > 30


def test_recipes_and_the_search_r1_example_look_for_the_same_files(monkeypatch, tmp_path):
    for variable in ("DATA_DIR", "CORPUS", "INDEX", "ASSETS"):
        monkeypatch.delenv(variable, raising=False)
    files = ["data.train_files", "data.val_files", "verl_bridge.retriever.corpus", "verl_bridge.retriever.index"]
    example = handed(RECIPES.parent / "examples/search_r1/after.sh", tmp_path)[1]
    verl_tool = handed(RECIPES / "verl_tool.sh", tmp_path, "bridge")[1]
    for name in NAMES:
        ours = [OmegaConf.select(composed(name), key) for key in files]
        assert ours == [example[key] for key in files] == [verl_tool[key] for key in files]
        assert all(f"`{file}`" in README for file in ours[2:])


def test_without_flash_attention_by_the_overrides_of_the_readme():
    (line,) = (line.split() for line in README.splitlines() if "attn_implementation" in line)
    config = composed("bridge_gca_qwen2.5-3b", *line[2:])
    assert examine(config).figures["trainer"] == "trainer.v1.trainer_mode=bridge_sync"
    model = config.actor_rollout_ref.model
    assert model.use_remove_padding is False and model.override_config.attn_implementation == "sdpa"


def test_the_table_of_estimates_is_the_formulas():
    """Missing? Then this is what it should be; paste it."""
    runs = []
    for name, label, *overrides in (
        ("bridge_qwen2.5-3b", "`bridge_qwen2.5-3b`"),
        (
            "bridge_qwen2.5-3b",
            "the same, `likelihood_context=prefix`",
            "verl_bridge.bridge.likelihood_context=prefix",
        ),
        ("bridge_qwen2.5-7b", "`bridge_qwen2.5-7b`"),
        ("vt_search_qwen2.5-3b", "`vt_search_qwen2.5-3b`"),
        ("vt_search_qwen2.5-3b", "the same, 16 rollouts", "actor_rollout_ref.rollout.n=16"),
        ("gca_qwen2.5-3b", "`gca_qwen2.5-3b`"),
        ("search_r1_qwen2.5-3b", "`search_r1_qwen2.5-3b`"),
        ("bridge_gca_qwen2.5-3b", "`bridge_gca_qwen2.5-3b`"),
        ("gca_qwen3-30b-a3b", "`gca_qwen3-30b-a3b`"),
        (
            "gca_qwen3-30b-a3b",
            "the same, `fsdp_config.offload_policy=true`",
            "actor_rollout_ref.actor.fsdp_config.offload_policy=true",
        ),
    ):
        config = composed(name, *overrides)
        size = policy_size(config.actor_rollout_ref.model.path)
        runs.append((label, size, Work.of_config(config, load_settings(config))))
    made = table(runs, gpus=4)
    assert made in README, made


@pytest.fixture
def verl_tool_arguments(tmp_path, monkeypatch):
    """What verl_tool.sh hands to verl-tool's main_ppo."""
    for variable in ("MODEL", "ENCODER"):
        monkeypatch.delenv(variable, raising=False)
    module, arguments = handed(RECIPES / "verl_tool.sh", tmp_path, "bridge", "data.seed=1")
    assert module == "verl_bridge.integrations.verl_tool.main_ppo" and list(arguments)[-1] == "data.seed"
    return arguments


def test_on_verl_tool_the_papers_numbers_are_those_of_the_table(verl_tool_arguments):
    section = README[README.index("| paper value | verl-tool's key |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    said = {key.strip("`"): value for _, key, value in rows}
    for key, value in said.items():
        given = verl_tool_arguments[key]
        assert given == value or float(given) == float(value), key
    # nothing that the other table has for BRIDGE is left out
    renamed = {"reward.custom_reward_function.reward_kwargs.format_weight": "+reward_model.reward_kwargs.format_weight"}
    renamed |= {"verl_bridge.agent.max_turns": "actor_rollout_ref.agent.max_turns"}
    renamed |= {"verl_bridge.bridge.enable": "+verl_bridge"}
    both = {key for recipe, key, _ in paper_values() if recipe == "bridge_qwen2.5-3b"}
    by_the_arm = {"verl_bridge.gca.enable", "actor_rollout_ref.actor.policy_loss.loss_mode"}  # defaults there
    assert set(said) == {renamed.get(key, key) for key in both - by_the_arm}


def test_on_verl_tool_the_numbers_are_the_same(verl_tool_arguments):
    """verl-tool's key → the recipe's; its max_turns counts searches."""
    arguments = verl_tool_arguments
    assert arguments["+verl_bridge"] == "bridge" and arguments["actor_rollout_ref.agent.max_turns"] == "4"
    stop = Path(arguments["actor_rollout_ref.agent.action_stop_tokens"]).read_text()
    assert stop == "</search>,</answer>"
    config = composed("bridge_qwen2.5-3b")
    same = [
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "algorithm.adv_estimator",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.kl_loss_coef",
        "trainer.total_training_steps",
        "trainer.n_gpus_per_node",
        "verl_bridge.retriever.encoder",
        "verl_bridge.retriever.family",
        "verl_bridge.retriever.shown",
        "verl_bridge.retriever.top_k",
        "verl_bridge.retriever.lora_rank",
        "verl_bridge.bridge.gamma",
        "verl_bridge.bridge.lr",
        "verl_bridge.bridge.tau_retrieval",
        "verl_bridge.bridge.tau_posterior",
        "data.filter_overlong_prompts",
        "data.truncation",
    ]
    for key in same:
        value = OmegaConf.select(config, key)
        given = arguments[key]
        assert given == str(value) or float(given) == value, key
    settings = load_settings(config)
    assert float(arguments["+reward_model.reward_kwargs.format_weight"]) == 0
    assert float(arguments["actor_rollout_ref.agent.max_obs_length"]) == settings.agent.observation_tokens
