"""The keys of Search-R1's launch scripts that verl 0.9 does not have, or means otherwise, and what stands for them."""

#: Key in a Search-R1 script → what to write instead.
REPLACED = {
    "data.train_data_num": "data.train_max_samples (-1 for all)",
    "data.val_data_num": "data.val_max_samples (-1 for all)",
    "data.max_start_length": "data.max_prompt_length, which no longer counts the turns",
    "data.max_obs_length": "verl_bridge.agent.observation_tokens (500 is the default)",
    "data.shuffle_train_dataloader": "data.shuffle",
    "algorithm.no_think_rl": "nothing: leave it out",
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.state_masking": "nothing: what was observed is never trained on",
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "nothing: gradients go with the parameters",
    "max_turns": "verl_bridge.agent.max_turns, one higher: it counts the last, answering turn too",
    "retriever.url": "verl_bridge.retriever.url without /retrieve, or corpus and index to serve in the job",
    "retriever.topk": "verl_bridge.retriever.shown (3 is the default)",
    "+trainer.val_only": "trainer.val_only without the +",
    "+trainer.val_before_train": "trainer.val_before_train without the +",
}


def replaced(overrides: list[str]) -> list[str]:
    """For each Hydra override with a key of Search-R1's, what to write instead."""
    keys = [override.split("=", 1)[0] for override in overrides]
    return [f"{key}: {REPLACED[key]}" for key in keys if key in REPLACED]
