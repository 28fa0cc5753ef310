"""A policy small enough to check by hand-written references, and verl set up for it."""

import os

import pytest

# Before verl is imported: it chooses its platform once.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["VERL_BRIDGE_CPU_THREADS"] = "1"


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory):
    """A random Qwen2 policy (64 ids, two layers, tied embeddings) whose tokenizer makes one id of each character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("policy")
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = {"<pad>": 0, "<eos>": 1, **{character: i + 2 for i, character in enumerate(characters)}}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.3,  # distributions far from uniform
    )
    config.architectures = ["Qwen2ForCausalLM"]
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(path)
    return path


@pytest.fixture
def model(policy_path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="session")
def tokenizer(policy_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy_path)


@pytest.fixture(scope="session")
def host_config(policy_path):
    """verl's own configuration with ``+verl_bridge_host=cpu`` and the test's policy."""
    import verl  # noqa: F401  its import loads our plugin, which adds the config group
    from hydra import compose, initialize_config_module

    def composed(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(
                "ppo_trainer",
                [
                    "+verl_bridge_host=cpu",
                    f"actor_rollout_ref.model.path={policy_path}",
                    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                    "actor_rollout_ref.rollout.prompt_length=40",
                    "actor_rollout_ref.rollout.response_length=24",
                    *overrides,
                ],
            )

    return composed


@pytest.fixture(scope="session")
def process_group(tmp_path_factory):
    """A gloo group of one rank, in this process."""
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "cpu:gloo", rank=0, world_size=1, init_method=f"file://{tmp_path_factory.mktemp('group')}/store"
        )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def restore_denormals():
    """An engine run in this process turns them off; other tests must not notice."""
    yield
    import torch

    torch.set_flush_denormal(False)
