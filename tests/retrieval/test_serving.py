import pytest
import torch

from verl_bridge.retrieval.precision import resolve_dtype
from verl_bridge.retrieval.serving import ServingEncoder

QUERIES = ["what do people in Avelin pay with?", "Borsk", "a town near a lake " * 30, "", "🏔 ارض"]


@pytest.fixture(scope="module")
def copies(loaded):
    return {dtype: ServingEncoder(loaded[0], dtype) for dtype in ("float32", "bfloat16")}


def moved(state, seed, scale=0.05):
    generator = torch.Generator().manual_seed(seed)
    return {name: value + scale * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def test_the_merged_copy_serves_the_adapter_of_the_moment(encoders, copies):
    queries, _ = encoders
    initial, before = queries.adapter_state(), queries.encode_queries(QUERIES)
    for version, state in enumerate([initial, moved(initial, 1), moved(initial, 2), initial]):
        queries.set_adapter_state(state, version)
        expected = queries.encode_queries(QUERIES)
        torch.testing.assert_close(copies["float32"].encode_queries(QUERIES), expected, atol=2e-6, rtol=0)
        close = torch.nn.functional.cosine_similarity(copies["bfloat16"].encode_queries(QUERIES), expected)
        assert close.min() > 0.999
        assert copies["float32"].adapter_version == version
        if version in (1, 2):
            assert (expected - before).abs().max() > 0.01


def test_a_change_under_the_same_version_number_is_noticed(encoders, copies):
    """An optimiser step changes the tensors before anybody raises the version."""
    queries, _ = encoders
    before = copies["float32"].encode_queries(QUERIES)
    with torch.no_grad():
        for name, parameter in queries.lora_parameters().items():
            if "lora_B" in name:
                parameter.add_(0.05)
    after = copies["float32"].encode_queries(QUERIES)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, queries.encode_queries(QUERIES), atol=2e-6, rtol=0)


def test_the_copy_leaves_the_model_that_learns_alone(encoders, copies):
    queries, _ = encoders
    weights = {name: value.clone() for name, value in queries.base.model.state_dict().items()}
    copies["bfloat16"].load_adapter(queries.adapter_bytes(), 7)
    copies["bfloat16"].encode_queries(QUERIES)
    assert queries.adapter_version == 7
    for name, value in queries.base.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    vectors = queries.encode_queries(QUERIES, training=True)
    vectors.sum().backward()
    assert all(p.grad is not None for p in queries.lora_parameters().values())
    for parameter in queries.lora_parameters().values():
        parameter.grad = None
    assert not any(p.requires_grad for p in copies["bfloat16"]._model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_query_alone_equals_the_query_among_others(copies, dtype):
    together = copies[dtype].encode_queries(QUERIES * 7)
    for position, query in enumerate(QUERIES * 7):
        alone = copies[dtype].encode_queries([query])[0]
        torch.testing.assert_close(together[position], alone, atol=1e-5 if dtype == "float32" else 4e-3, rtol=0)


def test_adapter_bytes_and_folder_are_the_same_adapter(encoders, tmp_path):
    queries, _ = encoders
    state = moved(queries.adapter_state(), 3)
    queries.set_adapter_state(state, 1)
    queries.save_adapter(tmp_path / "a")
    data = queries.adapter_bytes()
    for source in (data, tmp_path / "a"):
        queries.set_adapter_state(moved(state, 4), 2)
        queries.load_adapter(source, 9)
        assert queries.adapter_version == 9
        assert all(torch.equal(value, state[name]) for name, value in queries.adapter_state().items())
    queries.set_adapter_state({name: value * float("nan") for name, value in state.items()}, 10)
    nan = queries.adapter_bytes()
    queries.load_adapter(data, 9)
    for bad in (b"", b"not safetensors", data[:-8], b"\xff" * 8 + data[8:], nan):
        with pytest.raises(ValueError, match="the adapter"):
            queries.load_adapter(bad, 11)
        assert queries.adapter_version == 9
        assert all(torch.equal(value, state[name]) for name, value in queries.adapter_state().items())


def test_number_formats(monkeypatch):
    for native, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda native=native: {"avx512_bf16": native})
        assert resolve_dtype("auto", "cpu") == expected
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # another architecture has other names
    assert resolve_dtype("auto", "cpu") == "float32" and resolve_dtype("bfloat16", "cpu") == "bfloat16"
    with pytest.raises(ValueError, match="needs a GPU"):
        resolve_dtype("float16", "cpu")
    with pytest.raises(ValueError, match="'int8' is not supported"):
        resolve_dtype("int8", "cpu")
    for native, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert resolve_dtype("auto", "cuda") == expected


def test_an_adapter_that_would_break_every_search_is_refused_and_the_one_before_serves_on(encoders, copies):
    from safetensors.torch import save

    queries, _ = encoders
    serving, good = copies["bfloat16"], queries.adapter_state()
    before = serving.encode_queries(QUERIES)
    names = {name.replace(".default.", "."): value for name, value in good.items()}
    huge = save({name: torch.full_like(value, 1e30) for name, value in names.items()})
    wide = save({name: torch.full_like(value, 1e300, dtype=torch.float64) for name, value in names.items()})
    short = save({name: value.to(torch.float8_e4m3fn) for name, value in names.items()})
    turned = save({name: value.to(torch.complex64) for name, value in names.items()})
    for bad, says in (
        (huge, "not finite"),
        (wide, "not finite"),
        (short, "float8_e4m3fn; save it in float32"),
        (turned, "complex64"),
    ):
        with pytest.raises(ValueError, match=says):
            serving.load_adapter(bad, 5)
        assert serving.adapter_version == 0
        assert torch.equal(serving.encode_queries(QUERIES), before)
    half = save({name: value.half() for name, value in names.items()})
    serving.load_adapter(half, 5)
    assert serving.adapter_version == 5


def test_vectors_of_a_short_format_have_length_one(copies):
    lengths = copies["bfloat16"].encode_queries(QUERIES).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(len(QUERIES)), atol=1e-6, rtol=0)


def test_lengths_come_in_steps_so_that_few_shapes_are_met(loaded):
    model = loaded[0].base.model
    shapes = {model.preprocess([" ".join(["town"] * n)])["input_ids"].shape[1] for n in range(1, 30)}
    assert shapes == set(range(4, 33, 4))
