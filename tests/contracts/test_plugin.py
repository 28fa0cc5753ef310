"""The plugin: registers lazily, refuses a foreign verl aloud, never lets a run go on without the methods."""

import json
import subprocess
import sys

import pytest

from verl_bridge import plugin

STUB = """
import sys, types
verl = types.ModuleType("verl")
verl.__version__ = {version!r}
sys.modules["verl"] = verl
sys.argv = ["main_ppo", *{arguments!r}]
import verl_bridge.plugin
"""


def load_beside(version, *arguments):
    code = STUB.format(version=version, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_tested_series_is_accepted():
    for version in ("0.9.0", "0.9.1", "0.9.12.dev0"):
        plugin.check_verl_version(version)


@pytest.mark.parametrize("version", ["0.8.3", "0.10.0", "1.0", "0.90.1", "0.9"])
def test_another_verl_is_named_with_the_fix(version):
    with pytest.raises(ImportError) as error:
        plugin.check_verl_version(version)
    message = str(error.value)
    assert f"verl=={version}" in message and "0.9.x" in message and "pip install 'verl==0.9.1'" in message


def test_a_run_that_asks_for_us_stops_where_verl_would_swallow_the_error():
    """verl catches Exception around entry points; SystemExit passes."""
    trainers = [f"trainer.v1.trainer_mode=bridge_{mode}" for mode in ("sync", "colocate_async", "separate_async")]
    for argument in ("+verl_bridge=gca", "verl_bridge.gca.rho=0.1", *trainers):
        run = load_beside("0.10.0", "data.train_batch_size=8", argument)
        assert run.returncode == 2
        assert run.stderr.splitlines() == [
            "verl_bridge is NOT registered with verl: verl==0.10.0 is installed, verl_bridge works with verl 0.9.x: "
            "pip install 'verl==0.9.1'"
        ]


def test_other_users_of_the_environment_see_a_line_and_go_on():
    run = load_beside("0.10.0", "data.train_files=/data/verl_bridge/train.parquet")
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("ImportError: verl==0.10.0")


def test_registers_lazily_and_really(tmp_path):
    """`import verl` stays as light as it was; what is registered is there once verl's own module is."""
    code = """
import json, sys
import verl
late = "verl.trainer.ppo.v1", "hydra", "verl_bridge.integrations.verl.trainer", "peft"
early = [name for name in late if name in sys.modules]
assert "verl_bridge.plugin" in sys.modules
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
trainers = {get_trainer_cls(f"bridge_{mode}").__name__: get_trainer_cls(mode).__name__
            for mode in ("sync", "colocate_async", "separate_async")
            if issubclass(get_trainer_cls(f"bridge_{mode}"), get_trainer_cls(mode))}
print(json.dumps([early, trainers, get_adv_estimator_fn("gca").__name__,
                  _agent_loop_registry["verl_bridge_search"]["_target_"]]))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    early, trainers, estimator, loop = json.loads(run.stdout.splitlines()[-1])
    assert early == []
    assert trainers == {
        "BridgeTrainerSync": "PPOTrainerSync",
        "BridgeTrainerColocateAsync": "PPOTrainerColocateAsync",
        "BridgeTrainerSeparateAsync": "PPOTrainerSeparateAsync",
    }
    assert estimator == "needs_our_trainer"
    assert loop == "verl_bridge.integrations.verl.agent_loop.SearchAgentLoop"


def test_the_estimator_is_loud_under_a_trainer_that_is_not_ours():
    """verl's own advantage function, as its sync trainer calls it."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    ones = torch.ones(2, 3)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": ones, "response_mask": ones}, non_tensors={"uid": [0, 1]}
    )
    with pytest.raises(RuntimeError, match=r"trainer\.v1\.trainer_mode=bridge_sync"):
        compute_advantage(data, adv_estimator="gca")
