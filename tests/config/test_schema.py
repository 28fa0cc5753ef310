"""The typed settings: paper defaults, one way in, errors that name key, value and fix."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge import config
from verl_bridge.algorithms.gca import RoutingTable
from verl_bridge.config import schema
from verl_bridge.config.schema import SECTIONS, ConfigError, VerlBridgeConfig

GROUP = Path(config.__file__).parent / "verl_bridge"


def refused(settings) -> str:
    with pytest.raises(ConfigError) as error:
        VerlBridgeConfig.from_mapping(settings)
    return str(error.value)


def test_defaults_are_the_papers():
    settings = VerlBridgeConfig.from_mapping(None)
    gca, bridge, retriever = settings.gca, settings.bridge, settings.retriever
    assert not gca.enable and not bridge.enable
    assert (gca.rho, gca.s, gca.kappa, gca.c_max, gca.margin_k, gca.entropy_m) == (0.2, 1.0, 0.1, 0.5, 3, 32)
    assert (bridge.gamma, bridge.lr, bridge.interval, bridge.clip) == (0.25, 1e-5, 1, 0.2)
    assert (bridge.tau_retrieval, bridge.tau_posterior, bridge.tau_likelihood) == (0.4, 0.5, 1.0)
    assert (retriever.shown, retriever.top_k, retriever.lora_rank) == (3, 10, 16)
    assert (settings.agent.max_turns, settings.agent.observation_tokens) == (5, 500)


def test_default_routing_is_the_algorithms_table():
    assert RoutingTable(**VerlBridgeConfig().gca.routing_rows()) == RoutingTable()


def test_yaml_lists_every_setting_at_its_default():
    """Without an entry there, `verl_bridge.gca.rho=…` on a command line would be refused by Hydra."""
    shared = yaml.safe_load((GROUP / "shared.yaml").read_text())["verl_bridge"]
    assert shared == VerlBridgeConfig().to_dict()
    assert VerlBridgeConfig.from_mapping(shared) == VerlBridgeConfig()


def test_every_field_says_what_it_is():
    for section in SECTIONS.values():
        assert section.__doc__
        for option in dataclasses.fields(section):
            assert len(option.metadata["doc"]) > 15, option.name


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        VerlBridgeConfig().gca.rho = 1.0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"gca": {"roh": 0.1}}, ["verl_bridge.gca.roh=0.1", "rho, s, kappa", "did you mean 'rho'?"]),
        ({"bridg": {}}, ["verl_bridge.bridg", "did you mean 'bridge'?"]),
        ({"bridge": {"credit_weights": "posterio"}}, ["verl_bridge.bridge.credit_weights='posterio'", "'posterior'?"]),
        ({"gca": {"rho": "much"}}, ["verl_bridge.gca.rho='much'", "float"]),
        ({"gca": {"enable": 1}}, ["verl_bridge.gca.enable=1", "bool"]),
        ({"retriever": {"top_k": True}}, ["verl_bridge.retriever.top_k=True", "int"]),
        ({"retriever": {"top_k": 2}}, ["verl_bridge.retriever.top_k=2", "verl_bridge.retriever.shown=3"]),
        ({"retriever": {"lora_rank": 0}}, ["verl_bridge.retriever.lora_rank=0", "at least 1"]),
        ({"bridge": {"tau_retrieval": 0}}, ["verl_bridge.bridge.tau_retrieval=0.0", "above 0"]),
        ({"bridge": {"clip": 1}}, ["verl_bridge.bridge.clip=1.0", "below 1"]),
        ({"bridge": {"gamma": float("nan")}}, ["verl_bridge.bridge.gamma=nan", "finite"]),
        ({"gca": {"kappa": 1.0}}, ["verl_bridge.gca.kappa=1.0", "below 1"]),
        ({"bridge": [1]}, ["verl_bridge.bridge=[1]", "not a group"]),
        ({"gca": None}, ["verl_bridge.gca=null", "leave it out"]),
        ({"retriever": {"encoder": ""}}, ["verl_bridge.retriever.encoder=''", "empty"]),
        ({"retriever": {"url": ""}}, ["verl_bridge.retriever.url=''", "null"]),
        ({"retriever": {"token_env": ""}}, ["verl_bridge.retriever.token_env=''", "give a value"]),
        ({"retriever": {"family": "e6"}}, ["verl_bridge.retriever.family='e6'", "e5, bge, gte, minilm, contriever"]),
        ({"retriever": {"pooling": "max"}}, ["verl_bridge.retriever.pooling='max'", "mean, cls"]),
        ({"retriever": {"normalize": "yes"}}, ["verl_bridge.retriever.normalize='yes'", "bool"]),
        ({"retriever": {"max_length": 0}}, ["verl_bridge.retriever.max_length=0", "at least 1"]),
        ({"retriever": {"compute_dtype": "bf16"}}, ["verl_bridge.retriever.compute_dtype='bf16'", "bfloat16"]),
        ({"retriever": {"search_dtype": "int8"}}, ["verl_bridge.retriever.search_dtype='int8'", "auto"]),
        ({"retriever": {"deadline": 0}}, ["verl_bridge.retriever.deadline=0.0", "above 0"]),
        ({"retriever": {"replicas": 0}}, ["verl_bridge.retriever.replicas=0", "at least 1"]),
        (
            {"retriever": {"url": "http://a:1", "replicas": 2}},
            ["verl_bridge.retriever.url='http://a:1'", "verl_bridge.retriever.replicas=2", "replicas=1, or url=null"],
        ),
        (
            {"retriever": {"url": "http://a:1", "shards": 3}},
            ["verl_bridge.retriever.url='http://a:1'", "verl_bridge.retriever.shards=3", "shards=1, or url=null"],
        ),
        ("bridge_gca", ["verl_bridge='bridge_gca'", "plugin", "verl-bridge doctor"]),
        ({"gca": {"routing": {"E": {}}}}, ["verl_bridge.gca.routing.E", "A, B1, B2, C, D"]),
        ({"gca": {"routing": {"A": {"ANSWER": 1}}}}, ["verl_bridge.gca.routing.A.ANSWER=1", "VSEARCH, RSEARCH, ANS"]),
        ({"gca": {"routing": {"A": {"ANS": "x"}}}}, ["verl_bridge.gca.routing.A.ANS='x'", "finite number"]),
        ({"gca": {"routing": {"B2": {"VSEARCH": -0.1}}}}, ["verl_bridge.gca.routing.B2.VSEARCH=-0.1", "at least 0"]),
    ],
)
def test_refusals_name_key_value_and_fix(settings, parts):
    message = refused(settings)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_bound_is_named_with_its_numbers():
    message = refused({"gca": {"rho": 0.25}})
    assert "ρ·s·λ_max·c_max ≤ κ" in message and "0.125 > kappa=0.1" in message
    # 0.2 · 1 · 1 · 0.5 is κ itself: allowed, and so is a larger ρ under a smaller table
    VerlBridgeConfig.from_mapping({"gca": {"rho": 0.2}})
    VerlBridgeConfig.from_mapping({"gca": {"rho": 0.4, "routing": {"B1": {"ANS": -0.5}}}})


def test_a_merged_search_segment_has_one_number_of_any_sign():
    merged = {"merged_search": True, "routing": {k: {"VSEARCH": -0.2, "RSEARCH": -0.2} for k in ("A", "B1", "B2")}}
    merged["routing"] |= {k: {"VSEARCH": 0.0, "RSEARCH": 0.0} for k in ("C", "D")}
    gca = VerlBridgeConfig.from_mapping({"gca": merged}).gca
    table = RoutingTable(**gca.routing_rows(), merged=gca.merged_search)
    assert table.a[:2] == (-0.2, -0.2) and table.b1 == (-0.2, -0.2, -1.0)
    assert "never blamed" in refused({"gca": {**merged, "merged_search": False}})
    message = refused({"gca": {"merged_search": True}})
    assert "routing.A: VSEARCH=0.5 and RSEARCH=-0.5" in message and "--merged-table" in message


@settings(deadline=None)
@given(
    rho=st.floats(0, 4), s=st.floats(0, 4), kappa=st.floats(0.01, 0.99), c_max=st.floats(0.01, 1), ans=st.floats(-4, 4)
)
def test_schema_and_algorithm_agree_on_the_bound(rho, s, kappa, c_max, ans):
    """What the schema lets through the algorithm accepts, and the other way round (away from the rounding edge)."""
    product = rho * s * max(1.0, abs(ans)) * c_max
    if abs(product - kappa) < 1e-6:
        return
    values = {"rho": rho, "s": s, "kappa": kappa, "c_max": c_max, "routing": {"A": {"ANS": ans}}}
    if product > kappa:
        assert "is broken" in refused({"gca": values})
        rows = {**VerlBridgeConfig().gca.routing_rows(), "a": (0.5, -0.5, ans)}
        with pytest.raises(ValueError, match="bound"):
            RoutingTable(**rows).check_bound(rho=rho, scale=s, kappa=kappa, c_max=c_max)
    else:
        gca = VerlBridgeConfig.from_mapping({"gca": values}).gca
        assert gca.routing_rows()["a"] == (0.5, -0.5, ans)
        RoutingTable(**gca.routing_rows()).check_bound(rho=rho, scale=s, kappa=kappa, c_max=c_max)


def test_partial_routing_keeps_the_rest_and_never_changes_the_default():
    changed = VerlBridgeConfig.from_mapping({"gca": {"routing": {"A": {"ANS": 0.25}}}}).gca.routing
    assert changed["A"] == {"VSEARCH": 0.5, "RSEARCH": -0.5, "ANS": 0.25}
    assert changed["B1"] == {"VSEARCH": 0.5, "RSEARCH": -0.5, "ANS": -1.0}
    assert VerlBridgeConfig().gca.routing["A"]["ANS"] == 0.5


def test_whole_numbers_are_fine_for_floats_and_nulls_for_optionals():
    settings = VerlBridgeConfig.from_mapping({"gca": {"s": 1, "base_estimator": None}, "bridge": {"token_budget": 512}})
    assert settings.gca.s == 1.0 and type(settings.gca.s) is float
    assert settings.bridge.token_budget == 512
    assert VerlBridgeConfig.from_mapping(settings.to_dict()) == settings


def test_families_are_the_retrievers():
    """The schema may not import what it configures, so it repeats the names."""
    from verl_bridge.retrieval.families import FAMILIES

    assert schema.FAMILIES == tuple(FAMILIES)


def test_an_empty_prefix_is_a_prefix_and_null_is_the_familys():
    retriever = VerlBridgeConfig.from_mapping({"retriever": {"query_prefix": "", "family": "e5"}}).retriever
    assert (retriever.query_prefix, retriever.passage_prefix) == ("", None)


def test_spread_over_copies_or_parts():
    spread = {
        (replicas, shards): VerlBridgeConfig.from_mapping(
            {"retriever": {"replicas": replicas, "shards": shards}}
        ).retriever.spread
        for replicas in (1, 2)
        for shards in (1, 2)
    }
    assert spread == {(1, 1): False, (1, 2): True, (2, 1): True, (2, 2): True}
    assert not VerlBridgeConfig.from_mapping({"retriever": {"url": "http://a:1,http://b:1"}}).retriever.spread
