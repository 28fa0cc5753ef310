"""Memory and time of a training run, from a formula that fits on a page. For planning: no run is measured here.

**Memory**, the largest on one GPU, in bytes (P parameters, N GPUs, T tokens of a micro-batch, L layers of width h, V
words in the vocabulary):

    state   = 16·P/N                  fp32 weights 4, gradients 4, Adam's moments 8, sharded (FSDP); 0 with FSDP2's CPU
                                      offload policy. The reference policy is on the CPU: verl offloads it.
                                      4·P/N for a policy that learns by LoRA: its base has neither gradients nor
                                      moments, and is the reference. The adapter's own, a few percent, is left out.
    work    = 2·P/L·2                 two gathered layers in bfloat16
            + 2·L·h·T + 34·h·T        checkpointed layer inputs, one layer made again
            + 10·V·T                  logits in bfloat16, their fp32 copy and its gradient
    serving = u·80e9                  u = rollout.gpu_memory_utilization
    peak    = max(state + work, state + serving)   state counts 0 in the second where it is offloaded between the phases
    host    = 4·P (reference; 0 with LoRA) + N·state where that is offloaded

**Time** of a step, seconds (A active parameters, R rollouts, s searches, C candidates scored for each):

    tokens  = R·(prompt + s·observation + (s + 1)·turn)
    passes  = (2 old log-probs + 2 reference, with a KL loss + 8 update: forward, made again, backward)·A·tokens;
              an update by LoRA takes 6, for no gradient of the base's weights is made
    prefill = 2·A·tokens
    scoring = 2·A·R·s·C·length·unique BRIDGE's likelihoods; length is prompt + document + gold after the question, and
                                      half a trajectory more after the prefix; unique is the share that deduplication
                                      leaves. A mean over steps: with interval i one in i scores
    compute = (passes + prefill + scoring)/(N·312e12·mfu)
    decode  = R·(s + 1)·turn/(N·rate) rate = c/((2·P + c·kv·tokens/R)/(0.6·2.0e12)), c sequences at once: bound by what
                                      an A100 reads (of a mixture of experts all weights, for a batch meets them all)
    step    = compute + decode        retrieval, the retriever's own update (0.1 of a billion parameters) and
                                      validation are left out

``mfu`` is the one number fitted: to 82.4 h of VT-Search with 16 rollouts (Qwen2.5-3B, 4×A100, 250 steps) [paper]. With
it the formula says 56 h (after the question) and 120 h (after the prefix) for BRIDGE with 8, where the paper has
79.4 h: 30% too few and 51% too many. The paper says neither which context it scores nor how many searches and tokens
its rollouts have; :class:`Work` holds what is assumed here. It also names 22.5 h for BRIDGE in another comparison,
which no setting of the formula explains together with 79.4 h. So trust an estimate within a factor of 1.5, and less
for a mixture of experts, which reaches a smaller share of a GPU's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_bridge.integrations.checks import trains_adapter

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_bridge.config import VerlBridgeConfig

GPU_BYTES, GPU_FLOPS, GPU_BANDWIDTH = 80e9, 312e12, 2.0e12  # an A100-80G, bfloat16
READ_EFFICIENCY = 0.6
#: Fitted, see above (a test fits it again).
MFU = 0.33
#: VT-Search with twice the rollouts, and BRIDGE, hours [paper].
PAPER_VT_SEARCH_HOURS, PAPER_BRIDGE_HOURS = 82.4, 79.4


@dataclass(frozen=True)
class PolicySize:
    """A policy's numbers. ``active`` parameters work on a token; ``kv_width`` is key heads × head width."""

    parameters: float
    active: float
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int


#: By hub name without organisation; from the models' cards and config.json.
POLICIES = {
    "Qwen2.5-3B": PolicySize(3.09e9, 3.09e9, 36, 2048, 256, 151_936),
    "Qwen2.5-7B": PolicySize(7.62e9, 7.62e9, 28, 3584, 512, 152_064),
    "Qwen3-30B-A3B": PolicySize(30.5e9, 3.3e9, 48, 2048, 512, 151_936),
}


def policy_size(model: str) -> PolicySize | None:
    """The size of a policy by its hub name or folder, None for one that is not in :data:`POLICIES`."""
    name = model.rstrip("/").rpartition("/")[2]
    for suffix in ("-Instruct", "-Base", "-Instruct-2507"):
        name = name.removesuffix(suffix)
    return POLICIES.get(name)


@dataclass(frozen=True)
class Work:
    """What a run asks for. Below ``memory_share`` all is assumed [ours]: means over rollouts, in tokens.

    Args:
        rollouts: rollouts of a step.
        steps: steps of the run.
        kl: a reference policy scores the rollouts too.
        micro_batch: tokens of a micro-batch on one GPU.
        lora: the policy learns by LoRA.
        candidates: documents scored for each search; 0 where no retriever learns.
        interval: one step in so many scores them.
        prefix: they are scored after the trajectory so far, else after the question.
        sequences: sequences that one GPU decodes at once.
        memory_share: share of a GPU's memory that the rollout server takes.
        offload: the state is on the CPU while the policy generates.
        offload_policy: FSDP2 keeps the state on the CPU always.
        searches: searches of a rollout.
        prompt: instruction and question.
        turn: sampled in one turn.
        observation: three passages.
        document: one passage and the gold answer.
        unique: share of (question, document) pairs that deduplication leaves.
    """

    rollouts: int
    steps: int = 250
    kl: bool = True
    micro_batch: int = 16384
    lora: bool = False
    candidates: int = 0
    interval: int = 1
    prefix: bool = False
    sequences: int = 256
    memory_share: float = 0.5
    offload: bool = False
    offload_policy: bool = False
    searches: float = 2.0
    prompt: float = 180.0
    turn: float = 100.0
    observation: float = 430.0
    document: float = 160.0
    unique: float = 0.5

    @classmethod
    def of_config(cls, config: DictConfig, settings: VerlBridgeConfig | None) -> Work:
        """What a composed verl config asks for; ``settings`` are its ``verl_bridge`` section's.

        The two phases of a schedule count as one, in which both learn.

        Raises:
            ValueError: the policy is not trained by FSDP.
        """
        data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        trains = settings is not None and trains_adapter(settings)
        if actor.strategy not in ("fsdp", "fsdp2"):
            raise ValueError(f"the formula is of FSDP, and actor_rollout_ref.actor.strategy={actor.strategy}")
        micro_batch = actor.ppo_max_token_len_per_gpu
        if not actor.use_dynamic_bsz:
            micro_batch = actor.ppo_micro_batch_size_per_gpu * (data.max_prompt_length + data.max_response_length)
        return cls(
            rollouts=data.train_batch_size * rollout.n,
            steps=config.trainer.total_training_steps or 1,
            kl=bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
            micro_batch=micro_batch,
            lora=config.actor_rollout_ref.model.lora_rank > 0,
            candidates=settings.retriever.top_k if trains else 0,
            interval=settings.bridge.interval if trains else 1,
            prefix=trains and settings.bridge.likelihood_context == "prefix",
            sequences=rollout.max_num_seqs,
            memory_share=rollout.gpu_memory_utilization,
            offload=bool(actor.fsdp_config.param_offload and actor.fsdp_config.optimizer_offload),
            offload_policy=actor.strategy == "fsdp2" and bool(actor.fsdp_config.offload_policy),
        )


@dataclass(frozen=True)
class Estimate:
    """``peak`` and ``host`` in bytes (on one GPU; on all hosts together), ``step`` in seconds, ``hours`` of the run."""

    peak: float
    host: float
    step: float
    hours: float

    @property
    def fits(self) -> bool:
        """Whether an A100-80G holds it."""
        return self.peak <= GPU_BYTES

    def sentence(self, *, whole: bool = True) -> str:
        """For reading; ``whole``: the number of steps is known, so that the hours mean something."""
        room = "" if self.fits else ", more than it has"
        hours = f", {self.hours:.0f} h in all" if whole else ""
        return (
            f"{self.peak / 1e9:.0f} GB on an A100-80G{room}, {self.host / 1e9:.0f} GB on the hosts; "
            f"{self.step:.0f} s per step{hours} (a formula, within a factor of 1.5)"
        )


def estimate(size: PolicySize, work: Work, *, gpus: int, mfu: float = MFU) -> Estimate:
    """Memory and time by the formula at the top of this module."""
    compute, decode = _seconds(size, work, gpus)
    whole, micro = (4 if work.lora else 16) * size.parameters, work.micro_batch
    state = 0.0 if work.offload_policy else whole / gpus
    layers = 2 * size.parameters / size.layers * 2
    activations = 2 * size.layers * size.hidden * micro + 34 * size.hidden * micro
    training = state + layers + activations + 10 * size.vocabulary * micro
    serving = (0.0 if work.offload else state) + work.memory_share * GPU_BYTES
    host = 4 * size.parameters if work.kl and not work.lora else 0
    host += whole if work.offload or work.offload_policy else 0
    step = compute / mfu + decode
    return Estimate(max(training, serving), host, step, step * work.steps / 3600)


def _seconds(size: PolicySize, work: Work, gpus: int) -> tuple[float, float]:
    """Seconds of arithmetic at the GPUs' peak, and seconds of decoding."""
    sampled = (work.searches + 1) * work.turn
    length = work.prompt + work.searches * work.observation + sampled
    passes = 2 + (2 if work.kl else 0) + (6 if work.lora else 8) + 2  # old, reference, update, prefill
    floats = passes * size.active * work.rollouts * length
    if work.candidates:
        scored = work.prompt + work.document
        scored, unique = (scored + (length - work.prompt) / 2, 1.0) if work.prefix else (scored, work.unique)
        scored *= work.rollouts * work.searches * work.candidates * unique / work.interval
        floats += 2 * size.active * scored
    cache = 2 * size.layers * size.kv_width * 2 * length  # bytes of one sequence's keys and values
    together = min(work.sequences, work.rollouts / gpus)
    rate = together / ((2 * size.parameters + together * cache) / (READ_EFFICIENCY * GPU_BANDWIDTH))
    return floats / (gpus * GPU_FLOPS), work.rollouts * sampled / (gpus * rate)


def fitted_mfu() -> float:
    """The share of peak arithmetic at which VT-Search with doubled rollouts takes the paper's hours."""
    compute, decode = _seconds(POLICIES["Qwen2.5-3B"], Work(512 * 16), 4)
    return compute / (PAPER_VT_SEARCH_HOURS * 3600 / 250 - decode)


def table(runs: Iterable[tuple[str, PolicySize, Work]], *, gpus: int) -> str:
    """The estimates as a Markdown table, a row for each (name, policy, work)."""
    lines = [f"| run on {gpus}×A100-80G | GB per GPU | GB on the hosts | s per step | hours |", "|---|---|---|---|---|"]
    for name, size, work in runs:
        found = estimate(size, work, gpus=gpus)
        peak = f"{found.peak / 1e9:.0f}" if found.fits else f"{found.peak / 1e9:.0f}, too much"
        lines.append(f"| {name} | {peak} | {found.host / 1e9:.0f} | {found.step:.0f} | {found.hours:.0f} |")
    return "\n".join(lines)
