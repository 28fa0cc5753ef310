"""The hook on verl's log-prob pass: both padding modes, temperature, sequence parallel, and nothing when not asked."""

import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")

LENGTHS, VOCABULARY = (5, 9, 2, 14), 700


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.fixture(scope="module")
def case():
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(n, VOCABULARY, generator=generator) for n in LENGTHS]
    ids = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.5])
    return logits, ids, temperature


def micro_batch(ids, remove_padding, asked=True, **more):
    from verl.utils import tensordict_utils as tu

    flags = dict(use_remove_padding=remove_padding, calculate_entropy=True, **more)
    if asked:
        flags |= dict(salience_margin_k=3, salience_entropy_m=32)
    return tu.get_tensordict({"input_ids": jagged(ids)}, flags)


def engine(shards=None):
    """Our engine without a model: what it does with outputs is all that is looked at."""
    import verl.workers.engine  # noqa: F401  loads ours
    from verl.utils import torch_functional as verl_F

    from verl_bridge.integrations.verl.engine import SalienceFSDPEngine

    made = object.__new__(SalienceFSDPEngine)
    made.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    made.compute_entropy_from_logits = verl_F.entropy_from_logits
    made._gather_and_unpad_packed = shards or (lambda values, pad_size: values[:-pad_size] if pad_size else values)
    return made


def expected(logits, ids, temperature):
    """Token by token: position t is about the token after it; the last position looks at the next sequence's first."""
    from verl_bridge.algorithms.salience import token_statistics

    rolled = torch.cat(ids).roll(-1)
    scaled = torch.cat([row / t for row, t in zip(logits, temperature, strict=True)])
    statistics = token_statistics(scaled, rolled)
    return statistics.margin, statistics.entropy


def outputs_without_padding(case, pad=3):
    logits, ids, temperature = case
    rolled = torch.cat([torch.cat(ids).roll(-1), torch.zeros(pad, dtype=torch.long)])
    packed = torch.cat([*logits, torch.zeros(pad, VOCABULARY)])
    scale = torch.cat([temperature.repeat_interleave(torch.tensor(LENGTHS)), torch.ones(pad)])
    arguments = {"input_ids_rmpad_rolled": rolled, "temperature_rmpad": scale, "pad_size": pad}
    return SimpleNamespace(logits=packed.unsqueeze(0)), arguments, micro_batch(ids, True)


def outputs_with_padding(case):
    logits, ids, temperature = case
    padded = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True, padding_value=float("nan"))
    arguments = {"input_ids_rmpad_rolled": torch.cat(ids).roll(-1), "temperature": temperature}
    return SimpleNamespace(logits=padded), arguments, micro_batch(ids, False)


@pytest.mark.parametrize("outputs", [outputs_without_padding, outputs_with_padding])
@pytest.mark.parametrize("chunk", [None, VOCABULARY * 4 * 4])
def test_columns_are_the_statistics_of_scaled_logits(case, outputs, chunk, monkeypatch):
    from verl_bridge.integrations.verl import salience

    if chunk is not None:
        monkeypatch.setattr(salience, "_CHUNK", chunk)  # four rows at a time
    output, arguments, batch = outputs(case)
    result = engine().prepare_model_outputs(output, arguments, batch, None)
    margin, entropy = expected(*case)
    torch.testing.assert_close(result[salience.MARGIN].values(), margin, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[salience.ENTROPY].values(), entropy, rtol=1e-5, atol=1e-5)
    assert result[salience.MARGIN].offsets().tolist() == batch["input_ids"].offsets().tolist()
    log_probs = torch.cat([torch.log_softmax(row / t, -1) for row, t in zip(case[0], case[2], strict=True)])
    chosen = log_probs.gather(1, torch.cat(case[1]).roll(-1)[:, None]).squeeze(1)
    torch.testing.assert_close(result["log_probs"].values(), chosen, rtol=1e-5, atol=1e-5)  # verl's own, untouched


@pytest.mark.parametrize("outputs", [outputs_without_padding, outputs_with_padding])
def test_a_temperature_of_one_divides_nothing(case, outputs):
    """verl marks it and leaves the logits as they are; so does the hook, whatever the temperatures beside it say."""
    logits, ids, _ = case
    ones = torch.ones(len(LENGTHS))
    output, arguments, batch = outputs((logits, ids, ones))
    from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN

    divided = engine().prepare_model_outputs(output, arguments, batch, None)
    names = {"temperature_rmpad", "temperature"} & set(arguments)
    marked = arguments | {"temperature_is_one": True} | {name: 2 * arguments[name] for name in names}
    left = engine().prepare_model_outputs(output, marked, batch, None)
    margin, entropy = expected(logits, ids, ones)
    for result in (divided, left):
        torch.testing.assert_close(result[MARGIN].values(), margin, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[ENTROPY].values(), entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(left[MARGIN].values(), divided[MARGIN].values())
    torch.testing.assert_close(left["log_probs"].values(), divided["log_probs"].values())  # verl's own agrees


def test_shards_of_a_sequence_are_gathered_as_log_probs_are(case):
    """Under Ulysses each rank holds a slice of the packed tokens; here one rank's slice, the other's is known."""
    from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN

    output, arguments, batch = outputs_without_padding(case, pad=2)
    half = (sum(LENGTHS) + 2) // 2
    whole = engine().prepare_model_outputs(output, arguments, batch, None)
    for start in (0, half):
        mine = slice(start, start + half)
        sliced = {
            **arguments,
            "input_ids_rmpad_rolled": arguments["input_ids_rmpad_rolled"][mine],
            "temperature_rmpad": arguments["temperature_rmpad"][mine],
        }
        gathered = []

        def gather(values, pad_size, gathered=gathered):
            gathered.append(values)
            return torch.zeros(sum(LENGTHS))

        engine(gather).prepare_model_outputs(SimpleNamespace(logits=output.logits[:, mine]), sliced, batch, None)
        kept = half if start == 0 else half - 2
        for values, name in zip(gathered[-2:], (MARGIN, ENTROPY), strict=True):
            torch.testing.assert_close(values[:kept], whole[name].values()[mine][:kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [outputs_without_padding, outputs_with_padding])
def test_nothing_is_added_when_it_is_not_asked_for(case, outputs):
    output, arguments, batch = outputs(case)
    plain = micro_batch(case[1], batch["use_remove_padding"], asked=False)
    assert set(engine().prepare_model_outputs(output, arguments, plain, None)) == {"log_probs", "entropy"}


def test_fused_kernels_are_refused_with_the_way_out(case):
    batch = micro_batch(case[1], True, use_fused_kernels=True)
    tokens = torch.zeros(1, sum(LENGTHS))
    output = SimpleNamespace(log_probs=tokens, entropy=tokens)
    arguments = {"input_ids_rmpad_rolled": tokens[0], "temperature_rmpad": tokens[0], "pad_size": 0}
    with pytest.raises(ValueError, match=r"use_fused_kernels=true.*salience=uniform"):
        engine().prepare_model_outputs(output, arguments, batch, None)


def test_the_flags_are_there_for_one_pass_alone():
    from transfer_queue import KVBatchMeta

    from verl_bridge.integrations.verl.salience import asking_for_salience

    batch = KVBatchMeta(partition_id="p", keys=["a"], tags=[{}], extra_info={"temperature": 1.0})
    with pytest.raises(RuntimeError, match="boom"), asking_for_salience(batch, margin_k=2, entropy_m=8):
        assert batch.extra_info == {"temperature": 1.0, "salience_margin_k": 2, "salience_entropy_m": 8}
        raise RuntimeError("boom")
    assert batch.extra_info == {"temperature": 1.0}


def test_cuda_gets_our_engine_and_cpu_its_own():
    import verl.workers.engine.fsdp.transformer_impl as implementation

    from verl_bridge.integrations.verl.cpu.engine import CPULanguageModelEngine
    from verl_bridge.integrations.verl.engine import SalienceFSDPEngine

    for backend in ("fsdp", "fsdp2"):
        engines = implementation.EngineRegistry._engines["language_model"][backend]
        assert engines["cuda", "nvidia"] is engines["cuda", "amd"] is SalienceFSDPEngine
    assert implementation.EngineRegistry._engines["language_model"]["fsdp2"]["cpu"] is CPULanguageModelEngine
