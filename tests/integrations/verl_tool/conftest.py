"""verl-tool where a test needs it: a stand-in for its tool server's base, or the real checkout at VERL_TOOL_HOME."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verl_bridge.integrations.verl_tool import COMMIT, REPOSITORY

ROOT = Path(__file__).parents[3]
TOOL_MODULE = "verl_bridge.integrations.verl_tool.search_tool"


@pytest.fixture
def base(monkeypatch):
    """A stand-in for ``verl_tool.servers.tools.base``, held to the real one by test_verl_tool_contract.py."""

    class BaseTool:
        tool_type = "base"

        def __init__(self, num_workers=1):
            self.num_workers = num_workers

    base = ModuleType("verl_tool.servers.tools.base")
    base.__package__ = "verl_tool.servers.tools"
    base.BaseTool, base.registered_tools = BaseTool, {}
    base.register_tool = lambda cls: base.registered_tools.setdefault(cls.tool_type, cls)
    base.ALL_TOOLS = ["base", "finish", "search_retrieval"]
    for name in ("verl_tool", "verl_tool.servers", "verl_tool.servers.tools"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    sys.modules["verl_tool.servers.tools"].base = base
    monkeypatch.delitem(sys.modules, TOOL_MODULE, raising=False)
    yield base
    sys.modules.pop(TOOL_MODULE, None)  # made from the stand-in
    sys.modules.pop("verl_tool.servers.tools.verl_bridge_search", None)


@pytest.fixture
def tool_class(base):
    return importlib.import_module(TOOL_MODULE).BridgeSearchTool


@pytest.fixture(scope="session")
def home() -> Path:
    """The checkout. The one skip of these tests."""
    named = os.environ.get("VERL_TOOL_HOME")
    if not named:
        pytest.skip(
            f"VERL_TOOL_HOME is not set: git clone {REPOSITORY}, git checkout {COMMIT}, make its .venv as "
            "tests/integrations/verl_tool/host/requirements.txt says, and set VERL_TOOL_HOME to the folder"
        )
    path = Path(named).resolve()
    assert (path / "verl_tool/servers/tool_server.py").is_file(), (
        f"VERL_TOOL_HOME={named} is not a checkout of verl-tool"
    )
    return path


@pytest.fixture(scope="session")
def host_environment(home) -> dict[str, str]:
    """Where verl-tool and its own verl are importable, and our package beside them."""
    absent = Path(__file__).parent / "host/absent"  # what verl-tool imports and a CPU cannot have
    python_path = os.pathsep.join(map(str, (absent, ROOT, ROOT / "tests", home, home / "verl")))
    keep = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "PYTHONPATH")}
    return {**keep, "PYTHONPATH": python_path, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def in_host(home, host_environment):
    """Runs checks with verl-tool's own Python: ``in_host("check_loop.py")``."""
    python = home / ".venv/bin/python"
    assert python.is_file(), f"{python} is missing: install verl-tool into {home}/.venv"

    def run(name: str, timeout: float = 1800) -> None:
        command = [
            str(python),
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent / "host" / name),
        ]
        done = subprocess.run(command, env=host_environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
        assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]

    return run
