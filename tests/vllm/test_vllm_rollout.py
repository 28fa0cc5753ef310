"""verl's own vLLM rollout, on a CPU: three steps of bridge_gca in the embedded world, full weights and a LoRA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from verl_bridge.embedded import demo
from verl_bridge.embedded.assets import embedded_assets
from verl_bridge.trace import SearchTrace

REPOSITORY = Path(__file__).parents[2]
SIZES = demo.Sizes(questions=8, rollouts=4, validation=4)
STEPS = 3
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.enforce_eager=true",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ROLLOUT}.max_num_seqs=32",
    f"{ROLLOUT}.max_num_batched_tokens=1024",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=8",
    f"{ROLLOUT}.calculate_log_probs=true",
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.vllm.worker_extension.PlainWeightsExtension",
    f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config={{cudagraph_mode: NONE}}",
    "actor_rollout_ref.actor.optim.lr=1e-3",
)
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    f"{ROLLOUT}.load_format=safetensors",  # the base model is never sent then, only the adapter
    "actor_rollout_ref.actor.optim.lr=1e-2",
)
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.vllm.probe",
    "PYTHONPATH": str(REPOSITORY),
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Run:
    """A finished training: the probe's rows by step, and verl's metrics."""

    def __init__(self, folder: Path, steps: int) -> None:
        records = [json.loads(line) for line in (folder / "probe.jsonl").read_text().splitlines()]
        self.rows: dict[int, list[dict]] = {record["step"]: record["rows"] for record in records}
        self.metrics = {record["step"]: record["data"] for record in demo._records(folder / "metrics.jsonl")}
        self.folder = folder
        assert list(self.rows) == list(range(1, steps + 1))

    def all_rows(self) -> list[dict]:
        return [row for rows in self.rows.values() for row in rows]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a run once: name, steps and overrides."""
    root, assets, made = tmp_path_factory.mktemp("runs"), embedded_assets(), {}

    def run(name: str, steps: int, *overrides: str) -> Run:
        if name not in made:
            folder = root / name
            folder.mkdir()
            demo.hold_out(assets, SIZES, folder)
            command = [
                *demo.training_command(assets, SIZES, "bridge_gca", steps, 0, folder),
                "trainer.v1.trainer_mode=vllm_probe_sync",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                *overrides,
            ]
            with pytest.MonkeyPatch.context() as patch:
                for key, value in {**ENVIRONMENT, "PROBE_FILE": str(folder / "probe.jsonl")}.items():
                    patch.setenv(key, value)
                demo._train(command, folder, steps, print)
            assert "Error in _run_prompt" not in (folder / "train.log").read_text()
            made[name] = Run(folder, steps)
        return made[name]

    return run


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request, start):
    return start(request.param, STEPS, *VLLM, *(LORA if request.param == "lora" else ()))


@pytest.fixture(scope="module")
def full(start):
    return start("full", STEPS, *VLLM)


@pytest.fixture(scope="module")
def on_cpu_host(start):
    """The same with the rollout of our own that other CPU runs use."""
    return start("cpu", 1)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_assets().policy)


def sampled(row: dict, name: str) -> torch.Tensor:
    return torch.tensor(row[name])[torch.tensor(row["response_mask"]).bool()]


def test_rollout_and_actor_agree_at_every_step(trained):
    """vLLM's log-probs of what it sampled, and the actor's of the same tokens before its update."""
    for step, rows in trained.rows.items():
        assert len(rows) == SIZES.questions * SIZES.rollouts
        for row in rows:
            rollout, actor = sampled(row, "rollout_log_probs"), sampled(row, "old_log_probs")
            torch.testing.assert_close(rollout, actor, rtol=0, atol=1e-4)
        assert trained.metrics[step]["training/rollout_probs_diff_max"] < 1e-4


def test_updated_weights_reach_vllm(trained):
    """At first vLLM samples from the shipped policy, at the last step from one that two updates have moved."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_assets().policy, dtype=torch.float32)
    moved = {}
    for step in (1, STEPS):
        largest = 0.0
        for row in trained.rows[step][:8]:
            prompt, response = row["prompts"], torch.tensor(row["responses"])
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row["responses"]])).logits[0, len(prompt) - 1 : -1]
            shipped = logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
            shipped = shipped[torch.tensor(row["response_mask"]).bool()]
            largest = max(largest, float((shipped - sampled(row, "rollout_log_probs")).abs().max()))
        moved[step] = largest
    assert moved[1] < 1e-4 and moved[STEPS] > 0.02
    assert any(trained.metrics[step]["actor/grad_norm"] > 0 for step in (1, 2))


def test_versions_of_policy_and_adapter(trained):
    for step, rows in trained.rows.items():
        assert {row["extra_fields"]["global_steps"] for row in rows} == {step - 1}
        traces = [SearchTrace.from_dict(row["extra_fields"]["search_trace"]) for row in rows]
        found = {turn.adapter_version for trace in traces for turn in trace.searches if turn.status == "ok"}
        assert found == {step - 1}
    assert (trained.folder / "adapter" / "adapter_model.safetensors").is_file()


def test_spans_are_exact(trained, tokenizer):
    """Sampled tokens are those of the turns' spans, the rest is what was observed, and both decode to the record."""
    searches = 0
    for row in trained.all_rows():
        trace = SearchTrace.from_dict(row["extra_fields"]["search_trace"])
        ids, mask = row["responses"], row["response_mask"]
        assert trace.response_length == len(ids) == len(mask) == len(row["rollout_log_probs"])
        expected = [0] * len(ids)
        for turn in trace.turns:
            expected[slice(*turn.span)] = [1] * (turn.span[1] - turn.span[0])
            if turn.observation_span is not None:
                assert tokenizer.decode(ids[slice(*turn.observation_span)]) == turn.observation
            text = tokenizer.decode(ids[slice(*turn.span)])
            if turn.kind == "search":
                searches += 1
                assert text.endswith("</search>") and turn.query in text
        assert mask == expected
        if trace.answer is not None:
            assert tokenizer.decode(ids[slice(*trace.answer_span)]).strip() == trace.answer
    assert searches > 50


def forms(rows: list[dict]) -> dict[str, set[str]]:
    """Which fields a record has: of a trace, of each kind of turn, and beside the trace."""
    found: dict[str, set[str]] = {"fields": set(), "trace": set()}
    for row in rows:
        trace = row["extra_fields"]["search_trace"]
        found["fields"] |= set(row["extra_fields"])
        found["trace"] |= {f"{name}: {type(value).__name__}" for name, value in trace.items() if value is not None}
        for turn in trace["turns"]:
            seen = found.setdefault(f"{turn['kind']} {turn.get('status')}", set())
            seen |= {f"{name}: {type(value).__name__}" for name, value in turn.items() if value is not None}
    return found


def test_traces_have_the_form_of_the_cpu_rollouts(full, on_cpu_host):
    ours, vllms = forms(on_cpu_host.all_rows()), forms(full.all_rows())
    assert vllms["fields"] - ours["fields"] == {"num_cached_tokens"}  # vLLM's own count, no part of the record
    assert vllms["trace"] == ours["trace"]
    shared = set(ours) & set(vllms) - {"fields", "trace"}
    assert {"search ok", "answer none"} <= shared
    assert {kind: vllms[kind] for kind in shared} == {kind: ours[kind] for kind in shared}
    for row in [*full.all_rows(), *on_cpu_host.all_rows()]:
        record = row["extra_fields"]["search_trace"]
        assert json.loads(json.dumps(SearchTrace.from_dict(record).to_dict())) == record


def test_both_methods_worked_on_vllms_rollouts(trained):
    for data in trained.metrics.values():
        assert data["bridge/plan/turns_used"] > 0 and data["search/failed_share"] == 0
    assert any(data["gca/residual_mean"] > 0 for data in trained.metrics.values())


def test_it_runs_in_its_own_environment():
    import vllm

    assert vllm.__version__.startswith("0.28.0") and os.environ["VERL_PLATFORM"] == "cpu"
