from verl_bridge.retrieval.lengths import length_groups


def test_a_long_text_never_pads_short_ones():
    texts = ["x" * length for length in (9, 5000, 5, 2000, *range(20, 40))]
    groups = list(length_groups(texts, 8))
    assert sorted(i for group in groups for i in group) == list(range(len(texts)))
    assert max(map(len, groups)) == 8 and groups[-1] == [3, 1]
    assert all(len(texts[group[-1]]) <= 4 * len(texts[group[0]]) + 64 for group in groups[:-1])
    # with a bound on the padded size, of two of 2,000 characters each is alone
    assert list(length_groups(texts, 8, characters=3000))[-2:] == [[3], [1]]
    assert list(length_groups([], 8)) == []
