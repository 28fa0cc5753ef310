"""Our engines in this process, against verl's own code over all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = ((5, 9), (3, 4), (8, 1), (2, 12), (4, 6), (1, 3))  # prompt and response


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture(scope="module")
def engines(host_config, process_group):
    """Our language-model engine, and one over the same weights that computes every logit with verl's code."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_bridge.integrations.verl.cpu.engine import CPULanguageModelEngine

    class FullEngine(CPULanguageModelEngine):
        forward_backward_batch = FSDPEngineWithLMHead.forward_backward_batch
        prepare_model_inputs = FSDPEngineWithLMHead.prepare_model_inputs
        prepare_model_outputs = FSDPEngineWithLMHead.prepare_model_outputs

    config = host_config().actor_rollout_ref
    actor = omega_conf_to_dataclass(config.actor)
    arguments = {
        "model_config": omega_conf_to_dataclass(config.model),
        "engine_config": actor.engine,
        "optimizer_config": actor.optim,
        "checkpoint_config": actor.checkpoint,
    }
    ours = EngineRegistry.new(model_type="language_model", backend="fsdp2", **arguments)
    assert type(ours) is CPULanguageModelEngine
    full = FullEngine(**arguments)
    for engine in (ours, full):
        engine.initialize()
    return ours, full


def batch_of(generator, temperature, mask_name, lengths=LENGTHS):
    """Prompts and responses of random ids; responses alternate sampled stretches and observations."""
    from verl.utils import tensordict_utils as tu

    ids, masks = [], []
    for prompt, response in lengths:
        ids.append(torch.randint(2, 64, (prompt + response,), generator=generator))
        masks.append((torch.arange(response) // 3 % 2 == 0).long())
    if mask_name == "loss_mask_over_the_sequence":
        masks = [torch.cat([torch.zeros(p, dtype=torch.long), m]) for (p, _), m in zip(lengths, masks, strict=True)]
    tensors = {"input_ids": jagged(ids), "position_ids": jagged([torch.arange(len(row)) for row in ids])}
    tensors["loss_mask"] = jagged(masks)
    flags = dict(
        use_dynamic_bsz=True,
        max_token_len_per_gpu=40,  # several micro-batches
        temperature=temperature,
        use_remove_padding=False,
        calculate_entropy=True,
        return_model_output=True,
    )
    return tu.get_tensordict(tensors, flags)


def loss_of(model_output, data, dp_group):
    """Linear in log-probs and entropies of the selected tokens, with weights that differ from token to token."""
    total = 0.0
    for log_probs, entropy, ids, mask in zip(
        model_output["log_probs"].unbind(),
        model_output["entropy"].unbind(),
        data["input_ids"].unbind(),
        data["loss_mask"].unbind(),
        strict=True,
    ):
        n = len(mask)
        weights = mask[-(n - 1) :] if n == len(ids) else mask  # a full-length mask never selects the first token
        where = slice(len(ids) - len(weights) - 1, len(ids) - 1)
        factors = weights * torch.cos(torch.arange(len(weights)))
        total = total + (factors * log_probs[where]).sum() + 0.3 * (factors * entropy[where]).sum()
    return total, {}


def run(engine, data, forward_only):
    with engine.eval_mode() if forward_only else engine.train_mode():
        engine.optimizer.zero_grad()
        output = engine.forward_backward_batch(data, loss_of, forward_only=forward_only)
        gradients = {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in engine.module.named_parameters()
            if parameter.grad is not None
        }
    return output, gradients


@pytest.mark.parametrize("rows", [5, 6])  # 6 are split by length, 5 as verl does
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mask_name", ["loss_mask_over_the_response", "loss_mask_over_the_sequence"])
def test_selected_logits_equal_all_logits(engines, temperature, mask_name, rows):
    outputs = []
    for engine in engines:
        data = batch_of(torch.Generator().manual_seed(3), temperature, mask_name, LENGTHS[:rows])
        outputs.append(run(engine, data, forward_only=False))
    (got, got_gradients), (expected, expected_gradients) = outputs
    assert sum(got["loss"]) == pytest.approx(sum(expected["loss"]), rel=1e-5)
    data = batch_of(torch.Generator().manual_seed(3), temperature, mask_name, LENGTHS[:rows])
    from verl_bridge.integrations.verl.cpu.engine import predicting_positions

    selected = predicting_positions(data["input_ids"].offsets().diff(), data["loss_mask"])
    for name in ("log_probs", "entropy"):
        values, reference = got["model_output"][name].values(), expected["model_output"][name].values()
        assert torch.allclose(values[selected], reference[selected], atol=2e-6)
        assert not values[~selected].any()
    assert got_gradients.keys() == expected_gradients.keys() != set()
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 0
        assert torch.allclose(got_gradients[name], gradient, atol=1e-4 * gradient.abs().max()), name


def test_logits_are_computed_at_the_selected_positions_alone(engines):
    ours, _ = engines
    shapes = []
    handle = ours.module.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    data = batch_of(torch.Generator().manual_seed(3), 1.0, "loss_mask_over_the_response")
    run(ours, data, forward_only=True)
    handle.remove()
    assert sum(shapes) == int(data["loss_mask"].values().sum())


def test_what_needs_every_logit_is_left_to_verl(engines):
    from verl.utils import tensordict_utils as tu

    results = []
    for engine in engines:
        data = batch_of(torch.Generator().manual_seed(5), 1.0, "loss_mask_over_the_response")
        tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
        results.append(run(engine, data, forward_only=True)[0]["model_output"])
    # The last token of a row predicts nothing: what stands there depends on the row beside it.
    last = data["input_ids"].offsets()[1:] - 1
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        values, reference = (result[name].values().index_fill(0, last, 0.0) for result in results)
        assert torch.allclose(values, reference, atol=2e-6)
        assert (reference != 0).sum() == len(reference) - len(last)


def test_subclass_reads_the_logits_of_the_selected_tokens(engines):
    """The place for a statistic of the old policy's logits (margins, top-M entropies)."""
    ours, _ = engines
    from verl_bridge.integrations.verl.cpu.engine import CPULanguageModelEngine

    class WithMaximum(CPULanguageModelEngine):
        def token_outputs(self, logits, labels, micro_batch):
            outputs = super().token_outputs(logits, labels, micro_batch)
            return {**outputs, "maximum": logits.log_softmax(-1).max(-1).values}

    ours.__class__, original = WithMaximum, ours.__class__
    try:
        data = batch_of(torch.Generator().manual_seed(3), 0.5, "loss_mask_over_the_response")
        output = run(ours, data, forward_only=True)[0]["model_output"]
    finally:
        ours.__class__ = original
    chosen = output["log_probs"].values() != 0
    assert (output["maximum"].values()[chosen] >= output["log_probs"].values()[chosen]).all()
    assert not output["maximum"].values()[~chosen].any()


def test_rollout_and_actor_log_probs_agree(engines, model, tokenizer):
    """What the rollout says it drew with is what the actor recomputes, at the same temperature."""
    from verl.utils import tensordict_utils as tu

    from verl_bridge.integrations.verl.cpu.generation import BatchGenerator, Request
    from verl_bridge.integrations.verl.cpu.sampling import SamplingParams

    ours, _ = engines
    for temperature in (1.0, 0.7):
        prompts = [tuple(range(2, 2 + n)) for n in (3, 9, 5, 14, 7)]
        params = SamplingParams(max_tokens=20, temperature=temperature, logprobs=True)
        requests = [Request(prompt, params, seed) for seed, prompt in enumerate(prompts)]
        completions = BatchGenerator(model, tokenizer.pad_token_id, tokenizer.decode)(requests)
        ids = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]
        data = tu.get_tensordict(
            {
                "input_ids": jagged(ids),
                "position_ids": jagged([torch.arange(len(row)) for row in ids]),
                "loss_mask": jagged([torch.ones(20, dtype=torch.long)] * 5),
            },
            dict(use_dynamic_bsz=True, max_token_len_per_gpu=400, temperature=temperature, use_remove_padding=False),
        )
        with ours.eval_mode():
            output = ours.forward_backward_batch(data, None, forward_only=True)["model_output"]["log_probs"]
        for row, completion in zip(output.unbind(), completions, strict=True):
            assert torch.allclose(row[-21:-1], torch.tensor(completion.log_probs), atol=1e-4)


def test_critic_engine_values_every_token(host_config, process_group):
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    from verl_bridge.integrations.verl.cpu.engine import CPUValueModelEngine

    policy = host_config().actor_rollout_ref.model.path
    config = host_config(
        "algorithm.adv_estimator=gae", f"critic.model.path={policy}", f"critic.model.tokenizer_path={policy}"
    ).critic
    critic = omega_conf_to_dataclass(config)
    model_config = critic.model
    model_config.model_type = "value_model"
    engine = EngineRegistry.new(
        model_type="value_model",
        backend="fsdp2",
        model_config=model_config,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )
    assert type(engine) is CPUValueModelEngine
    engine.initialize()
    data = batch_of(torch.Generator().manual_seed(3), 1.0, "loss_mask_over_the_response")
    tu.assign_non_tensor(data, calculate_entropy=False)
    with engine.eval_mode():
        values = engine.infer_batch(data)["model_output"]["values"]
    ids = data["input_ids"].unbind()[1]
    with torch.no_grad(), engine.eval_mode():
        expected = engine.module(input_ids=ids[None]).logits[0, :, 0]
    assert torch.allclose(values.unbind()[1], expected, atol=1e-5)
    assert expected.abs().max() > 1e-3


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_predicting_positions_against_a_loop(masks, data):
    from verl_bridge.integrations.verl.cpu.engine import predicting_positions

    lengths = [len(mask) + data.draw(st.integers(0, 3)) for mask in masks]
    expected = []
    for length, mask in zip(lengths, masks, strict=True):
        chosen = {length - len(mask) + i for i, bit in enumerate(mask) if bit}
        expected += [t + 1 in chosen for t in range(length)]
    got = predicting_positions(torch.tensor(lengths), jagged(masks))
    assert got.tolist() == expected


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=24), st.integers(50, 400))
def test_rows_per_micro_batch_divide_and_fit(lengths, budget):
    from verl_bridge.integrations.verl.cpu.engine import rows_per_micro_batch

    rows = rows_per_micro_batch(lengths, budget)
    if rows:
        assert len(lengths) % rows == 0
        assert rows * max(lengths) <= budget
        assert rows == len(lengths) or 2 * rows * max(lengths) > budget


def test_rows_per_micro_batch_by_hand():
    from verl_bridge.integrations.verl.cpu.engine import rows_per_micro_batch

    assert rows_per_micro_batch([3, 10, 5, 7, 2, 9], 30) == 3
    assert rows_per_micro_batch([3, 10, 5, 7, 2, 9], 100) == 6
    assert rows_per_micro_batch([3, 10, 5, 7, 2], 30) == 0  # single rows would use a third of the budget
    assert rows_per_micro_batch([3, 40], 30) == 0  # too long for any: verl says so


def test_micro_batches_hold_rows_of_similar_length(engines):
    ours, _ = engines
    shapes = []
    handle = ours.module.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    run(ours, batch_of(torch.Generator().manual_seed(3), 1.0, "loss_mask_over_the_response"), forward_only=True)
    handle.remove()
    # Lengths 14, 7, 9, 14, 10, 4 with a budget of 40: two rows each.
    assert shapes == [(2, 7), (2, 10), (2, 14)]
