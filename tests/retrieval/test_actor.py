import os
from functools import partial

import pytest
import torch

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.actor import RetrieverLost, get_retriever, start_retriever


@pytest.fixture(scope="module")
def settings(places_file, places_index_folder, minilm):
    return {
        "corpus": str(places_file),
        "index": str(places_index_folder),
        "encoder": minilm,
        "top_k": 4,
        "updater": partial(RetrieverUpdater, lr=1e-2),
    }


def batch_from(answers, queries, version):
    ids = [answer["ids"] for answer in answers]
    likelihood = [[-6.0] * (len(row) - 1) + [-1.0] for row in ids]  # the last candidate answers the question
    count = len(queries)
    return RetrieverBatch(queries, ids, likelihood, [1.0] * count, [True] * count, [version] * count)


def test_missing_parts_are_named_before_anything_starts(settings, tmp_path):
    for key in ("corpus", "index"):
        with pytest.raises(ValueError, match=rf"verl_bridge\.retriever\.{key}='/none' does not exist"):
            start_retriever("r", **{**settings, key: "/none"})
    for key in ("corpus", "index"):
        with pytest.raises(ValueError, match=rf"verl_bridge\.retriever\.{key}=None is not set"):
            start_retriever("r", **{**settings, key: None})


def test_the_actor_serves_a_ray_job(settings, tmp_path):
    import ray

    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        name = "retriever_under_test"
        with pytest.raises(RuntimeError, match=r"actor_name='retriever_under_test'.*start_retriever"):
            get_retriever(name)
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(RuntimeError, match=r"did not start: ValueError: corpus .* holds no documents"):
            start_retriever("broken", **{**settings, "corpus": str(tmp_path / "empty.jsonl")})
        started = start_retriever(name, **settings)
        with pytest.raises(ValueError, match="is taken"):
            start_retriever(name, **settings)
        found = get_retriever(name)
        queries = ["money of Hollin", "money of Borsk"]
        (answers, more) = ray.get([found.search.remote(queries), found.search.remote(["Caldra"])])
        assert answers[0]["ids"][0] == "Hollin-money" and more[0]["documents"][0]["title"] == "Caldra"
        batch = batch_from(answers, queries, 0)
        result = started.call("update", batch, "the first")
        assert result["version"] == started.call("version") == ray.get(found.version.remote()) == 1
        assert torch.isfinite(torch.tensor(list(result["metrics"].values()))).all()
        after = ray.get(found.search.remote(queries))
        assert after[0]["adapter_version"] == 1
        assert started.call("update", batch, "the first") == result  # asked for again, not done again
        assert ray.get(found.search.remote(queries)) == after
        with pytest.raises(ValueError, match=r"^turn 0 was served by adapter version 0"):  # as the learner raised it
            started.call("update", batch, "another")
        ray.kill(started.handle)
        with pytest.raises(RetrieverLost, match=rf"'{name}' died in 'version' and is not started again"):
            started.call("version")
    finally:
        if own:
            ray.shutdown()
