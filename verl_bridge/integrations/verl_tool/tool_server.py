"""verl-tool's tool server with our search tool: ``python -m verl_bridge.integrations.verl_tool.tool_server``.

Takes the arguments of ``verl_tool.servers.tool_server``. Differences: our tool is the default, it serves this machine
alone unless ``--host`` says otherwise, and a tool that is unknown or cannot start ends the server, where verl-tool's
own starts healthy with nothing but ``finish``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from verl_bridge.integrations.verl_tool import TOOL

HOST_SERVER = "verl_tool.servers.tool_server"


def register() -> None:
    """Makes the tool known to verl-tool: it takes a name only if it lists it, and imports it from its own package."""
    from verl_tool.servers.tools import base

    if TOOL not in base.ALL_TOOLS:
        base.ALL_TOOLS.append(TOOL)
    sys.modules[f"{base.__package__}.{TOOL}"] = importlib.import_module(
        "verl_bridge.integrations.verl_tool.search_tool"
    )


def check(tool_type: str | tuple[str, ...], **options: Any) -> str:
    """``tool_type`` as comma-separated names, all of them known. Raises ValueError naming the flag and the fix."""
    from verl_tool.servers.tools import base

    names = [name.strip() for name in (tool_type.split(",") if isinstance(tool_type, str) else tool_type)]
    for name in names:
        if name not in base.ALL_TOOLS:
            known = ", ".join(sorted(base.ALL_TOOLS))
            raise ValueError(f"--tool_type {name!r} is not a tool of verl-tool's or ours: choose one of {known}")
    if TOOL not in names:
        raise ValueError(f"--tool_type {','.join(names)} without {TOOL}: add it, or start verl-tool's own server")
    if options.get("use_ray"):
        raise ValueError(f"--use_ray: {TOOL} answers many requests at a time as it is; leave the flag out")
    return ",".join(names)


def main(tool_type: str | tuple[str, ...] = TOOL, host: str = "127.0.0.1", port: int = 5000, **options: Any) -> None:
    """Serves until it is stopped; ``options`` are those of ``verl_tool.servers.tool_server``."""
    register()
    tool_type = check(tool_type, **options)
    importlib.import_module(HOST_SERVER).main(tool_type=tool_type, host=host, port=port, **options)


def run(command: Any) -> None:
    """``command`` with the arguments of the command line; a refusal is a message and exit code 2."""
    import fire

    try:
        fire.Fire(command)
    except ValueError as error:
        print(f"verl_bridge: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    run(main)
