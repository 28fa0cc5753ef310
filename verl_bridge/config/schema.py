"""The settings under ``verl_bridge:`` as frozen dataclasses; no torch, no verl, no Hydra.

Every field carries its documentation, its allowed values and its origin: ``[paper]`` (stated by the GCA or BRIDGE
summary), ``[ours]`` (not stated there, fixed here). :meth:`VerlBridgeConfig.from_mapping` is the one way in: it rejects
unknown keys and bad values with a message that names the key, the value, what is allowed and the closest match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

#: The choices of the Hydra group `verl_bridge`.
ARMS = ("baseline", "gca", "bridge", "bridge_gca")
#: The name that asks for GCA where verl names its estimators: algorithm.adv_estimator.
GCA_ESTIMATOR = "gca"

ROLLOUT_TYPES = ("A", "B1", "B2", "C", "D")
SEGMENTS = ("VSEARCH", "RSEARCH", "ANS")

# λ(type, segment): signs and ordering [paper], magnitudes [ours]. D is its retrievable half; the rest leaves the loss.
DEFAULT_ROUTING: dict[str, dict[str, float]] = {
    "A": {"VSEARCH": 0.5, "RSEARCH": -0.5, "ANS": 0.5},
    "B1": {"VSEARCH": 0.5, "RSEARCH": -0.5, "ANS": -1.0},
    "B2": {"VSEARCH": 0.5, "RSEARCH": -0.25, "ANS": 0.0},
    "C": {"VSEARCH": 0.0, "RSEARCH": 0.0, "ANS": 0.0},
    "D": {"VSEARCH": 0.0, "RSEARCH": -0.25, "ANS": -0.5},
}


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value and the fix."""


def _option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    not_built: Mapping[str, str] | None = None,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    fixed: str | None = None,
) -> Any:
    """A documented field. ``not_built``: known values and their substitutes; ``fixed``: why no other value works."""
    metadata = {
        "doc": doc,
        "choices": choices,
        "not_built": not_built or {},
        "low": low,
        "high": high,
        "open_low": open_low,
        "open_high": open_high,
        "fixed": fixed,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class GCAConfig:
    """Grounded credit assignment: bounded token-level residuals on top of any base advantage."""

    enable: bool = _option(False, "Rewrite advantages with GCA's residual.")
    base_estimator: str | None = _option(
        None,
        "verl's estimator that makes the base advantage. null: the recipe's own algorithm.adv_estimator, or grpo when "
        "that is 'gca' [ours].",
    )
    rho: float = _option(0.2, "Strength ρ of the residual [ours].", low=0)
    s: float = _option(1.0, "Scale on the whole routing table [paper: swept; default ours].", low=0)
    kappa: float = _option(
        0.1,
        "Bound κ on a token's relative change: ρ·s·λ_max·c_max ≤ κ < 1 [paper].",
        low=0,
        open_low=True,
        high=1,
        open_high=True,
    )
    c_max: float = _option(0.5, "Largest salience of a token [paper].", low=0, open_low=True, high=1)
    routing: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: dict(row) for name, row in DEFAULT_ROUTING.items()},
        metadata={"doc": "λ by rollout type and segment; entries given replace these [paper: signs, ours: sizes]."},
    )
    salience: str = _option(
        "uniform",
        "Token salience: uniform (c_max/2 everywhere, the paper's 'w/o salience') or margin_entropy [paper].",
        choices=("uniform", "margin_entropy"),
        not_built={"margin_entropy": "uniform"},
    )
    margin_k: int = _option(
        3, "K: other tokens in the margin [paper].", low=1, fixed="only salience: margin_entropy reads it"
    )
    entropy_m: int = _option(
        32, "M: tokens in the entropy [paper].", low=2, fixed="only salience: margin_entropy reads it"
    )
    yes_no: str = _option(
        "gate",
        "Questions with a yes/no gold: gate (no residual, no mask), keep (as any other), drop (not trained on) [ours].",
        choices=("gate", "keep", "drop"),
        not_built={"drop": "gate"},
    )
    oracle_query: bool = _option(
        False,
        "Decide 'retrievable' for correct rollouts without a hit by searching question + gold [paper].",
        fixed="the oracle query is not built yet",
    )

    def routing_rows(self) -> dict[str, tuple[float, float, float]]:
        """The table as keywords of ``algorithms.gca.RoutingTable``: (VSEARCH, RSEARCH, ANS) by type."""
        names = {"D": "d_retrievable"}
        return {
            names.get(name, name.lower()): (row["VSEARCH"], row["RSEARCH"], row["ANS"])
            for name, row in self.routing.items()
        }


@dataclass(frozen=True)
class BridgeConfig:
    """BRIDGE: the retriever's query adapter trained from RL credit and a RAG likelihood."""

    enable: bool = _option(False, "Train the retriever's query adapter.")
    gamma: float = _option(0.25, "Weight γ in (L_RL + γ·L_RAG)/(1 + γ) [paper].", low=0)
    lr: float = _option(1e-5, "AdamW learning rate of the adapter [paper].", low=0, open_low=True)
    interval: int = _option(1, "Policy steps between retriever updates [ours].", low=1)
    likelihood_context: str = _option(
        "question",
        "What precedes the document when the gold is scored: question, or prefix (the trajectory so far) [ours].",
        choices=("question", "prefix"),
        not_built={"prefix": "question"},
    )
    credit_weights: str = _option(
        "likelihood",
        "w_d: likelihood, softmax(ℓ_d/τ_p), or posterior, ∝ p_old(d|q)·exp(ℓ_d/τ_p) [paper; forms ours].",
        choices=("likelihood", "posterior"),
    )
    tau_retrieval: float = _option(0.4, "Temperature τ_r of the retrieval distribution [paper].", low=0, open_low=True)
    tau_posterior: float = _option(0.5, "Temperature τ_p of the credit weights [paper].", low=0, open_low=True)
    tau_likelihood: float = _option(1.0, "Temperature τ_l of the RAG loss [ours].", low=0, open_low=True)
    clip: float = _option(0.2, "PPO clip ε of the document ratio [ours].", low=0, open_low=True, high=1, open_high=True)
    minibatch_size: int | None = _option(
        None, "Retrieval turns in one optimiser step. null: all of a batch in one [ours].", low=1
    )
    epochs: int = _option(1, "Passes over a batch's retrieval turns [ours].", low=1)
    schedule: str = _option(
        "bridge",
        "Order of the two learners; the others are the paper's comparisons [ours: definitions].",
        choices=("bridge", "frozen", "rag_then_rl", "rl_then_rag", "joint"),
        not_built=dict.fromkeys(("frozen", "rag_then_rl", "rl_then_rag", "joint"), "bridge"),
    )
    estimator: str = _option(
        "bridge",
        "Policy gradient of the penalised problem: bridge, two_state [paper], drop [ours].",
        choices=("bridge", "two_state", "drop"),
        not_built=dict.fromkeys(("two_state", "drop"), "bridge"),
    )
    token_budget: int | None = _option(
        None,
        "Tokens in one micro-batch of the likelihood pass. null: the recipe's "
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu [ours].",
        low=1,
    )


@dataclass(frozen=True)
class RetrieverConfig:
    """The search tool: a frozen document index and a query encoder with a LoRA adapter."""

    encoder: str | None = _option(None, "Sentence encoder: a folder or a name sentence-transformers can load.")
    index: str | None = _option(None, "Folder of the FAISS index made by `verl-bridge index build`.")
    corpus: str | None = _option(None, "Corpus file, JSONL or JSONL.gz, with the documents of the index in its order.")
    probe: str | None = _option(
        None, "JSONL of {query, golden_answers}: recall on these is logged at every validation."
    )
    query_prefix: str = _option("", "Put before every query ('query: ' for E5), in serving and in training.")
    passage_prefix: str = _option("", "Put before every passage when the index is built ('passage: ' for E5).")
    shown: int = _option(3, "Passages shown to the model for one search [paper].", low=1)
    top_k: int = _option(10, "Candidates kept for learning, at least `shown` [paper: 10; 40 medical].", low=1)
    query_input: str = _option(
        "query",
        "What is encoded: query, or question_query (the question joined to the query) [ours].",
        choices=("query", "question_query"),
        not_built={"question_query": "query"},
    )
    lora_rank: int = _option(16, "Rank of the query adapter [paper].", low=1)
    url: str | None = _option(None, "Address of a retrieval server.", fixed="serving over the network is not built yet")
    actor_name: str = _option("verl_bridge_retriever", "Name of the Ray actor that serves the retriever in a job.")
    threads: int = _option(1, "CPU threads of the retriever's encoder and search [ours].", low=1)
    load_timeout: float = _option(300.0, "Seconds the retriever may take to load corpus, index and encoder.", low=1)
    replicas: int = _option(1, "Copies of the retriever.", low=1, fixed="more than one copy is not built yet")


@dataclass(frozen=True)
class AgentConfig:
    """The search agent loop."""

    max_turns: int = _option(5, "Most assistant turns of a rollout [paper].", low=1)
    observation_tokens: int = _option(500, "Tokens kept of one observation, from its head [Search-R1].", low=32)


@dataclass(frozen=True)
class VerlBridgeConfig:
    """Everything under ``verl_bridge:``.

    Raises:
        ConfigError: from :meth:`from_mapping`, for an unknown key, a bad value, a value that is not built yet, a
            routing table that breaks the bound ρ·s·λ_max·c_max ≤ κ, or ``top_k`` below ``shown``.
    """

    gca: GCAConfig = field(default_factory=GCAConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    trace_interval: int = _option(1, "Save the traces of every so many steps; 0 saves none.", low=0)
    run_dir: str | None = _option(
        None, "Folder for saved traces and the trained adapter. null: verl_bridge/ in trainer.default_local_dir."
    )

    def __post_init__(self) -> None:
        for name in SECTIONS:
            _check_section(f"verl_bridge.{name}", getattr(self, name))
        for option in fields(self):
            if option.name in TOP_LEVEL:
                _check_value(f"verl_bridge.{option.name}", getattr(self, option.name), option)
        _check_routing(self.gca)
        if self.retriever.top_k < self.retriever.shown:
            raise ConfigError(
                f"verl_bridge.retriever.top_k={self.retriever.top_k} is below verl_bridge.retriever.shown="
                f"{self.retriever.shown}: keep at least as many candidates as are shown"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any] | None) -> VerlBridgeConfig:
        """Check and build from plain containers (``OmegaConf.to_container(..., resolve=True)``); None: defaults."""
        settings = _mapping("verl_bridge", settings)
        _check_keys("verl_bridge", settings, [*SECTIONS, *TOP_LEVEL])
        sections = {}
        for name, section in SECTIONS.items():
            key = f"verl_bridge.{name}"
            if name in settings and settings[name] is None:
                raise ConfigError(f"{key}=null would drop its settings silently: leave it out, or set its keys")
            values = dict(_mapping(key, settings.get(name)))
            options = {option.name: option for option in fields(section)}
            _check_keys(key, values, options)
            if "routing" in values:
                values["routing"] = _merge_routing(f"{key}.routing", values["routing"])
            # YAML and command lines write 1 where 1.0 is meant.
            for option, value in values.items():
                if options[option].type == "float" and type(value) is int:
                    values[option] = float(value)
            sections[name] = section(**values)
        return cls(**sections, **{name: settings[name] for name in TOP_LEVEL if name in settings})

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; the inverse of :meth:`from_mapping`."""
        return asdict(self)


SECTIONS: dict[str, type] = {
    "gca": GCAConfig,
    "bridge": BridgeConfig,
    "retriever": RetrieverConfig,
    "agent": AgentConfig,
}

TOP_LEVEL = ("trace_interval", "run_dir")

_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        hint = " (did verl_bridge's plugin load? run `verl-bridge doctor`)" if key == "verl_bridge" else ""
        raise ConfigError(f"{key}={value!r} is not a group of settings{hint}")
    return value


def _closest(word: Any, words: Iterable[str]) -> str:
    match = get_close_matches(str(word), list(words), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_keys(key: str, values: Mapping[str, Any], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for name, value in values.items():
        if name not in allowed:
            raise ConfigError(
                f"unknown setting {key}.{name}={value!r}: allowed are {', '.join(allowed)}{_closest(name, allowed)}"
            )


def _check_section(key: str, section: Any) -> None:
    for option in fields(section):
        if option.name != "routing":
            _check_value(f"{key}.{option.name}", getattr(section, option.name), option)


def _check_value(key: str, value: Any, option: Any) -> None:
    rules = option.metadata
    name, _, optional = option.type.partition(" | ")
    if value is None and optional:
        return
    if type(value) is not _TYPES[name]:
        raise ConfigError(f"{key}={value!r} is not of type {name}")
    if value == "" and option.default != "":
        raise ConfigError(f"{key}='' is empty: {'give a value, or null' if optional else 'give a value'}")
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(
            f"{key}={value!r}: allowed are {', '.join(rules['choices'])}{_closest(value, rules['choices'])}"
        )
    if value in rules["not_built"]:
        raise ConfigError(f"{key}={value!r} is not built yet: use {option.name}: {rules['not_built'][value]}")
    if rules["fixed"] and value != option.default:
        raise ConfigError(f"{key}={value!r}: {rules['fixed']}; leave it at {option.default!r}")
    low, high = rules["low"], rules["high"]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r} is not finite")
    if low is not None and (value < low or (rules["open_low"] and value == low)):
        raise ConfigError(f"{key}={value!r}: it must be {'above' if rules['open_low'] else 'at least'} {low}")
    if high is not None and (value > high or (rules["open_high"] and value == high)):
        raise ConfigError(f"{key}={value!r}: it must be {'below' if rules['open_high'] else 'at most'} {high}")


def _merge_routing(key: str, given: Any) -> dict[str, dict[str, float]]:
    routing = {name: dict(row) for name, row in DEFAULT_ROUTING.items()}
    given = _mapping(key, given)
    _check_keys(key, given, ROLLOUT_TYPES)
    for name, row in given.items():
        row = _mapping(f"{key}.{name}", row)
        _check_keys(f"{key}.{name}", row, SEGMENTS)
        for segment, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{key}.{name}.{segment}={value!r} is not a finite number")
            routing[name][segment] = float(value)
    return routing


def _check_routing(gca: GCAConfig) -> None:
    for name, row in gca.routing.items():
        if row["VSEARCH"] < 0:
            raise ConfigError(
                f"verl_bridge.gca.routing.{name}.VSEARCH={row['VSEARCH']}: the search that found the evidence is never "
                "blamed; use a value of at least 0"
            )
    largest = max(abs(value) for row in gca.routing.values() for value in row.values())
    reach = gca.rho * gca.s * largest * gca.c_max
    if reach > gca.kappa * (1 + 1e-9):
        raise ConfigError(
            f"the bound ρ·s·λ_max·c_max ≤ κ is broken: verl_bridge.gca.rho={gca.rho} × s={gca.s} × largest |λ| in "
            f"routing={largest} × c_max={gca.c_max} = {reach:.4g} > kappa={gca.kappa}: lower one of them or raise kappa"
        )
