"""verl-tool's multi-process tool server with our search tool: ``python -m verl_bridge.integrations.verl_tool.serve``.

Takes the arguments of ``verl_tool.servers.serve``: a router in front of ``--uvi_workers`` tool servers. Those are
started as ``verl_tool.servers.tool_server``, which does not know our tool; here they are started as ours.
"""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

from verl_bridge.integrations.verl_tool import TOOL
from verl_bridge.integrations.verl_tool.tool_server import HOST_SERVER, check, register, run

OUR_SERVER = "verl_bridge.integrations.verl_tool.tool_server"


class OurServers:
    """Stands for the module ``subprocess`` in verl-tool's: every tool server it starts is one of ours."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: list[str], **options: Any) -> subprocess.Popen:
        """As ``subprocess.Popen``. Raises RuntimeError when it is not verl-tool's tool server that is to start."""
        if HOST_SERVER not in command:
            raise RuntimeError(f"verl-tool starts {command}, not {HOST_SERVER}: use the commit that is supported")
        return subprocess.Popen([OUR_SERVER if part == HOST_SERVER else part for part in command], **options)


def main(
    tool_type: str | tuple[str, ...] = TOOL,
    host: str = "127.0.0.1",
    port: int = 5000,
    log_directory: str | None = None,
    **options: Any,
) -> None:
    """Serves until it is stopped; ``options`` are those of ``verl_tool.servers.serve``.

    Args:
        log_directory: for the tool servers' logs, which say why one did not start; None: a new folder, printed.
    """
    from verl_tool.servers import serve

    register()
    tool_type = check(tool_type, **options)
    if log_directory is None:
        log_directory = tempfile.mkdtemp(prefix="verl_bridge_tool_servers_")
        print(f"logs of the tool servers: {log_directory}", flush=True)
    serve.subprocess = OurServers
    serve.main(tool_type=tool_type, host=host, port=port, log_directory=log_directory, **options)


if __name__ == "__main__":
    run(main)
