"""examples/ray_job_submit against a cluster of one node: `ray start --head`, then `ray job submit`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from verl_bridge.embedded import demo
from verl_bridge.embedded.assets import embedded_assets
from verl_bridge.launch import cpu_environment
from verl_bridge.trace import SearchTrace

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_job_submit"
REPOSITORY = EXAMPLE.parents[1]
RAY = Path(sys.executable).with_name("ray")
SIZES = demo.Sizes(questions=2, rollouts=2, validation=2)
PORTS = (
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
# What a job says instead of starting a Ray of its own, beside what submit.sh says: the host yaml has more of it.
JOIN = ("ray_kwargs.ray_init.num_gpus=null", "ray_kwargs.ray_init.object_store_memory=null")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(environment: dict[str, str]) -> bool:
    """Whether the cluster takes jobs; asking takes a second or more, so a loop of it does not spin."""
    return subprocess.run([RAY, "job", "list"], env=environment, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a client of a running head node on ports of its own; stopped by its process."""
    folder = Path(tempfile.mkdtemp(prefix="vbray"))  # short: Ray's socket paths have a length limit
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    environment = {**cpu_environment(), "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(folder)}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test"}
    # Ray takes 127.0.0.1 for the machine's outward address wherever it knows of other nodes: not so with this.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    environment["RAY_ADDRESS"] = f"http://127.0.0.1:{ports['dashboard-port']}"
    started = {key: value for key, value in environment.items() if key != "RAY_ADDRESS"}
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with open(log, "wb") as output:
        command = [
            *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
            *("--num-cpus=8", "--num-gpus=1", "--object-store-memory=300000000", f"--temp-dir={folder}"),
            *(f"--{name}={port}" for name, port in ports.items()),
        ]
        head = subprocess.Popen(
            command, env=started, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        # The dashboard can answer before the head's own output is in the file: wait for both.
        deadline = time.monotonic() + 180
        while not (answers(environment) and (address := re.search(r"Local node IP.*", log.read_text()))):
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
        assert "127.0.0.1" in address[0]
        yield environment
    finally:
        demo._stop(head)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def submit(cluster, tmp_path_factory):
    """Runs submit.sh with the demo's arguments, in a folder, and further overrides."""
    assets, runtime_env = embedded_assets(), yaml.safe_load((EXAMPLE / "runtime_env.yaml").read_text())
    names = ("VERL_PLATFORM", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE")
    runtime_env["env_vars"] |= {name: cluster[name] for name in names} | {"PYTHONPATH": str(REPOSITORY)}
    file = tmp_path_factory.mktemp("job") / "runtime_env.yaml"
    file.write_text(yaml.safe_dump(runtime_env))
    environment = {**cluster, "RAY": str(RAY), "PYTHON": sys.executable, "RUNTIME_ENV": str(file)}
    environment |= {"CORPUS": str(assets.corpus), "INDEX": str(assets.index)}

    def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        demo.hold_out(assets, SIZES, folder)
        arguments = [
            argument
            for argument in demo.training_command(assets, SIZES, "bridge_gca", 1, 0, folder)[3:]
            if not argument.startswith("+verl_bridge=")
        ]
        more = (*JOIN, "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[console]")
        command = [EXAMPLE / "submit.sh", *arguments, *more, *overrides]
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)

    return run


def test_a_submitted_job_trains_a_step_and_leaves_its_results(submit, tmp_path):
    job = submit(tmp_path)
    assert job.returncode == 0, (job.stdout + job.stderr)[-3000:]
    assert "succeeded" in job.stdout and "step:1" in job.stdout
    lines = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    traces = [SearchTrace.from_dict(json.loads(line)["trace"]) for line in lines]
    assert len(traces) == 4 and all(trace.turns for trace in traces)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_failing_job_is_reported_with_its_message_and_code(submit, tmp_path):
    job = submit(tmp_path, "verl_bridge.gca.rho=-1")
    assert job.returncode == 1
    assert "verl_bridge.gca.rho=-1" in job.stdout + job.stderr  # the message, with the key and the value
    assert "exit code 2" in job.stdout + job.stderr  # the job's own
    assert not (tmp_path / "rollouts").exists()


def test_a_missing_setting_is_named_before_anything_is_submitted(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("CORPUS", "INDEX")}
    run = subprocess.run(
        [EXAMPLE / "submit.sh"], env={**environment, "RAY": "false"}, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0 and "CORPUS" in run.stderr
