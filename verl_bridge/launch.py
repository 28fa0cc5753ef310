"""The environment a training process is started in; verl reads most of it while it is imported."""

from __future__ import annotations

import os

PLUGIN = "verl_bridge.plugin"


def training_environment() -> dict[str, str]:
    """The caller's environment with our plugin named.

    Named here, and not only as an entry point, because verl lets no error of a named module pass unseen.
    """
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    modules = [name for name in environment.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    environment["VERL_USE_EXTERNAL_MODULES"] = ",".join(dict.fromkeys([*modules, PLUGIN]))
    return environment


def cpu_environment() -> dict[str, str]:
    """:func:`training_environment` for a machine without a GPU: CPU platform, loopback, quiet waiting threads."""
    return {
        **training_environment(),
        "VERL_PLATFORM": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        # One waiting thread a process: several processes share the cores, and spinning threads starve them.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "0",
    }
