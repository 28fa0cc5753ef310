"""The checks in host/, by the Python of a real checkout: signatures, tool servers, the loop, a training on the CPU."""

from pathlib import Path

import pytest

from verl_bridge.integrations import verl_tool

HOST = Path(__file__).parent / "host"
CHECKS = sorted(path.name for path in HOST.glob("check_*.py"))


def test_the_readme_installs_the_versions_that_the_checks_run_with():
    readme = (Path(verl_tool.__file__).parent / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith("pip install faiss-cpu"))
    pins = [pin for pin in (HOST / "requirements.txt").read_text().split() if "==" in pin]
    assert len(line.split()) == 8 and set(line.split()[2:]) <= set(pins)
    versions = dict(pin.split("==") for pin in pins if pin.count("==") == 1)
    assert f"transformers {versions['transformers']} and torch {versions['torch']}" in readme


def test_there_are_checks():
    assert "check_contract.py" in CHECKS and len(CHECKS) >= 4


@pytest.mark.parametrize("check", CHECKS)
def test_with_the_real_verl_tool(in_host, check):
    in_host(check)
