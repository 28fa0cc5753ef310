"""A training by verl-tool's own main_ppo and our trainer where there is neither GPU nor vLLM.

In the place of both: a scripted model, and actor workers that write down what they are given.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ray
import torch
from transformers import AutoTokenizer
from verl import DataProto
from verl_tool.agent_loop import AgentLoopManager
from verl_tool.trainer.ppo.ray_trainer import AgentRayPPOTrainer
from verl_tool.workers.rollout.replica import VerlToolTokenOutput

from verl_bridge.integrations.verl_tool import main_ppo, trainer

SEARCH, RIGHT, WRONG = "<search> capital of Peru</search>", "<answer> Lima</answer>", "<answer> Quito</answer>"


@ray.remote
class Model:
    """Searches once, then answers: right and wrong in turn."""

    def __init__(self, path):
        self.tokenizer, self.answered = AutoTokenizer.from_pretrained(path), 0

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, audio_data=None):
        text, stop = SEARCH, "</search>"
        if "</search>" in self.tokenizer.decode(prompt_ids):
            text, stop = (WRONG if self.answered % 2 else RIGHT), "</answer>"
            self.answered += 1
        ids = self.tokenizer.encode(text)
        return VerlToolTokenOutput(token_ids=ids, finish_reason="stop", stop_reason=stop, text=text, finished=True)


class Manager(AgentLoopManager):
    def _initialize_llm_servers(self):
        self.server_handles = [Model.remote(self.config.actor_rollout_ref.model.path)]


class Workers:
    world_size = 2  # an odd number of answers has to be padded

    def compute_log_prob(self, batch):
        assert len(batch) % self.world_size == 0
        ids = batch.batch["input_ids"] * batch.batch["attention_mask"]
        one = -(ids.sum(-1, keepdim=True) % 13).float() / 13
        values = one.expand(batch.batch["responses"].shape).clone()
        return DataProto.from_dict({"old_log_probs": values, "entropys": torch.zeros_like(values)})

    def update_actor(self, batch):
        rows = {name: batch.batch[name].tolist() for name in ("advantages", "response_mask", "token_level_scores")}
        columns = {name: list(batch.non_tensor_batch[name]) for name in ("search_trace", "em", "uid")}
        with Path(os.environ["UPDATES"]).open("a") as file:
            file.write(json.dumps({**rows, **columns}, default=float) + "\n")
        return DataProto(meta_info={"metrics": {"actor/lr": [0.0]}})

    def save_checkpoint(self, path, *arguments, **options):
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, *arguments, **options):
        pass


class WithoutInfrastructure(AgentRayPPOTrainer):
    def init_workers(self):
        self.actor_rollout_wg, self.rm_wg, self.async_rollout_mode = Workers(), None, True
        self.async_rollout_manager = Manager(config=self.config, worker_group=None, rm_wg=None)


class Trainer(trainer.BridgeTrainer, WithoutInfrastructure):
    pass


def main():
    trainer.BridgeTrainer = Trainer
    main_ppo.main()
