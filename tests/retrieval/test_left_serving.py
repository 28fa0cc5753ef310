"""A Serve application outlives a process that was killed; what is left can be told and deleted. Ray is a stand-in."""

import ast
import re
import shlex
from types import SimpleNamespace

import pytest
import ray

from verl_bridge.retrieval import deployment

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Serve itself


@pytest.fixture
def left(monkeypatch):
    """Names of keepers and applications that run."""
    from ray import serve

    left = SimpleNamespace(keepers={"keeper of r"}, applications={"r"}, proxies={}, shut_down=0)

    def get_actor(name, namespace):
        assert name == "verl_bridge.serving.r" and namespace == "verl_bridge"
        if not left.keepers:
            raise ValueError("no such actor")
        return "keeper of r"

    def status():
        return SimpleNamespace(applications=dict.fromkeys(left.applications, "RUNNING"), proxies=left.proxies)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", left.keepers.remove)
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "delete", left.applications.remove)
    monkeypatch.setattr(serve, "shutdown", lambda: vars(left).update(shut_down=left.shut_down + 1))
    return left


def test_the_message_has_the_command_that_deletes_what_is_left(left):
    with pytest.raises(ValueError, match="'r' runs in this Ray cluster; choose another name or") as error:
        deployment._start_keeper("r", {}, {})
    command = re.search(r"left of a run that was killed, delete it: (python -c .*)$", str(error.value))[1]
    python, option, program = shlex.split(command)
    assert (python, option) == ("python", "-c")
    body = ast.parse(program).body
    assert ast.unparse(body[1]) == "ray.init('auto')"
    for line in (body[0], *body[2:]):
        exec(ast.unparse(line), globals())
    assert not left.keepers and not left.applications and left.shut_down == 1


@pytest.mark.parametrize("part", ["keepers", "applications"])
def test_half_of_it_is_deleted_too_and_others_stay(left, part):
    getattr(left, part).clear()
    left.applications.add("of another")
    deployment.stop_serving("r")
    assert not left.keepers and left.applications == {"of another"} and left.shut_down == 0
    deployment.stop_serving("r")  # nothing left: fine
