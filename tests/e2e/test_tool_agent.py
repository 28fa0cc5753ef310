"""One step of both methods through verl's own ``tool_agent`` loop, searches made as function calls."""

from __future__ import annotations

import pytest

# The template frames a tool's message as the policy knows it; a model for function calls brings its own.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '\\n\\n<information>' + m['content'] + '</information>\\n\\n' }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
OVERRIDES = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=verl_bridge_tool_agent",
    "actor_rollout_ref.rollout.multi_turn.format=search_tags",
    f'actor_rollout_ref.model.custom_chat_template="{TEMPLATE}"',
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)


@pytest.fixture(scope="module")
def run(start):
    patch = pytest.MonkeyPatch()
    patch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.e2e.probe_trainer,tests.e2e.probe_parser")
    yield start("tool_agent", "bridge_gca", 1, *OVERRIDES)
    patch.undo()


def test_spans_are_the_sampled_tokens_and_searches_are_recorded(run):
    record = run.steps[1]
    assert record["rows"] == 16 and record["spans_fit"] and record["mask_is_spans"]
    assert record["versions"] == [0]
    searches = [turn for trace in run.traces(1) for turn in trace.searches]
    made = [turn for turn in searches if turn.status == "ok"]
    assert made and not any(turn.status == "error" for turn in searches)
    assert all(turn.shown == 3 and len(turn.candidate_ids) == 10 for turn in made)
    assert all(turn.observation.startswith("Doc 1(Title: ") for turn in made if turn.observation_span)
    assert any(turn.observation_span for turn in made)
    assert all(len(trace.turns) <= 5 for trace in run.traces(1))


def test_both_methods_learn_from_them(run):
    record, data = run.steps[1], run.metrics[1]
    assert record["actor_receives_it"] and record["reference_differs"] < 1e-6
    assert record["grounding_moves"] > 0.01 and data["gca/residual_mean"] > 0
    assert data["bridge/plan/turns_used"] > 0 and record["version_after"] == 1
    assert all(value.norm() > 0 for name, value in run.adapter().items() if "lora_B" in name)


def test_rewards_are_those_of_the_traces(run):
    """The embedded policy answers most questions in well-formed tags, so a reward of 0 everywhere is a broken loop."""
    answered = [trace for trace in run.traces(1) if trace.answer is not None]
    assert len(answered) > 8 and run.metrics[1]["critic/score/mean"] > 0
    assert run.metrics[1]["search/answered_share"] == pytest.approx(len(answered) / 16)
    assert run.metrics[1]["training/rollout_probs_diff_max"] < 1e-4
