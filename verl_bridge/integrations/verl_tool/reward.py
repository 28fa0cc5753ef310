"""A reward manager for verl-tool that reads the trace: ``reward_model.reward_manager=verl_bridge_em``.

verl-tool's ``search_r1_qa_em`` searches prompt and response for ``<answer>``: the prompt's own example ("Beijing")
scores 1.0 for a rollout that never answered, and a ``custom_reward_function`` is ignored. Here the answer is the
rollout's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.registry import register

from verl_bridge.integrations.verl_tool import AGENT_LOOP, REWARD_MANAGER
from verl_bridge.qa.reward import compute_score as score_by_trace


@register(REWARD_MANAGER)
class TraceRewardManager:
    """Exact match and format of the final answer, or a reward function of yours.

    Args:
        tokenizer: the policy's.
        num_examine: how many rollouts of a call are printed.
        compute_score: what verl-tool loaded for ``custom_reward_function``, or verl's default where there is none;
            called as in verl, with the trace in ``extra_info["search_trace"]``.
        reward_fn_key: the column that names a row's data source.
        score_options: settings of :func:`verl_bridge.qa.reward.compute_score`, from ``reward_model.reward_kwargs``.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **score_options: Any,
    ) -> None:
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        default = compute_score.func if isinstance(compute_score, partial) else compute_score
        if default is None or default is default_compute_score:
            self._score: Callable[..., Any] = partial(score_by_trace, **score_options)
        else:
            self._score = partial(compute_score, **score_options)

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Rewards at the last token of every response, ``(batch, response)``.

        Args:
            data: prompts and responses with their attention mask, one trace a row.
            return_dict: also return what the score function said beside the score, one value a row.

        Raises:
            ValueError: a row carries no trace.
        """
        if "rm_scores" in data.batch.keys():  # scored in the agent loop already
            extra = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
            rewards = data.batch["rm_scores"]
            return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(-1).tolist()
        for row, length in enumerate(lengths):
            columns = {name: values[row] for name, values in data.non_tensor_batch.items()}
            if columns.get("search_trace") is None:
                raise ValueError(
                    f"reward_model.reward_manager={REWARD_MANAGER}: a rollout carries no search_trace; set "
                    f"actor_rollout_ref.rollout.agent.default_agent_loop={AGENT_LOOP} and leave agent_name out of the "
                    "dataset"
                )
            text = self.tokenizer.decode(data.batch["responses"][row, :length], skip_special_tokens=False)
            source = columns.get(self.reward_fn_key)
            result = self._score(
                data_source=source,
                solution_str=text,
                ground_truth=(columns.get("reward_model") or {}).get("ground_truth"),
                extra_info={**(columns.get("extra_info") or {}), "search_trace": columns["search_trace"]},
            )
            result = result if isinstance(result, dict) else {"score": float(result)}
            rewards[row, length - 1] = result["score"]
            for key, value in result.items():
                extra[key].append(value)
            if row < self.num_examine:
                print(f"[{source}] score {result['score']}: {text}")
        return {"reward_tensor": rewards, "reward_extra_info": dict(extra)} if return_dict else rewards
