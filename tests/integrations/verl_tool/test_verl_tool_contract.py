"""The checks in host/, by the Python of a real checkout: signatures, tool servers, the loop, a training on the CPU."""

from pathlib import Path

import pytest

CHECKS = sorted(path.name for path in (Path(__file__).parent / "host").glob("check_*.py"))


def test_there_are_checks():
    assert "check_contract.py" in CHECKS and len(CHECKS) >= 4


@pytest.mark.parametrize("check", CHECKS)
def test_with_the_real_verl_tool(in_host, check):
    in_host(check)
