"""A retriever batch is checked when it is made."""

import pytest

from verl_bridge.bilevel.batch import RetrieverBatch


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        RetrieverBatch(["a"], [["x", "y"]], [[-1.0, -2.0]], [1.0, 2.0], [True], [0])
    with pytest.raises(ValueError, match="turn 0 has 1 candidates"):
        RetrieverBatch(["a"], [["x"]], [[-1.0]], [1.0], [True], [0])
    with pytest.raises(ValueError, match="turn 0 has 2 candidates and 3 log-likelihoods"):
        RetrieverBatch(["a"], [["x", "y"]], [[-1.0, -1.0, -1.0]], [1.0], [True], [0])
    one = (["a"], [["x", "y"]], [[-1.0, -1.0]], [1.0], [True], [0])
    for hits in ([True], [True, False, True], []):  # rows of one would stand for every candidate
        with pytest.raises(ValueError, match=f"turn 0 has 2 candidates and {len(hits)} hits; give equally many"):
            RetrieverBatch(*one, hits=[hits])
    assert RetrieverBatch(*one, hits=[[True, False]]).hits == [[True, False]]
