"""verl's own ``tool_agent`` loop for function-calling models, with one :class:`SearchTrace` per rollout.

verl runs the rollout: chat template, tool parser, parallel calls, limits. Around its steps this loop notes which tokens
were sampled, which call each belongs to, and what of the answers entered the context.

The final answer is in the last assistant message, the one without a call, after its reasoning: what stands between
``<answer>`` and ``</answer>`` when it uses tags, else all of it [ours]. What the reasoning says of tags is no answer. A
message with broken tags, with reasoning that never ends, or with a call that the parser could not read is malformed.
verl ends the rollout there; nothing is corrected. Calls are what verl's parser finds, in the reasoning too.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, ToolListWrap, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse

from verl_bridge.config import load_settings
from verl_bridge.integrations.tokens import encode_text
from verl_bridge.integrations.verl.retrieval_tool import RECORD, RetrievalTool, default_tools, query_of
from verl_bridge.plugin import TOOL_AGENT_LOOP
from verl_bridge.qa.actions import char_spans_to_token_spans, decode, parse_action, token_offsets
from verl_bridge.qa.questions import question_of, training_golds
from verl_bridge.trace import SearchTrace, SearchTurn, Span, StopReason

_TAG = re.compile(r"</?(?:think|search|answer|information|tool_call)>")
_CALL = re.compile(r"</?\|?tool_?calls?")
#: How a call begins in the formats of verl's parsers, and for a parser of one's own: at any mark or JSON object.
_CALL_BEGINS = re.compile(r"<(?:[^<>/\s]*(?:tool_call(?!\||\w*(?:_argument|_end))|invoke|function=)|\|start\|>)")
_OPENING = re.compile(r"<(?!/)|\{")
#: The second of each is gpt-oss's.
_REASONING_BEGINS = re.compile(r"<think>|<\|channel\|>analysis")
_REASONING_ENDS = re.compile(r"</think>|<\|channel\|>final<\|message\|>")


@register(TOOL_AGENT_LOOP)
class SearchToolAgentLoop(ToolAgentLoop):
    """Registered as ``verl_bridge_tool_agent``. verl makes one object per rollout.

    Of the ``verl_bridge`` section it takes ``retriever`` and of ``agent`` ``observation_tokens`` (in place of verl's
    ``max_tool_response_length``, which counts characters), ``turn_tokens``, and ``max_turns`` beside
    ``multi_turn.max_assistant_turns``: the smaller counts. Calls beyond ``multi_turn.max_parallel_calls`` are not made,
    as in verl; their tokens belong to the last one made.
    """

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any) -> None:
        given = tools.tools if tools else []
        super().__init__(*args, tools=ToolListWrap(list(given or default_tools())), **kwargs)
        settings = load_settings(self.config)
        self.agent = settings.agent
        self.max_assistant_turns = min(self.max_assistant_turns or self.agent.max_turns, self.agent.max_turns)
        for tool in self.tools.values():
            if isinstance(tool, RetrievalTool):
                tool.retriever = settings.retriever
        added = {mark: i for mark, i in self.tokenizer.get_added_vocab().items() if mark.startswith(("<", "["))}
        marks = sorted({*added, *self.tokenizer.all_special_tokens}, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        # some vocabularies hold tags of HTML, which are text
        control = {i for mark, i in added.items() if mark.startswith(("<|", "<｜", "["))}
        self._control_ids = control | set(self.tokenizer.all_special_ids)
        self._turns: list[SearchTurn] = []
        self._asked: Span = (0, 0)  # the turn whose calls are being made
        # what was told to each call of this turn, by the call's id: its record, the text shown
        self._told: dict[int, tuple[dict[str, Any] | None, str]] = {}
        self._answer: tuple[str, Span] | None = None
        self._stop: StopReason = "no_action"

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Roll out one question; ``extra_fields["search_trace"]`` carries the record."""
        messages = list(kwargs["raw_prompt"])
        self._question = question_of({**kwargs, "prompt": messages}) or str(messages[-1]["content"])
        golds = training_golds(kwargs, "a question of the dataset")
        output = await super().run(sampling_params, priority=priority, **kwargs)
        if not output.response_mask:
            # verl takes "the last 0 tokens" of an empty response for all of the prompt, and rewards the last token
            output.response_ids, output.response_mask = [self.tokenizer.eos_token_id], [0]
            output.response_logprobs = [0.0] if sampling_params.get("logprobs") else None
        trace = SearchTrace(
            question=self._question,
            golden_answers=golds,
            turns=tuple(self._turns),
            answer=self._answer[0] if self._answer else None,
            answer_span=self._answer[1] if self._answer else None,
            stop_reason=self._stop,
            response_length=len(output.response_ids),
        )
        output.extra_fields["search_trace"] = trace.to_dict()
        return output

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        agent_data.question = self._question  # for query_input=question_query
        agent_data.tool_calls = []  # verl leaves the turn before's when a limit ends the rollout
        self._told = {}
        messages = len(agent_data.messages)
        room = self.response_length - len(agent_data.response_mask)
        limit = min(self.agent.turn_tokens or room, room)
        state = await super()._handle_generating_state(
            agent_data, {**sampling_params, "max_tokens": limit}, ignore_termination
        )
        end = len(agent_data.response_mask)
        self._asked = (end - len(agent_data.response_ids), min(end, self.response_length))
        if state == AgentState.PROCESSING_TOOLS:
            return state
        ids = _response(agent_data)[slice(*self._asked)]
        calls = agent_data.tool_calls
        if len(agent_data.messages) == messages:  # a limit ended it before verl looked for calls
            tools = [tool.tool_schema for tool in self._active(agent_data).values()]
            _, calls = await self.tool_parser.extract_tool_calls(ids, tools)
        if calls:
            self._stop = "length" if end >= self.response_length else "max_turns"
            self._add_calls(agent_data, calls, [None] * len(calls))
        elif ids or not self._turns:
            cut = len(ids) >= limit and ids[-1] not in self.tokenizer.all_special_ids
            self._add_last(ids, cut, self._opens_reasoning(agent_data))
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        state = await super()._handle_processing_tools_state(agent_data)
        observed: list[tuple[Span, str] | None] = [None] * len(calls)
        if state == AgentState.GENERATING:
            start, mask = self._asked[0], agent_data.response_mask
            end = start + mask[start:].index(0)  # some templates take the turn's last token back
            self._asked = (start, end)
            texts = [self._told[id(call)][1] for call in calls]
            shown = [bool((self._told[id(call)][0] or {}).get("shown")) for call in calls]
            observed = _observations(self.tokenizer, _response(agent_data), end, texts, shown)
        else:  # verl drops an observation that leaves no room: it never entered the context
            self._stop = "length"
        self._add_calls(agent_data, agent_data.tool_calls, observed)
        return state

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float, dict]:
        response, reward, told = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        record, text = (told or {}).get(RECORD, (None, response.text or ""))
        ids = encode_text(self.tokenizer, text)
        if len(ids) > self.agent.observation_tokens:  # the head is kept
            text = decode(self.tokenizer, ids[: self.agent.observation_tokens]).rstrip("\N{REPLACEMENT CHARACTER}")
        # The chat template's text is tokenised with its control tokens: a corpus must not be able to write any.
        text = self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)
        self._told[id(tool_call)] = (record, text)
        return ToolResponse(text=text), reward, told

    def _active(self, agent_data: AgentData) -> dict[str, Any]:
        return getattr(agent_data, "_active_tools", self.tools)

    def _add_calls(
        self, agent_data: AgentData, calls: Sequence[FunctionCall], observed: Sequence[tuple[Span, str] | None]
    ) -> None:
        """A turn of the record for each call made; their spans follow one another and fill the assistant turn."""
        start, end = self._asked
        ids = _response(agent_data)[start:end]
        tags = [(start + a, start + b) for a, b in self._tags(ids)]
        spans = _call_spans(self.tokenizer, ids, calls)[: self.max_parallel_calls]
        spans[-1] = (spans[-1][0], len(ids))
        for call, (first, last), seen in zip(calls, spans, observed, strict=False):
            record = self._told.get(id(call), (None, ""))[0] or {}
            query = record.get("query")
            if id(call) not in self._told and isinstance(self._active(agent_data).get(call.name), RetrievalTool):
                query = query_of(call.arguments)  # never made
            span = (start + first, start + last)
            self._turns.append(
                SearchTurn(
                    "malformed" if query is None else "search",
                    span,
                    tuple((max(a, span[0]), min(b, span[1])) for a, b in tags if a < span[1] and b > span[0]),
                    observation_span=seen[0] if seen else None,
                    observation=seen[1] if seen else "",
                    **{**record, "query": query},
                )
            )

    def _add_last(self, ids: list[int], cut: bool, opened: bool) -> None:
        """The turn that made no call: the answer, or a malformed one.

        Args:
            ids: its tokens.
            cut: a limit ended it in mid-sentence.
            opened: the prompt opened its reasoning.
        """
        start, end = self._asked
        text, offsets = decode(self.tokenizer, ids), token_offsets(self.tokenizer, ids)
        body, found = _after_reasoning(text, opened), None
        if body is not None:
            action = parse_action(text[body:])
            if action.kind == "answer":
                found = body + action.content_start, body + action.content_end
            elif not action.tags and not cut:
                found = self._plain_answer(ids, text, offsets, body)
        tags = tuple((start + a, start + b) for a, b in self._tags(ids))
        self._turns.append(SearchTurn("answer" if found else "malformed", (start, end), tags))
        if found:
            ((first, last),) = char_spans_to_token_spans(offsets, [found])
            self._answer, self._stop = (text[slice(*found)], (start + first, start + last)), "answer"
        elif cut:
            self._stop = "length"

    def _plain_answer(self, ids: list[int], text: str, offsets: Sequence[Span], body: int) -> Span | None:
        """The characters of a message without tags, from ``body`` on; None when empty or with marks of a call."""
        special = set(self.tokenizer.all_special_ids)
        length = len(ids)
        while length and ids[length - 1] in special:
            length -= 1
        content = text[body : offsets[length - 1][1] if length else 0].strip()
        if not content or _CALL.search(content) or self._marks.search(content):
            return None
        first = text.index(content, body)
        return first, first + len(content)

    def _tags(self, ids: list[int]) -> list[Span]:
        """Structural tags and control tokens of a turn, wherever its action ends."""
        tags = [tag.span() for tag in _TAG.finditer(decode(self.tokenizer, ids))]
        control = {(i, i + 1) for i, token in enumerate(ids) if token in self._control_ids}
        return sorted({*control, *char_spans_to_token_spans(token_offsets(self.tokenizer, ids), tags)})

    def _opens_reasoning(self, agent_data: AgentData) -> bool:
        """Whether the template opened the reasoning of the turn that was just sampled."""
        end = len(agent_data.prompt_ids) - len(agent_data.response_ids)
        return decode(self.tokenizer, agent_data.prompt_ids[max(0, end - 16) : end]).rstrip().endswith("<think>")


def _response(agent_data: AgentData) -> list[int]:
    return agent_data.prompt_ids[len(agent_data.prompt_ids) - len(agent_data.response_mask) :]


def _after_reasoning(text: str, opened: bool) -> int | None:
    """Where the message begins that follows the reasoning of a turn; None when that never ends."""
    ends = [end.end() for end in _REASONING_ENDS.finditer(text)]
    if ends:
        return ends[-1]
    begin = _REASONING_BEGINS.search(text)
    # after a whole answer the opening is no reasoning that could have led to it
    return None if opened or (begin and parse_action(text[: begin.start()]).kind != "answer") else 0


def _call_spans(tokenizer: Any, ids: list[int], calls: Sequence[FunctionCall]) -> list[Span]:
    """Token span of each call, reasoning before the first one included; together they fill the turn.

    Each call is found by its words, from the last to the first and not before the mark that calls begin with: reasoning
    and prose may hold the same words. It ends where the next mark begins. A call that cannot be found has an empty
    span, and its tokens belong to the next.
    """
    text = decode(tokenizer, ids)
    begins = [mark.start() for mark in _CALL_BEGINS.finditer(text)]
    begins = begins or [mark.start() for mark in _OPENING.finditer(text)]
    begins.append(len(text))
    ends: list[int | None] = []  # of the last call first
    limit = len(text)
    for call in reversed(calls):
        places = [
            max(((text.rfind(words, begins[0], limit), len(words)) for words in spellings), default=(-1, 0))
            for spellings in _spellings(call)
        ]
        at, length = next((place for place in places if place[0] >= 0), (-1, 0))
        ends.append(None if at < 0 else begins[bisect_left(begins, at + length)])
        limit = limit if at < 0 else begins[max(0, bisect_left(begins, at) - 1)]
    cuts, cut = [], 0
    for end in ends[:0:-1]:  # the last call ends with the turn
        cut = cut if end is None else end
        cuts.append(cut)
    edges = [span[1] for span in char_spans_to_token_spans(token_offsets(tokenizer, ids), [(0, cut) for cut in cuts])]
    return list(zip([0, *edges], [*edges, len(ids)], strict=True))


def _spellings(call: FunctionCall) -> list[list[str]]:
    """How a call's own words may stand in the turn: its query or arguments, at worst its name."""
    query = query_of(call.arguments)
    words = [call.arguments if query is None else query, call.name]
    return [[spelt for spelt in (*_json(word), word) if spelt] for word in words]


def _json(text: str) -> tuple[str, str]:
    return json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


def _find(text: str, spellings: Sequence[str], start: int) -> Span | None:
    for spelling in spellings:
        at = text.find(spelling, start)
        if at >= 0:
            return at, at + len(spelling)
    return None


def _observations(
    tokenizer: Any, response: list[int], start: int, texts: Sequence[str], shown: Sequence[bool]
) -> list[tuple[Span, str] | None]:
    """Where each call's text stands among the tokens that the chat template made of all of them, and what they say.

    A template may respell the texts; where one cannot be found, all of the tokens are the observation of the last call
    that has documents: credit takes the calls of a turn together.
    """
    ids = response[start:]
    block, spans, cursor = decode(tokenizer, ids), [], 0
    for text in map(str.strip, texts):
        at = _find(block, (text, _json(text)[0]), cursor)
        if at is None:
            last = max((i for i, documents in enumerate(shown) if documents), default=len(texts) - 1)
            return [((start, len(response)), block) if i == last else None for i in range(len(texts))]
        spans.append(at)
        cursor = at[1]
    found: list[tuple[Span, str] | None] = []
    edge = 0
    for first, last in char_spans_to_token_spans(token_offsets(tokenizer, ids), spans):
        first = max(first, edge)  # a token that holds the end of one and the start of the next
        edge = max(first, last)
        found.append(((start + first, start + edge), decode(tokenizer, ids[first:edge])))
    return found
