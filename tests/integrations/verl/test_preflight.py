"""A bad run is stopped before Ray starts, with one line."""

from __future__ import annotations

import asyncio
import json

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf

from verl_bridge.integrations.verl import preflight
from verl_bridge.integrations.verl.preflight import Preflight, check_run


def write_index(folder, corpus_size, **changes):
    """One document of dimension 8, as `verl-bridge index build` leaves it."""
    folder.mkdir()
    np.save(folder / "embeddings.npy", np.ones((1, 8), dtype=np.float32))
    size = (folder / "embeddings.npy").stat().st_size
    manifest = {"format": 2, "encoder": "e", "fingerprint": "f", "pooling": "mean", "normalised": True, "dim": 8}
    manifest |= {"max_length": 16, "documents": 1, "passage_prefix": "", "factory": "Flat"}
    manifest |= {"corpus": {"size": corpus_size, "sha256": "0"}}
    manifest |= {"files": {"embeddings.npy": {"size": size, "sha256": "0"}}}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.fixture
def config(tmp_path):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text(json.dumps({"id": "1", "title": "t", "text": "x"}) + "\n")
    write_index(index, corpus.stat().st_size)
    (tmp_path / "encoder").mkdir()
    rows = [{"reward_model": {"ground_truth": {"target": ["Lima"]}}, "x": 1}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    parquet.write_table(
        pa.Table.from_pylist([*rows, {"reward_model": {"ground_truth": {"target": []}}, "x": 1}]),
        tmp_path / "nogold.parquet",
    )
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "nocolumn.parquet")
    parquet.write_table(pa.Table.from_pylist(rows).slice(0, 0), tmp_path / "norows.parquet")
    parquet.write_table(pa.Table.from_pylist([rows[0] | {"agent_name": "other"}]), tmp_path / "agent.parquet")
    name = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"], pa.binary()).buffers())
    target = pa.StructArray.from_arrays([name], ["ground_truth"])
    parquet.write_table(pa.table({"reward_model": target}), tmp_path / "not_utf8.parquet")
    (tmp_path / "fake.parquet").write_text("PAR1 no parquet")
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "bridge_sync"}},
            "data": {"train_files": str(tmp_path / "train.parquet"), "val_files": [str(tmp_path / "train.parquet")]},
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
                "rollout": {"agent": {"default_agent_loop": "verl_bridge_search"}},
            },
            "verl_bridge": {
                "gca": {},
                "retriever": {"corpus": str(corpus), "index": str(index), "encoder": str(tmp_path / "encoder")},
            },
        }
    )


def test_a_good_run_passes_and_its_config_is_left_alone(config):
    before = OmegaConf.to_container(config)
    Preflight().on_job_start(config=config, task_function=None)
    assert OmegaConf.to_container(config) == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("verl_bridge.gca.rho", 0.9, "ρ·s·λ_max·c_max ≤ κ is broken"),
        ("verl_bridge.gca.rhoo", 0.1, "unknown setting verl_bridge.gca.rhoo=0.1.*did you mean 'rho'"),
        ("verl_bridge.retriever.corpus", "/no/such", "retriever.corpus='/no/such' does not exist"),
        ("verl_bridge.retriever.encoder", "/no/such", "retriever.encoder='/no/such' does not exist"),
        ("verl_bridge.retriever.passage_prefix", "passage: ", "passage_prefix='passage: ', but the index .* with ''"),
        ("verl_bridge.retriever.probe", "{}/train.parquet", "retriever.probe=.*(line 1|decode)"),
        ("verl_bridge.retriever.index", None, "retriever.index is not set"),
        ("data.train_files", "{}/nogold.parquet", r"data.train_files: row 2 has gold answers \[\]"),
        ("data.val_files", "{}/nocolumn.parquet", "data.val_files=.*no column reward_model"),
        ("data.val_files", "{}/missing.parquet", "data.val_files=.*does not exist"),
        ("data.val_files", "{}/missing.jsonl", "data.val_files=.*does not exist"),
        ("data.val_files", "{}/norows.parquet", "data.val_files=.*has no rows"),
        ("data.val_files", "{}/fake.parquet", "data.val_files=.*not a readable parquet file.*write it again"),
        ("data.val_files", "{}/not_utf8.parquet", "data.val_files=.*not a readable parquet file.*write it again"),
        ("data.val_files", "{}/agent.parquet", "data.val_files=.*column agent_name.*drop the column"),
        ("verl_bridge.retriever.corpus", "{}", "retriever.corpus=.* is not a file"),
        ("verl_bridge.retriever.probe", "{}", "retriever.probe=.* is a folder"),
        ("verl_bridge.retriever.encoder", "./models/e5", "retriever.encoder='./models/e5' does not exist"),
        ("verl_bridge.retriever.encoder", "~/e5", "retriever.encoder='~/e5' does not exist"),
    ],
)
def test_refusals(config, tmp_path, key, value, message):
    OmegaConf.update(config, key, value.format(tmp_path) if isinstance(value, str) else value, force_add=True)
    with pytest.raises(ValueError, match=message):
        check_run(config)


@pytest.mark.parametrize(
    ("trainer", "mode"),
    [
        ("bridge_sync", "sync"),
        ("bridge_colocate_async", "colocate_async"),
        ("bridge_separate_async", "separate_async"),
        ("a_subclass_of_ours", "sync"),
    ],
)
def test_the_mode_checked_is_the_chosen_trainers(config, monkeypatch, trainer, mode):
    seen = []
    monkeypatch.setattr(preflight, "prepare_config", lambda config, settings, verl_mode: seen.append(verl_mode))
    config.trainer.v1.trainer_mode = trainer
    check_run(config)
    assert seen == [mode]


def test_an_index_of_another_corpus_is_refused_naming_both_sizes(config, tmp_path):
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"built from a corpus of 39 bytes, but .* has 40: rebuild"):
        check_run(config)


def test_a_refusal_is_one_line_and_an_exit_code(config, capsys):
    config.verl_bridge.retriever.index = "/no/such"
    with pytest.raises(SystemExit) as stopped:
        Preflight().on_job_start(config=config)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "verl_bridge: verl_bridge.retriever.index='/no/such' does not exist: give the path of the index"
    ]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("manifest.json", b"{}", r"retriever\.index=.*manifest\.json of index .* is damaged: format is None; rebuild"),
        ("manifest.json", b'{"format": 1}', r"retriever\.index=.*has format 1"),
        ("embeddings.npy", None, r"retriever\.index=.*lacks embeddings\.npy; build it with"),
        ("embeddings.npy", b"x", r"retriever\.index=.*embeddings\.npy of index .* is damaged"),
    ],
)
def test_a_half_built_or_damaged_index_is_refused(config, tmp_path, file, content, message):
    path = tmp_path / "index" / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_run(config)


def test_prefixes_are_the_settings_or_the_familys_or_the_indexs(config, tmp_path):
    retriever = config.verl_bridge.retriever
    write_index(tmp_path / "e5", (tmp_path / "corpus.jsonl").stat().st_size, passage_prefix="passage: ")
    retriever.index = str(tmp_path / "e5")
    check_run(config)  # the index's own
    retriever.family = "e5"
    check_run(config)
    retriever.passage_prefix = ""
    with pytest.raises(ValueError, match=r"retriever.passage_prefix='', but the index .* built with 'passage: '"):
        check_run(config)
    retriever.passage_prefix, retriever.family = None, "bge"
    with pytest.raises(ValueError, match=r"passage_prefix='' of its family, but the index .* 'passage: '"):
        check_run(config)


def test_a_bare_index_passes_with_its_encoder_and_not_without(config, tmp_path):
    vectors = faiss.IndexFlatIP(8)
    vectors.add(np.ones((1, 8), dtype=np.float32))
    faiss.write_index(vectors, str(tmp_path / "e5_Flat.index"))
    config.verl_bridge.retriever.index = str(tmp_path / "e5_Flat.index")
    check_run(config)
    config.verl_bridge.retriever.encoder = None
    with pytest.raises(ValueError, match=r"encoder is not set: the bare FAISS file .* does not say"):
        check_run(config)


def served(config, *states, token=None, work=check_run):
    """Checks the run while servers in these states answer; None is a server of Search-R1's, which has no /health."""

    async def run():
        started = []
        for state in states:
            app = web.Application()

            async def adapter(request, state=state):
                if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
                    return web.json_response({"detail": "give the bearer token"}, status=401)
                return web.json_response({"adapter_version": 0, "sha256": "0"})

            async def health(request, state=state):
                return web.json_response(state)

            app.router.add_get("/adapter", adapter)
            if state is not None:
                app.router.add_get("/health", health)
            started.append(TestServer(app))
            await started[-1].start_server()
        config.verl_bridge.retriever.url = ",".join(str(server.make_url("")) for server in started)
        try:
            await asyncio.to_thread(work, config)  # a driver has no event loop
        finally:
            for server in started:
                await server.close()

    asyncio.run(run())


HEALTH = {"status": "ok", "adapter_version": 0, "documents": 1, "dim": 8, "encoder": "e", "draining": False}


def test_servers_over_the_learners_index_pass(config):
    config.verl_bridge.bridge = {"enable": True}
    served(config, HEALTH, HEALTH)


def test_servers_alone_need_no_files(config):
    config.verl_bridge.retriever = {}
    served(config, HEALTH | {"documents": 60_000})


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (
            [HEALTH, HEALTH | {"documents": 2}],
            r"retriever.url=.* 1 documents × 8, .* 2 documents × 8, .*serve one index",
        ),
        ([HEALTH | {"dim": 9}], r"retriever.url=.* 1 documents × 9, .*index 1 documents × 8; serve one index"),
        ([None], r"retriever.url=.*is not a verl-bridge server.*Search-R1.*verl-bridge serve"),
        ([HEALTH, HEALTH | {"draining": True}], r"retriever.url=.*shutting down"),
    ],
)
def test_servers_that_are_not_what_the_run_needs(config, states, message):
    config.verl_bridge.bridge = {"enable": True}
    with pytest.raises(ValueError, match=message):
        served(config, *states)


def test_a_server_that_is_down_is_one_line(config, capsys):
    config.verl_bridge.retriever.url = "http://127.0.0.1:9"
    with pytest.raises(SystemExit):
        Preflight().on_job_start(config=config)
    (line,) = capsys.readouterr().err.splitlines()
    assert "verl_bridge.retriever.url='http://127.0.0.1:9'" in line and "cannot be reached" in line
    assert "verl-bridge serve" in line


def test_the_token_is_checked_where_it_is_needed(config, monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_TOKEN", "secret")
    served(config, HEALTH, token="secret")
    monkeypatch.delenv("VERL_BRIDGE_TOKEN")
    with pytest.raises(ValueError, match=r"HTTP 401: give the bearer token .*read from VERL_BRIDGE_TOKEN"):
        served(config, HEALTH, token="secret")
