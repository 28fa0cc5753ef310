"""A tool parser for the embedded policy, which knows Search-R1's tags and no function calls.

Loaded by an end-to-end test through VERL_USE_EXTERNAL_MODULES; ``multi_turn.format=search_tags``.
"""

from __future__ import annotations

import json
from types import ModuleType

from wrapt import register_post_import_hook

from verl_bridge.qa.actions import read_turn


def _register(tool_parser: ModuleType) -> None:
    @tool_parser.ToolParser.register("search_tags")
    class TagParser(tool_parser.ToolParser):
        @property
        def stop_token_ids(self):
            return [self.tokenizer.convert_tokens_to_ids(tag) for tag in ("</search>", "</answer>")]

        async def extract_tool_calls(self, responses_ids, tools=None):
            action = read_turn(self.tokenizer, responses_ids).action
            text = self.tokenizer.decode(responses_ids)
            if action.kind != "search":
                return text, []
            arguments = json.dumps({"query": action.content})
            return text, [tool_parser.FunctionCall(name=tools[0].function.name, arguments=arguments)]


register_post_import_hook(_register, "verl.experimental.agent_loop.tool_parser")
