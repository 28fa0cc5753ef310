"""The settings under ``verl_bridge:`` as frozen dataclasses; no torch, no verl, no Hydra.

Every field carries its documentation, its allowed values and its origin: ``[paper]`` (stated by the GCA or BRIDGE
summary), ``[ours]`` (not stated there, fixed here). :meth:`VerlBridgeConfig.from_mapping` is the one way in: it rejects
unknown keys and bad values with a message that names the key, the value, what is allowed and the closest match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verl_bridge.config.options import ConfigError, check_keys, check_section, check_value, mapping, option

#: The choices of the Hydra group `verl_bridge`.
ARMS = ("baseline", "gca", "bridge", "bridge_gca")
#: The name that asks for GCA where verl names its estimators: algorithm.adv_estimator.
GCA_ESTIMATOR = "gca"

#: Names in verl_bridge.retrieval.families (a test holds them equal).
FAMILIES = ("e5", "bge", "gte", "minilm", "contriever")
DTYPES = ("float32", "bfloat16", "float16", "auto")
LR_SCHEDULES = ("constant", "linear", "cosine")

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


@dataclass(frozen=True)
class GCAConfig:
    """Grounded credit assignment: bounded token-level residuals on top of any base advantage."""

    enable: bool = option(False, "Rewrite advantages with GCA's residual.")
    base_estimator: str | None = option(
        None,
        "verl's estimator that makes the base advantage. null: the recipe's own algorithm.adv_estimator, or grpo when "
        "that is 'gca' [ours].",
    )
    rho: float = option(0.2, "Strength ρ of the residual [ours].", low=0)
    s: float = option(1.0, "Scale on the whole routing table [paper: swept; default ours].", low=0)
    kappa: float = option(
        0.1,
        "Bound κ on a token's relative change: ρ·s·λ_max·c_max ≤ κ < 1 [paper].",
        low=0,
        open_low=True,
        high=1,
        open_high=True,
    )
    c_max: float = option(0.5, "Largest salience of a token [paper].", low=0, open_low=True, high=1)
    routing: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: dict(row) for name, row in DEFAULT_ROUTING.items()},
        metadata={"doc": "λ by rollout type and segment; entries given replace these [paper: signs, ours: sizes]."},
    )
    salience: str = option(
        "margin_entropy",
        "Token salience: margin_entropy, or uniform (c_max/2 everywhere, the paper's 'w/o salience') [paper].",
        choices=("uniform", "margin_entropy"),
    )
    margin_k: int = option(3, "K: other tokens in the margin [paper].", low=1)
    entropy_m: int = option(32, "M: tokens in the entropy [paper].", low=2)
    merged_search: bool = option(
        False,
        "Ablation: one search segment per type. The routing's VSEARCH and RSEARCH are then one number, which may be "
        "negative; `verl-bridge eval --merged-table` measures the table [paper].",
    )
    alias_matching: str = option(
        "search_r1",
        "How a passage is searched for the gold: search_r1 (the normalisation of its exact match), or unicode (width, "
        "case, Latin accents and dashes unified, scripts without spaces by character) [ours].",
        choices=("search_r1", "unicode"),
    )
    yes_no: str = option(
        "gate",
        "Questions with a yes/no gold: gate (no residual, no mask), keep (as any other), drop (left out of the "
        "training data) [ours].",
        choices=("gate", "keep", "drop"),
    )
    oracle_query: bool = option(
        False,
        "Decide 'retrievable' for right answers without a hit by searching question + gold, too [paper].",
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

    enable: bool = option(False, "Train the retriever's query adapter.")
    gamma: float = option(0.25, "Weight γ in (L_RL + γ·L_RAG)/(1 + γ) [paper].", low=0)
    lr: float = option(1e-5, "AdamW learning rate of the adapter [paper].", low=0, open_low=True)
    interval: int = option(1, "Policy steps between retriever updates [ours].", low=1)
    likelihood_context: str = option(
        "question",
        "What precedes the document when the gold is scored: question, or prefix (the trajectory so far) [ours].",
        choices=("question", "prefix"),
    )
    credit_weights: str = option(
        "likelihood",
        "w_d: likelihood, softmax(ℓ_d/τ_p), or posterior, ∝ p_old(d|q)·exp(ℓ_d/τ_p) [paper; forms ours].",
        choices=("likelihood", "posterior"),
    )
    tau_retrieval: float = option(0.4, "Temperature τ_r of the retrieval distribution [paper].", low=0, open_low=True)
    tau_posterior: float = option(0.5, "Temperature τ_p of the credit weights [paper].", low=0, open_low=True)
    tau_likelihood: float = option(1.0, "Temperature τ_l of the RAG loss [ours].", low=0, open_low=True)
    clip: float = option(0.2, "PPO clip ε of the document ratio [ours].", low=0, open_low=True, high=1, open_high=True)
    minibatch_size: int | None = option(
        None, "Retrieval turns in one optimiser step. null: all of a batch in one [ours].", low=1
    )
    epochs: int = option(1, "Passes over a batch's retrieval turns [ours].", low=1)
    golds: str = option(
        "first",
        "Which gold answer ℓ_d is of: first, or best, for every document the likeliest of its aliases [ours].",
        choices=("first", "best"),
    )
    length_normalize: bool = option(False, "Divide ℓ_d by the answer's tokens [ours].")
    token_budget: int | None = option(
        None,
        "About the most tokens that one update has scored; a uniform sample of the turns stands for the rest. null: "
        "no bound [ours].",
        low=1,
    )
    micro_batch_tokens: int | None = option(
        None,
        "Tokens in one micro-batch of the likelihood pass. null: the recipe's "
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu [ours].",
        low=1,
    )
    lr_schedule: str = option(
        "constant",
        "Course of the learning rate over the run's updates: constant, linear or cosine down to 0 [ours].",
        choices=LR_SCHEDULES,
    )
    lr_warmup: int = option(0, "Updates over which the learning rate rises: update i of w takes i/w [ours].", low=0)
    weight_decay: float = option(0.0, "AdamW weight decay of the adapter [ours].", low=0)
    max_grad_norm: float = option(
        1.0, "Gradient norm above which gradients are scaled down [ours].", low=0, open_low=True
    )
    compute_dtype: str = option(
        "float32",
        "Number format of the encoder's matrix products while it learns; weights and moments stay in float32. auto: "
        "bfloat16 on a GPU, float32 elsewhere [ours].",
        choices=("float32", "bfloat16", "auto"),
    )
    max_staleness: int = option(
        8,
        "Asynchronous trainers: how many versions ago a retrieval turn may have been served to be learnt from; older "
        "ones are left out and counted. The synchronous trainer has none [ours].",
        low=0,
    )
    schedule: str = option(
        "bridge",
        "Order of the two learners: bridge (retriever, then policy, every step), frozen (only the policy), "
        "rag_then_rl (only the retriever, from the RAG loss, for `schedule_steps`, then only the policy), rl_then_rag "
        "(the reverse), joint (policy, then retriever only from RL credit, every step) [paper: names, ours: "
        "definitions].",
        choices=("bridge", "frozen", "rag_then_rl", "rl_then_rag", "joint"),
    )
    schedule_steps: int | None = option(
        None,
        "Steps of the first phase of rag_then_rl and rl_then_rag. null: half of the run's, anew at every start; set it "
        "where a run may be resumed with more steps [ours].",
        low=1,
    )
    estimator: str = option(
        "bridge",
        "Policy gradient of the penalised problem: bridge; two_state, with both correction terms, at about twice the "
        "cost [paper]; drop, whose retriever follows only the RAG loss [ours].",
        choices=("bridge", "two_state", "drop"),
    )
    worker: str = option(
        "shared",
        "Who learns: shared, the actor that serves (searches wait for an update), or own, an actor of its own that "
        "publishes to it [ours].",
        choices=("shared", "own"),
    )
    device: str | None = option(None, "Torch device of an own worker, such as cuda. null: retriever.device [ours].")
    num_gpus: float = option(0.0, "GPUs, or the fraction of one, that Ray reserves for an own worker [ours].", low=0)
    num_cpus: float = option(0.0, "CPUs that Ray reserves for an own worker [ours].", low=0)


@dataclass(frozen=True)
class RetrieverConfig:
    """The search tool: a frozen document index and a query encoder with a LoRA adapter."""

    encoder: str | None = option(
        None, "Sentence encoder: a folder or a name sentence-transformers can load. null: the one that made the index."
    )
    family: str | None = option(
        None,
        "Its conventions (prefixes, pooling, normalisation) by name; never guessed from the encoder's. null: the "
        "index's.",
        choices=FAMILIES,
    )
    revision: str | None = option(None, "Hub revision of the encoder. null: the index's.")
    query_prefix: str | None = option(
        None,
        "Put before every query ('query: ' for E5), in serving and in training. null: the family's or the index's.",
        empty=True,
    )
    passage_prefix: str | None = option(
        None, "What stands before every passage of the index. null: the family's or the index's.", empty=True
    )
    pooling: str | None = option(
        None, "How token vectors become one. null: the family's or the index's.", choices=("mean", "cls")
    )
    normalize: bool | None = option(None, "Scale vectors to length 1. null: the family's or the index's.")
    max_length: int | None = option(None, "Longest query in tokens. null: the index's.", low=1)
    compute_dtype: str = option(
        "float32",
        "Number format in which queries are encoded; what learns stays in float32 [ours].",
        choices=DTYPES,
    )
    search_dtype: str = option(
        "auto", "Number format of the first pass of an exact search, whose finds are scored in float32.", choices=DTYPES
    )
    index: str | None = option(
        None, "Folder made by `verl-bridge index build`, or a bare FAISS file such as Search-R1's e5_Flat.index."
    )
    corpus: str | None = option(None, "Corpus file, JSONL or JSONL.gz, with the documents of the index in its order.")
    probe: str | None = option(None, "JSONL of {query, golden_answers}: recall on these is logged at every validation.")
    shown: int = option(3, "Passages shown to the model for one search [paper].", low=1)
    top_k: int = option(10, "Candidates kept for learning, at least `shown` [paper: 10; 40 medical].", low=1)
    query_input: str = option(
        "query",
        "What is encoded: query, or question_query (the question joined to the query) [ours].",
        choices=("query", "question_query"),
    )
    lora_rank: int = option(16, "Rank of the query adapter [paper].", low=1)
    url: str | None = option(
        None,
        "Address of a `verl-bridge serve` that answers the searches, comma-separated for several. With BRIDGE the "
        "run publishes its adapter there, so no other run may use it. null: the job serves itself.",
    )
    token_env: str = option(
        "VERL_BRIDGE_TOKEN",
        "Environment variable with the bearer token for `url`; set it wherever Ray starts workers. No token is sent "
        "when it is unset.",
    )
    deadline: float = option(
        30.0, "Seconds for a search or a publication over the network, retries included.", low=0, open_low=True
    )
    actor_name: str = option("verl_bridge_retriever", "Name of the Ray actor that serves the retriever in a job.")
    device: str = option("cpu", "Torch device of encoder and exact search, such as cuda [ours].")
    num_gpus: float = option(0.0, "GPUs, or the fraction of one, that Ray reserves for the job's own server.", low=0)
    restarts: int = option(
        3, "How often Ray starts a retriever actor of the job again after it died; it goes on where it was.", low=0
    )
    threads: int = option(1, "CPU threads of the retriever's encoder and search [ours].", low=1)
    load_timeout: float = option(300.0, "Seconds the retriever may take to load corpus, index and encoder.", low=1)
    replicas: int = option(1, "Copies of the retriever, served by Ray Serve where there is more than one.", low=1)
    shards: int = option(1, "Parts of the index, each on a process of its own; served by Ray Serve.", low=1)

    @property
    def spread(self) -> bool:
        """Whether Ray Serve serves it: more than one copy or more than one part."""
        return self.replicas > 1 or self.shards > 1


@dataclass(frozen=True)
class AgentConfig:
    """The search agent loop."""

    max_turns: int = option(5, "Most assistant turns of a rollout [paper].", low=1)
    turn_tokens: int | None = option(None, "Most tokens of one assistant turn. null: no bound [Search-R1: 500].", low=1)
    observation_tokens: int = option(500, "Tokens kept of one observation, from its head [Search-R1].", low=32)
    correction: str = option(
        "verl_bridge", "What answers an invalid action: our words or Search-R1's.", choices=("verl_bridge", "search_r1")
    )


@dataclass(frozen=True)
class VerlBridgeConfig:
    """Everything under ``verl_bridge:``.

    Raises:
        ConfigError: from :meth:`from_mapping`, for an unknown key, a bad value, a routing
            table that breaks the bound ρ·s·λ_max·c_max ≤ κ, ``top_k`` below ``shown``, or ``url`` together
            with ``replicas`` or ``shards``.
    """

    gca: GCAConfig = field(default_factory=GCAConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    trace_interval: int = option(1, "Save the traces of every so many steps; 0 saves none.", low=0)
    run_dir: str | None = option(
        None, "Folder for saved traces and the trained adapter. null: verl_bridge/ in trainer.default_local_dir."
    )

    def __post_init__(self) -> None:
        for name in SECTIONS:
            check_section(f"verl_bridge.{name}", getattr(self, name))
        for entry in fields(self):
            if entry.name in TOP_LEVEL:
                check_value(f"verl_bridge.{entry.name}", getattr(self, entry.name), entry)
        _check_routing(self.gca)
        _check_retriever(self.retriever)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any] | None) -> VerlBridgeConfig:
        """Check and build from plain containers (``OmegaConf.to_container(..., resolve=True)``); None: defaults."""
        settings = mapping("verl_bridge", settings)
        check_keys("verl_bridge", settings, [*SECTIONS, *TOP_LEVEL])
        sections = {}
        for name, section in SECTIONS.items():
            key = f"verl_bridge.{name}"
            if name in settings and settings[name] is None:
                raise ConfigError(f"{key}=null would drop its settings silently: leave it out, or set its keys")
            values = dict(mapping(key, settings.get(name)))
            options = {entry.name: entry for entry in fields(section)}
            check_keys(key, values, options)
            if "routing" in values:
                values["routing"] = _merge_routing(f"{key}.routing", values["routing"])
            # YAML and command lines write 1 where 1.0 is meant.
            for entry, value in values.items():
                if options[entry].type == "float" and type(value) is int:
                    values[entry] = float(value)
            sections[name] = section(**values)
        return cls(**sections, **{name: settings[name] for name in TOP_LEVEL if name in settings})

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; the inverse of :meth:`from_mapping`."""
        return asdict(self)


SECTIONS = {"gca": GCAConfig, "bridge": BridgeConfig, "retriever": RetrieverConfig, "agent": AgentConfig}

TOP_LEVEL = ("trace_interval", "run_dir")


def _merge_routing(key: str, given: Any) -> dict[str, dict[str, float]]:
    routing = {name: dict(row) for name, row in DEFAULT_ROUTING.items()}
    given = mapping(key, given)
    check_keys(key, given, ROLLOUT_TYPES)
    for name, row in given.items():
        row = mapping(f"{key}.{name}", row)
        check_keys(f"{key}.{name}", row, SEGMENTS)
        for segment, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{key}.{name}.{segment}={value!r} is not a finite number")
            routing[name][segment] = float(value)
    return routing


def _check_retriever(retriever: RetrieverConfig) -> None:
    if retriever.top_k < retriever.shown:
        raise ConfigError(
            f"verl_bridge.retriever.top_k={retriever.top_k} is below verl_bridge.retriever.shown={retriever.shown}: "
            "keep at least as many candidates as are shown"
        )
    for name in ("replicas", "shards"):
        if retriever.url is not None and getattr(retriever, name) > 1:
            raise ConfigError(
                f"verl_bridge.retriever.url={retriever.url!r} and verl_bridge.retriever.{name}="
                f"{getattr(retriever, name)} exclude each other: servers behind a url are started by you, "
                f"comma-separated for several; set {name}=1, or url=null to have Ray Serve start them"
            )


def _check_routing(gca: GCAConfig) -> None:
    for name, row in gca.routing.items():
        if gca.merged_search and row["VSEARCH"] != row["RSEARCH"]:
            raise ConfigError(
                f"verl_bridge.gca.routing.{name}: VSEARCH={row['VSEARCH']} and RSEARCH={row['RSEARCH']} with "
                "verl_bridge.gca.merged_search=true: one search segment has one number, set both to it "
                "(`verl-bridge eval --rollouts FILE --merged-table OUT.yaml` measures it)"
            )
        if row["VSEARCH"] < 0 and not gca.merged_search:
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
