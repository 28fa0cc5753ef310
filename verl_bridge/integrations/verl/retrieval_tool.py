"""The search tool of function-calling models in verl's ``tool_agent`` loop.

It answers one query per call; several calls of one turn run at the same time. The loop that writes the trace is
:class:`~verl_bridge.integrations.verl.tool_loop.SearchToolAgentLoop`: it hands the tool its settings and bounds what
the model reads.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.import_utils import resolve_config_path
from verl.utils.rollout_trace import rollout_trace_op

import verl_bridge.config
from verl_bridge.config.schema import ConfigError, RetrieverConfig
from verl_bridge.integrations.sources import ask, search_source
from verl_bridge.qa.actions import (
    NOTHING_FOUND,
    OBSERVATION_HEAD,
    OBSERVATION_TAIL,
    RETRIEVAL_FAILED,
    format_observation,
)

#: The tool as verl's ``multi_turn.tool_config_path`` takes it; what the loop uses when that is null.
TOOL_FILE = Path(verl_bridge.config.__file__).parent / "tools" / "search.yaml"
#: Where :meth:`RetrievalTool.execute` leaves (search fields of the turn's record or None, whole text) in the third
#: value it returns: verl cuts the response's text at a number of characters.
RECORD = "verl_bridge_search"
NO_QUERY = 'The search needs a query: {"query": "what to look up"}.'


class RetrievalTool(BaseTool):
    """One search per call: ``{"query": "..."}``. Name, description and parameters are in the yaml file.

    The documents come back as plain lines, "Doc 1(Title: …) …": the chat template puts its own marks around them.
    """

    retriever: RetrieverConfig | None = None  # the loop's ``verl_bridge.retriever``

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Search, and leave record and text under :data:`RECORD`; without a usable query there is no record.

        Args:
            instance_id: verl's, not needed.
            parameters: the call's arguments, whatever JSON the model wrote.
            kwargs: ``agent_data`` with the loop's ``question``.

        Raises:
            RuntimeError: the loop has handed over no settings.
        """
        if self.retriever is None:
            raise RuntimeError(
                "RetrievalTool has no retriever: set actor_rollout_ref.rollout.agent.default_agent_loop to "
                "verl_bridge_tool_agent"
            )
        query = query_of(parameters)
        if query is None:
            return ToolResponse(text=NO_QUERY), 0.0, {RECORD: (None, NO_QUERY)}
        question = getattr(kwargs.get("agent_data"), "question", "")
        record, documents = await ask(self.retriever, query, question, search_source)
        if record["status"] == "error":
            text = RETRIEVAL_FAILED.strip()
        elif not documents:
            text = NOTHING_FOUND.strip()
        else:
            text = format_observation(documents)[len(OBSERVATION_HEAD) : -len(OBSERVATION_TAIL)]
        return ToolResponse(text=text), 0.0, {RECORD: (record, text)}


def query_of(parameters: Any) -> str | None:
    """The query in a call's arguments, parsed or still JSON; None when they hold none."""
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except ValueError:
            return None
    query = parameters.get("query") if isinstance(parameters, dict) else None
    return query.strip() if isinstance(query, str) and query.strip() else None


@cache
def default_tools() -> tuple[BaseTool, ...]:
    """The tools of :data:`TOOL_FILE`, made once per process: verl makes a loop object per rollout."""
    return tuple(initialize_tools_from_config(str(TOOL_FILE)))


def check_tools(multi_turn: DictConfig) -> None:
    """Raise ConfigError for tools that a trace cannot tell of: it knows searches, and anything else is malformed.

    Args:
        multi_turn: ``actor_rollout_ref.rollout.multi_turn``.
    """
    key = "actor_rollout_ref.rollout.multi_turn"
    if multi_turn.get("function_tool_path"):
        raise ConfigError(
            f"{key}.function_tool_path={multi_turn.function_tool_path} with verl_bridge_tool_agent, whose traces know "
            "only searches: set it to null"
        )
    path = multi_turn.get("tool_config_path")
    if not path:
        return
    try:
        tools = initialize_tools_from_config(resolve_config_path(path))
    except Exception as error:
        raise ConfigError(
            f"{key}.tool_config_path={path} gives no tools ({error!r}): begin with {TOOL_FILE}"
        ) from error
    others = [tool.name for tool in tools if not isinstance(tool, RetrievalTool)]
    if others or not tools:
        raise ConfigError(
            f"{key}.tool_config_path={path} has {', '.join(others) or 'no tools'}, and verl_bridge_tool_agent takes "
            f"only RetrievalTool, for its traces know only searches: leave the path null, or begin with {TOOL_FILE}"
        )
