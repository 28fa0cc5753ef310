import json

import pytest
import torch

from verl_bridge.retrieval.encoder import BaseEncoder, DocumentEncoder, QueryEncoder, load_encoders

TEXTS = ["capital of Elsberg", "who pays with the Borsk crown in the old town by the lake?", "a"]


def test_the_initial_adapter_equals_the_base_and_the_model_itself(encoders, minilm):
    queries, documents = encoders
    vectors = queries.encode_queries(TEXTS)
    torch.testing.assert_close(vectors, documents.encode_documents(TEXTS), atol=1e-6, rtol=0)
    from sentence_transformers import SentenceTransformer

    own = torch.tensor(SentenceTransformer(minilm, device="cpu").encode(TEXTS))
    torch.testing.assert_close(vectors, own, atol=1e-6, rtol=0)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3), atol=1e-6, rtol=0)
    assert vectors.dtype == torch.float32 and queries.base.pooling == "mean" and queries.base.normalised


def test_rank_sixteen_on_every_layer_but_the_pooler_and_nothing_else_trains(encoders):
    queries, _ = encoders
    parameters = queries.lora_parameters()
    assert all("lora_" in name and "pooler" not in name for name in parameters)
    layers = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name in parameters}
    assert layers == {"query", "key", "value", "dense"}
    assert len(parameters) == 2 * 6 * 6  # A and B of six linear layers in six blocks
    assert all(16 in p.shape for p in parameters.values())
    frozen = [name for name, p in queries.base.model.named_parameters() if "lora_" not in name and p.requires_grad]
    assert frozen == []


def test_serving_and_training_give_the_same_vectors_and_only_training_has_a_graph(encoders):
    queries, _ = encoders
    perturb(queries)
    served, trained = queries.encode_queries(TEXTS), queries.encode_queries(TEXTS, training=True)
    assert torch.equal(served, trained.detach()) and trained.requires_grad and not served.requires_grad
    assert not any(module.training for module in queries.base.model.modules())


def perturb(queries, scale=0.05):
    generator = torch.Generator().manual_seed(1)
    state = {
        name: value + scale * torch.randn(value.shape, generator=generator)
        for name, value in queries.adapter_state().items()
    }
    queries.set_adapter_state(state, queries.adapter_version + 1)


def test_order_and_batch_size_do_not_change_a_vector(encoders):
    queries, _ = encoders
    texts = [("word " * (i % 5 + 1)) + str(i) for i in range(11)]
    together = queries.encode_queries(texts)
    alone = torch.cat([queries.encode_queries([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)
    flipped = queries.encode_queries(texts[::-1]).flip(0)
    torch.testing.assert_close(together, flipped, atol=2e-6, rtol=0)
    assert queries.encode_queries([]).shape == (0, 384)


def test_documents_never_see_the_adapter(encoders):
    queries, documents = encoders
    before = documents.encode_documents(TEXTS)
    start = queries.encode_queries(TEXTS)
    perturb(queries)
    assert torch.equal(documents.encode_documents(TEXTS), before)
    assert (queries.encode_queries(TEXTS) - start).norm(dim=-1).min() > 1e-3
    # encoding documents switched the adapter off only for a moment
    assert all(p.requires_grad for p in queries.lora_parameters().values())


def test_the_prefix_is_added_once_and_alike_in_serving_and_training(minilm, monkeypatch):
    queries, documents = load_encoders(minilm, query_prefix="query: ", passage_prefix="passage: ")
    seen = []
    original = queries.base.encode
    monkeypatch.setattr(queries.base, "encode", lambda texts: seen.append(list(texts)) or original(texts))
    queries.encode_queries(["héllo  x"])
    queries.encode_queries(["héllo  x"], training=True)
    documents.encode_documents(["T\nbody"])
    assert [text.encode() for batch in seen for text in batch] == [
        "query: héllo  x".encode(),
        "query: héllo  x".encode(),
        b"passage: T\nbody",
    ]
    assert queries.describe()["query_prefix"] == "query: " and documents.describe()["passage_prefix"] == "passage: "


def test_saved_adapter_is_peft_format_and_comes_back(encoders, tmp_path, minilm):
    queries, _ = encoders
    perturb(queries)
    state, vectors = queries.adapter_state(), queries.encode_queries(TEXTS)
    queries.save_adapter(tmp_path / "adapter")
    queries.save_adapter(tmp_path / "adapter")  # replaces in place
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 16

    perturb(queries)
    queries.load_adapter(tmp_path / "adapter", 9)
    assert queries.adapter_version == 9
    assert all(torch.equal(value, state[name]) for name, value in queries.adapter_state().items())

    # peft itself reads it and gives the same vectors
    from peft import PeftModel

    other = BaseEncoder(minilm)
    PeftModel.from_pretrained(other.model.transformers_model, tmp_path / "adapter")
    torch.testing.assert_close(other.encode(TEXTS).detach(), vectors, atol=1e-6, rtol=0)


def test_an_adapter_is_saved_without_asking_the_hub(encoders, tmp_path, monkeypatch):
    """peft's own default looks up the vocabulary there, unless the hub is switched off as it is in tests."""
    from peft.utils import save_and_load

    def asked(*arguments, **settings):
        raise AssertionError(f"the hub was asked for {arguments}")

    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", asked)
    queries, _ = encoders
    monkeypatch.setattr(queries.base.adapter.peft_config["default"], "base_model_name_or_path", "intfloat/e5-base-v2")
    queries.save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "intfloat/e5-base-v2"


def test_loading_draws_no_bars_before_an_error():
    from transformers.utils import logging

    logging.enable_progress_bar()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_encoders("/no/such/model")
    assert not logging.is_progress_bar_enabled()


def test_what_does_not_fit_is_refused(encoders, tmp_path, minilm):
    queries, _ = encoders
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        queries.load_adapter(tmp_path, 1)
    small = QueryEncoder(BaseEncoder(minilm), lora_rank=4)
    small.save_adapter(tmp_path / "four")
    before = queries.adapter_state()
    with pytest.raises(ValueError, match="lora_rank"):
        queries.load_adapter(tmp_path / "four", 1)
    assert queries.adapter_version == 0
    assert all(torch.equal(value, before[name]) for name, value in queries.adapter_state().items())
    with pytest.raises(ValueError, match="already carries an adapter"):
        QueryEncoder(queries.base)
    with pytest.raises(ValueError, match="compute_dtype 'int8'"):
        DocumentEncoder(queries.base, compute_dtype="int8")
    with pytest.raises(ValueError, match="encoder '/no/such/model'"):
        BaseEncoder("/no/such/model")


def test_the_start_depends_on_the_seed_alone(minilm):
    torch.manual_seed(5)
    one = QueryEncoder(BaseEncoder(minilm), seed=3).adapter_state()
    random_after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(random_after, torch.rand(1))  # the global generator was left alone
    two = QueryEncoder(BaseEncoder(minilm), seed=3).adapter_state()
    assert all(torch.equal(one[name], two[name]) for name in one)
    three = QueryEncoder(BaseEncoder(minilm), seed=4).adapter_state()
    assert any(not torch.equal(one[name], three[name]) for name in one)


def test_half_precision_documents_stay_close(encoders):
    queries, documents = encoders
    half = DocumentEncoder(queries.base, compute_dtype="bfloat16")
    difference = (half.encode_documents(TEXTS) - documents.encode_documents(TEXTS)).abs().max().item()
    assert 0 < difference < 0.02
    assert half.describe()["compute_dtype"] == "bfloat16"


def test_vectors_do_not_depend_on_who_shares_the_pass(encoders):
    queries, _ = encoders
    long = "which coin " * 60
    together = queries.encode_queries([*TEXTS, long])
    alone = torch.cat([queries.encode_queries([text]) for text in (*TEXTS, long)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_training_in_bfloat16_stays_close_normalised_and_keeps_the_adapter_in_float32(encoders):
    queries, _ = encoders
    perturb(queries)
    exact = queries.encode_queries(TEXTS)
    short = queries.encode_queries(TEXTS, training=True, compute_dtype="bfloat16")
    assert 0 < (short - exact).abs().max() < 0.02 and short.dtype == torch.float32
    torch.testing.assert_close(short.norm(dim=-1), torch.ones(3), atol=1e-6, rtol=0)
    # with and without a graph the same numbers: ratios of the two start at 1
    assert torch.equal(short.detach(), queries.encode_queries(TEXTS, compute_dtype="bfloat16"))
    short[:, 0].sum().backward()
    gradients = [p.grad for p in queries.lora_parameters().values()]
    assert all(g.dtype == torch.float32 and g.abs().max() > 0 for g in gradients)
    for p in queries.lora_parameters().values():
        p.grad = None
    assert torch.equal(queries.encode_queries(TEXTS), exact)  # nothing of it stays behind
