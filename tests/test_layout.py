"""The rules of the house, read from the imports: one direction, verl in one room, torch alone in the algorithms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "verl_bridge"
MODULES = sorted(PACKAGE.rglob("*.py"))

# cli → commands → embedded, evaluation, integrations → credit, bilevel → algorithms, retrieval, qa → trace
LEVELS = {
    "": -1,  # the version
    "trace": 0,
    "config": 0,
    "files": 0,
    "launch": 0,
    "algorithms": 1,
    "retrieval": 1,
    "qa": 1,
    "bilevel": 2,
    "credit": 2,
    "embedded": 3,
    "integrations": 3,
    "plugin": 3,  # names what integrations register
    "evaluation": 3,
    "doctor": 4,
    "commands": 5,
    "cli": 6,
}
TOP_LEVEL = {
    "verl_bridge",
    "recipes",
    "examples",
    "tests",
    "setup.py",
    "README.md",
    "Makefile",
    "pyproject.toml",
    "LICENSE",
    "CONTRIBUTING.md",
}
NOT_OURS = {"build", "dist", "runs", "outputs", "shared"}  # made by running, see .gitignore


def room(name: str) -> str:
    """``verl_bridge.qa.answers`` → ``qa``."""
    return [*name.split("."), ""][1]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Every module a file imports, at the top or inside functions, under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found.add(node.module)
            if node.module == "verl_bridge":
                found |= {f"verl_bridge.{alias.name}" for alias in node.names if alias.name in LEVELS}
    return found


def test_the_rules_read_real_files():
    assert len(MODULES) > 15
    assert "verl_bridge.trace" in imports(PACKAGE / "qa/reward.py")
    assert {room(module_name(path)) for path in MODULES} <= set(LEVELS)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_one_way(path):
    level = LEVELS[room(module_name(path))]
    for name in imports(path):
        if name == "verl_bridge" or name.startswith("verl_bridge."):
            assert LEVELS[room(name)] <= level, f"{module_name(path)} imports {name}, which is above it"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_verl_is_imported_under_integrations_alone(path):
    if room(module_name(path)) != "integrations":
        hosts = {name for name in imports(path) if name.split(".")[0] in ("verl", "verl_tool")}
        assert not hosts, f"{module_name(path)} imports {hosts}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").glob("*.py")), ids=module_name)
def test_algorithms_import_torch_alone(path):
    allowed = set(sys.stdlib_module_names) | {"torch"}
    others = {n for n in imports(path) if n.split(".")[0] not in allowed and not n.startswith("verl_bridge.algorithms")}
    assert not others, f"{module_name(path)} imports {others}"


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "examples").rglob("*.py"))], ids=lambda p: p.stem)
def test_no_module_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_top_level_holds_nothing_else():
    names = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")}
    assert {name for name in names - TOP_LEVEL - NOT_OURS if not name.endswith(".egg-info")} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import verl_bridge",
        "import verl_bridge.trace",
        "from verl_bridge.config.schema import VerlBridgeConfig; VerlBridgeConfig.from_mapping({})",
        "import verl_bridge.doctor",
        "from verl_bridge.cli import main; main(['demo', '--help'])",
        "from verl_bridge.cli import main; main(['index', 'build', '--help'])",
        "from verl_bridge.cli import main; main(['serve', '--help'])",
        "import verl_bridge.retrieval.corpus, verl_bridge.retrieval.encoder, verl_bridge.retrieval.index",
        "import verl_bridge.qa.reward, verl_bridge.qa.actions, verl_bridge.qa.questions",
    ],
)
def test_stays_light(code):
    """None of these may pull in a framework, neither directly nor through something else."""
    heavy = "torch transformers faiss verl ray numpy hydra omegaconf sentence_transformers peft fastapi aiohttp".split()
    check = f"""
import atexit, sys
def show():
    loaded = [name for name in {heavy!r} if name in sys.modules]
    print("LOADED", loaded)
atexit.register(show)
{code}
"""
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "LOADED []"
