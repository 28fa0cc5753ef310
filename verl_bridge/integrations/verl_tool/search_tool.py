"""The search tool for verl-tool's tool server: ``--tool_type verl_bridge_search``.

One request may carry many actions; all their queries are one search. A search that failed shows the model that it did,
is not valid, and is marked in the record; it is never an empty ``<information>`` block.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from verl_tool.servers.tools.base import BaseTool, register_tool

from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.verl_tool import TOOL
from verl_bridge.integrations.verl_tool.settings import open_source, read_counts
from verl_bridge.qa.actions import parse_action
from verl_bridge.retrieval.protocol import MAX_QUERY_CHARACTERS, observe
from verl_bridge.retrieval.wire import failed_answer

logger = logging.getLogger(__name__)

_CLOSING = ("</search>", "</answer>")


@register_tool
class BridgeSearchTool(BaseTool):
    """Answers ``<search>`` and ``<answer>``; keeps nothing between two calls, so nothing needs to be cleaned up."""

    tool_type = TOOL

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(num_workers)
        try:
            self.shown, self.top_k = read_counts(os.environ)
            self.source = open_source(os.environ)
        except ConfigError as error:
            # The server logs any exception of a tool and starts without it, healthy; this ends the process.
            raise SystemExit(f"verl_bridge: {error}") from error

    def get_usage_inst(self) -> str:
        """What the server tells about an action that no tool takes."""
        return "Write one query between <search> and </search>, or the final answer between <answer> and </answer>."

    def parse_action(self, action: str) -> tuple[str, bool]:
        """The query or answer, and whether the action is this tool's: malformed ones are, so that it can correct them.

        The server asks every tool in turn and gives an action to the first that takes it.
        """
        return parse_action(action).content, any(tag in action for tag in _CLOSING)

    async def aget_observations(
        self, trajectory_ids: Sequence[str], actions: Sequence[str], extra_fields: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[bool], list[bool]]:
        """Observations, dones and valids of the actions, in their order; see :func:`protocol.observe`."""
        finished = [bool(extra.get("finish")) for extra in extra_fields]
        parsed = [None if done else parse_action(a) for a, done in zip(actions, finished, strict=True)]
        queries = {i: a.content for i, a in enumerate(parsed) if a is not None and a.kind == "search"}
        asked = [i for i, query in queries.items() if len(query) <= MAX_QUERY_CHARACTERS]
        answers = {i: failed_answer("the query is too long") for i in queries}
        if asked:
            answers |= zip(asked, await self._search([queries[i] for i in asked]), strict=True)
        told = [observe(action, answers.get(i), self.shown) for i, action in enumerate(parsed)]
        observations, dones, valids = (list(column) for column in zip(*told, strict=True))
        return observations, dones, valids

    def get_observations(
        self, trajectory_ids: Sequence[str], actions: Sequence[str], extra_fields: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[bool], list[bool]]:
        """:meth:`aget_observations` for code without an event loop; the server takes the other one."""

        async def run() -> tuple[list[dict[str, Any]], list[bool], list[bool]]:
            try:
                return await self.aget_observations(trajectory_ids, actions, extra_fields)
            finally:
                if hasattr(self.source, "close"):
                    await self.source.close()

        return asyncio.run(run())

    def conduct_action(
        self, trajectory_id: str, action: str, extra_field: dict[str, Any]
    ) -> tuple[dict[str, Any], bool, bool]:
        """One action; see :meth:`get_observations`."""
        ((observation,), (done,), (valid,)) = self.get_observations([trajectory_id], [action], [extra_field])
        return observation, done, valid

    async def _search(self, queries: list[str]) -> list[dict[str, Any]]:
        try:
            return await self.source.search(queries, self.top_k)
        except Exception as error:  # a retriever in this process; a client answers what went wrong
            logger.exception("a retrieval failed")
            return [failed_answer(str(error) or type(error).__name__)] * len(queries)
