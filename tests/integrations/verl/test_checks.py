"""What is refused before a run, and what verl sees of an accepted config."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from verl_bridge.config import load_settings
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.checks import check_gold_answers
from verl_bridge.integrations.verl.checks import prepare_config

PATHS = {"encoder": "e", "index": "i", "corpus": "c"}
ON = {"enable": True}


def config(
    estimator="grpo",
    gca=None,
    loss="vanilla",
    loop="verl_bridge_search",
    retriever=PATHS,
    mode="bridge_sync",
    use_v1=True,
    bridge=None,
    fused=False,
    bypass=False,
    strategy="fsdp2",
    dataset=None,
    actor=None,
    distillation=False,
):
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": estimator, "rollout_correction": {"bypass_mode": bypass}},
            "data": {"custom_cls": {"path": dataset, "name": None}},
            "trainer": {"use_v1": use_v1, "v1": {"trainer_mode": mode}},
            "actor_rollout_ref": {
                "model": {"use_fused_kernels": fused},
                "actor": {"policy_loss": {"loss_mode": loss}, "strategy": strategy, **(actor or {})},
                "rollout": {"agent": {"default_agent_loop": loop}},
            },
            "distillation": {"enabled": distillation},
            "verl_bridge": {"gca": gca or {}, "bridge": bridge or {}, "retriever": retriever},
        }
    )


def prepared(**kwargs):
    made = config(**kwargs)
    return made, prepare_config(made, load_settings(made), "sync")


@pytest.mark.parametrize(
    ("estimator", "gca", "base"),
    [
        ("grpo", {}, "grpo"),
        ("gae", {"enable": True}, "gae"),
        ("gca", {}, "grpo"),
        ("gca", {"enable": True}, "grpo"),
        ("gca", {"enable": True, "base_estimator": "rloo"}, "rloo"),
    ],
)
def test_verl_sees_its_own_names(estimator, gca, base):
    made, found = prepared(estimator=estimator, gca=gca)
    assert (found, made.algorithm.adv_estimator, made.trainer.v1.trainer_mode) == (base, base, "sync")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"retriever": {**PATHS, "index": None}}, "verl_bridge.retriever.index is not set.*index build"),
        ({"retriever": {"index": "i"}}, "verl_bridge.retriever.corpus is not set"),
        (
            {"retriever": {"url": "http://a:1", "index": "i"}, "bridge": ON},
            r"verl_bridge.retriever.corpus is not set.*the learner reads it, also where servers answer",
        ),
        (
            {"gca": {"enable": True, "base_estimator": "gca"}},
            "base_estimator='gca' is not an advantage estimator of verl's.*grpo",
        ),
        ({"gca": {"enable": True}, "loss": "clip_cov"}, "loss_mode=clip_cov.*vanilla or gspo"),
        ({"estimator": "grop"}, "algorithm.adv_estimator='grop' is not an advantage estimator"),
        ({"gca": {"base_estimator": "rloo"}}, "base_estimator='rloo' with verl_bridge.gca.enable=false"),
        ({"mode": "sync"}, "trainer_mode=sync is verl's own trainer: set it to bridge_sync"),
        ({"mode": "colocate_async"}, "trainer_mode=colocate_async is verl's own .*set it to bridge_colocate_async"),
        ({"mode": "separate_async"}, "trainer_mode=separate_async is verl's own .*set it to bridge_separate_async"),
        ({"gca": {"enable": True}, "fused": True}, "use_fused_kernels=true makes no logits.*salience=uniform"),
        ({"gca": {"enable": True}, "bypass": True}, "bypass_mode=true skips the pass.*salience=uniform"),
        ({"gca": {"enable": True}, "strategy": "megatron"}, "strategy=megatron has no hook.*salience=uniform"),
        (
            {"gca": {"enable": True, "yes_no": "drop"}, "dataset": "mine.py"},
            "yes_no=drop with data.custom_cls.path='mine.py'.*yes_no: gate",
        ),
        ({"use_v1": False}, "trainer.use_v1=false.*trainer.use_v1=true"),
        ({"loop": "tool_agent"}, "default_agent_loop=tool_agent.*verl_bridge_search"),
    ],
)
def test_refusals_name_key_value_and_fix(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        prepared(**kwargs)


@pytest.mark.parametrize(("path", "taken"), [(None, True), ("no_such_tools.yaml", False)])
def test_the_loop_for_function_calls_has_its_tools_checked(path, taken):
    made = config(loop="verl_bridge_tool_agent")
    made.actor_rollout_ref.rollout.multi_turn = {"tool_config_path": path, "function_tool_path": None}
    if taken:
        assert prepare_config(made, load_settings(made), "sync") == "grpo"
    else:
        with pytest.raises(ConfigError, match=r"multi_turn.tool_config_path=no_such_tools.yaml gives no tools"):
            prepare_config(made, load_settings(made), "sync")


TWO = {**ON, "estimator": "two_state"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"bridge": {**ON, "schedule": "joint", "estimator": "drop"}},
            r"bridge\.schedule=joint with verl_bridge\.bridge\.estimator=drop.*one of the two to bridge",
        ),
        (
            {"bridge": {**ON, "schedule_steps": 3}},
            r"schedule_steps=3 with schedule=bridge, .*rag_then_rl or rl_then_rag",
        ),
        ({"bridge": {**TWO, "interval": 2}}, r"bridge\.interval=2 with .*estimator=two_state.*set interval=1"),
        ({"bridge": TWO, "loss": "gspo"}, r"policy_loss\.loss_mode=gspo with .*two_state.*use vanilla, or set"),
        (
            {"bridge": TWO, "actor": {"loss_agg_mode": "token-sum"}},
            "actor.loss_agg_mode=token-sum with .*use token-mean or seq-mean-token-sum or seq-mean-token-mean, or set",
        ),
        ({"bridge": TWO, "actor": {"use_kl_loss": True}}, "actor.use_kl_loss=true with .*set it false, or set"),
        ({"bridge": TWO, "actor": {"entropy_coeff": 0.01}}, "actor.entropy_coeff=0.01 with .*set it to 0, or set"),
        ({"bridge": TWO, "actor": {"shuffle": True}}, "actor.shuffle=true with .*set it false, or set"),
        ({"bridge": TWO, "distillation": True}, "distillation.enabled=true with .*set it false, or set estimator"),
    ],
)
def test_schedules_and_estimators_that_cannot_be(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        prepared(**kwargs)
    # what does not learn is not looked at
    assert prepared(**{**kwargs, "bridge": {**kwargs["bridge"], "enable": False}})[1] == "grpo"


@pytest.mark.parametrize(
    "bridge",
    [
        {"schedule": "rag_then_rl", "schedule_steps": 3},
        {"schedule": "joint", "interval": 2},
        {"estimator": "drop", "interval": 2},
        {"estimator": "two_state"},
    ],
)
def test_schedules_and_estimators_that_can(bridge):
    losses = {"loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": False, "entropy_coeff": 0.0, "ppo_epochs": 2}
    assert prepared(bridge={**ON, **bridge}, actor=losses)[1] == "grpo"


def test_servers_alone_need_no_files_and_an_index_names_its_encoder():
    assert prepared(retriever={"url": "http://a:1"})[1] == "grpo"
    assert prepared(retriever={"url": "http://a:1"}, bridge={**ON, "schedule": "frozen"})[1] == "grpo"
    assert prepared(retriever={**PATHS, "encoder": None}, bridge=ON)[1] == "grpo"


def test_other_losses_are_fine_without_gca():
    assert prepared(loss="clip_cov")[1] == "grpo"


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"bypass": True}, {"strategy": "megatron"}])
def test_uniform_salience_needs_no_logits(kwargs):
    assert prepared(gca={"enable": True, "salience": "uniform"}, **kwargs)[1] == "grpo"
    assert prepared(**kwargs)[1] == "grpo"


def test_dropping_yes_no_questions_names_our_dataset_class():
    from verl.utils.import_utils import load_extern_object

    from verl_bridge.integrations.verl.dataset import WithoutYesNo

    made, _ = prepared(gca={"enable": True, "yes_no": "drop"})
    assert load_extern_object(made.data.custom_cls.path, made.data.custom_cls.name) is WithoutYesNo
    assert prepared(gca={"enable": True})[0].data.custom_cls.path is None


def test_the_estimators_name_is_the_same_switch():
    assert load_settings(config(estimator="gca")).gca.enable and not load_settings(config()).gca.enable


def row(target):
    return {"reward_model": {"ground_truth": {"target": target}}}


def test_rows_with_gold_answers_pass():
    """`data check` and the agent loops read verl's column, so another one neither stops nor saves a run."""
    for other in ([], [" "], ["Cusco"], None):
        check_gold_answers("data.train_files", [{**row(["Lima"]), "golden_answers": other}])
    check_gold_answers("data.train_files", [row(["Lima"]), row("Lima"), {"reward_model": {"ground_truth": "Lima"}}])


@pytest.mark.parametrize(
    "bad",
    [
        row([]),
        row(None),
        row([" "]),
        row(["", "x"]),
        row(""),
        row([1914]),
        {"reward_model": None},
        {},
        {"golden_answers": ["Lima"]},
    ],
)
def test_the_first_row_without_gold_answers_is_named(bad):
    with pytest.raises(ConfigError, match=r"data.val_files: row 2 has gold answers .*target"):
        check_gold_answers("data.val_files", [row(["Lima"]), bad, row(["x"])])
