"""The rollout ``hf_cpu``: a replica of one Ray actor that serves generation, and the trainer's side of it.

Requests of many agent loops arrive at once; a short, bounded wait gathers them into batches of similar prompt length
(:mod:`~verl_bridge.integrations.verl.cpu.generation`). What a request draws is decided by the seed, the weights'
version, its prompt and how many requests came before it with the same prompt and weights: not by the order of arrival
among different prompts, and not by who shares its batch (but for rounding in the model's matrix products).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica, TokenOutput

from verl_bridge.integrations.verl.cpu import ROLLOUT, prepare_thread
from verl_bridge.integrations.verl.cpu.generation import (
    BatchGenerator,
    Completion,
    Request,
    request_seed,
    similar_lengths,
)
from verl_bridge.integrations.verl.cpu.sampling import SamplingParams

ROWS = 32  # of one batch; more rows of mixed lengths mean more padding
GATHER_SECONDS = 0.02  # longest wait for a batch to fill


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The Ray name of a replica's server actor."""
    return f"{ROLLOUT}_server_{replica_rank}{suffix}"


def replace_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy every named weight into ``model``.

    Raises:
        RuntimeError: a name or shape the model does not have, or a weight that is not given; one tied to a given
            weight counts as given.
    """
    state = model.state_dict()
    given = {state[name].data_ptr() for name in weights if name in state}
    missing = [name for name, tensor in state.items() if name not in weights and tensor.data_ptr() not in given]
    unexpected = [name for name in weights if name not in state]
    if missing or unexpected:
        raise RuntimeError(
            f"weights do not fit the rollout's model: missing {missing[:5]}, unexpected {unexpected[:5]}"
        )
    model.load_state_dict(weights, strict=False)


class RolloutServer:
    """The Ray actor behind a replica; every method but the constructor is called remotely.

    Args:
        config: verl's rollout configuration.
        model_config: verl's model configuration.
        replica_rank: which replica; enters the seed.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        from transformers import AutoModelForCausalLM

        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        if self.config.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"actor_rollout_ref.rollout.logprobs_mode={self.config.logprobs_mode!r}: "
                "the rollout on cpu returns processed_logprobs"
            )
        model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        model = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        tokenizer = model_config.tokenizer
        eos = model.generation_config.eos_token_id
        eos_ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
        self.eos_token_ids = tuple(dict.fromkeys(token for token in eos_ids if token is not None))
        self.max_model_len = self.config.max_model_len or model.config.max_position_embeddings
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.generator = BatchGenerator(model, pad, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        self.seed = (self.config.seed, replica_rank)
        self.global_steps: int | None = None
        self.draws: Counter[tuple[int, ...]] = Counter()  # requests so far by prompt, under the present weights
        self.waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        # The model is touched only by this one thread, so new weights never meet a batch in progress.
        self.thread = ThreadPoolExecutor(max_workers=1, initializer=prepare_thread)
        self.in_flight = 0
        self.paused = self.rejecting = False

    async def launch_server(self) -> None:
        """Start serving; called once, inside the actor's event loop."""
        self.arrived, self.resumed = asyncio.Event(), asyncio.Event()
        self.serving = asyncio.create_task(self._serve())

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Returns:
            new token ids, the stop token included; log-probs when ``logprobs`` is asked for; the weights' version as
            ``extra_fields["global_steps"]``; ``stop_reason`` ``aborted`` when the server was told to abort.

        Raises:
            ValueError: a prompt that leaves no room, or sampling parameters that cannot be honoured.
        """
        if image_data or video_data:
            raise ValueError("image_data or video_data given: the rollout on cpu serves only text")
        while self.paused:
            if self.rejecting:
                return self._output(Completion(), sampling_params.get("logprobs"))
            await self.resumed.wait()
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room to generate in "
                f"actor_rollout_ref.rollout.max_model_len={self.max_model_len}"
            )
        budget = self.config.prompt_length + self.config.response_length - len(prompt_ids)
        default = max(1, min(self.config.response_length, budget, room))
        params = SamplingParams.from_dict(
            {"max_tokens": default, **sampling_params}, max_tokens=room, eos_token_ids=self.eos_token_ids
        )
        prompt = tuple(prompt_ids)
        if params.seed is None:
            seed = request_seed(self.seed, self.global_steps, self.draws[prompt], prompt)
            self.draws[prompt] += 1
        else:
            seed = request_seed(params.seed, prompt)
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((Request(prompt, params, seed), answer))
        self.arrived.set()
        self.in_flight += 1
        try:
            return self._output(await answer, params.logprobs)
        finally:
            self.in_flight -= 1

    def _output(self, completion: Completion, logprobs: Any) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if logprobs else None,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps},
        )

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        rows = min(ROWS, self.config.max_num_seqs)
        while True:
            await self.arrived.wait()
            if len(self.waiting) < rows:
                await asyncio.sleep(GATHER_SECONDS)
            if not self.waiting:  # aborted meanwhile
                continue
            chosen = similar_lengths([len(request.prompt_ids) for request, _ in self.waiting], rows)
            batch = [self.waiting[i] for i in chosen]
            self.waiting = [entry for i, entry in enumerate(self.waiting) if i not in set(chosen)]
            if not self.waiting:
                self.arrived.clear()
            try:
                requests = [request for request, _ in batch]
                completions = await loop.run_in_executor(self.thread, self.generator, requests, lambda: self.paused)
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for (_, answer), completion in zip(batch, completions, strict=True):
                    if not answer.done():
                        answer.set_result(completion)

    async def load_weights(self, weights: dict[str, Tensor], global_steps: int | None = None) -> None:
        """Take over all weights, as of training step ``global_steps``. Raises RuntimeError when they do not fit."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.thread, replace_weights, self.generator.model, weights)
        if global_steps is not None:
            self.global_steps = global_steps
        self.draws.clear()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when nothing is being generated or waits to be."""
        while self.in_flight:
            await asyncio.sleep(0.01)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End everything unfinished, and hold (or, with ``reject_request``, hand back) what arrives until resumed."""
        self.paused, self.rejecting = True, reject_request
        self.resumed.clear()
        count = self.in_flight
        for _, answer in self.waiting:
            if not answer.done():
                answer.set_result(Completion())
        self.waiting.clear()
        self.arrived.clear()
        await self.wait_for_requests_to_drain()
        return {"aborted_count": count, "request_ids": []}

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self.paused = self.rejecting = False
        self.resumed.set()

    # Weights share the host's memory and no cache outlives a batch: nothing to release, restore or profile.
    async def sleep(self) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...


def start_server(config: Any, model_config: Any, replica_rank: int, suffix: str = "") -> ray.actor.ActorHandle:
    """The server actor of a replica, started unless it is there already; does not wait for it."""
    # As RolloutReplica.max_concurrency: every request in flight holds one call.
    concurrency = max(1000, config.max_num_seqs + CONTROL_METHOD_CONCURRENCY)
    actor = ray.remote(RolloutServer).options(
        name=server_name(replica_rank, suffix), get_if_exists=True, num_cpus=0, max_concurrency=concurrency
    )
    return actor.remote(config, model_config, replica_rank)


class CPURolloutReplica(RolloutReplica):
    """Starts one server actor: for each rank of the trainer, or for each GPU of standalone rollout."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                f"a replica of {self.world_size} ranks: the rollout on cpu needs tensor, data and pipeline parallel "
                "sizes of actor_rollout_ref.rollout to be 1"
            )
        # Ranks of a policy, a reward model and a teacher are each counted from 0; a name must mean one of them.
        kind = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        suffix = f"{kind}{self.name_suffix}"
        server = start_server(self.config, self.model_config, self.replica_rank, suffix)
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank, suffix)  # only a key for the load balancer

    async def sleep(self) -> None:
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])


class CPURollout(BaseRollout):
    """Hands the policy's weights to the server: in the actor worker, or in the worker of a standalone replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True  # every rank feeds its own replica

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send full weights.

        Raises:
            ValueError: anything but full named tensors.
            RuntimeError: weights that do not fit the server's model.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: the rollout on cpu takes named_tensors")
        if peft_config is not None:
            raise ValueError("the rollout on cpu takes full weights: set actor_rollout_ref.model.lora.merge=True")
        if hasattr(weights, "__aiter__"):
            named = {name: _full(tensor) async for name, tensor in weights}
        else:
            named = {name: _full(tensor) for name, tensor in weights}
        # The call serialises the tensors before it returns, so training may go on changing the live ones.
        await self._server().load_weights.remote(named, global_steps)

    def _server(self) -> ray.actor.ActorHandle:
        return ray.get_actor(server_name(self.replica_rank))  # it starts after this worker


def _full(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
