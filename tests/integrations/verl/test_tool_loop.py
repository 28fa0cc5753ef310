"""Which tokens are whose in a function-calling turn: reasoning and prose may name tags and queries of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tool_standins import END, TEMPLATE, call, roll_out, text, tokenizer
from transformers import AutoTokenizer

import verl_bridge.embedded
from verl_bridge.config.schema import GCAConfig
from verl_bridge.credit import batch_signals, ground
from verl_bridge.qa.reward import score_trace
from verl_bridge.qa.signals import rollout_signals

ANSWER = "<answer>Lima</answer>" + END
#: Templates of models that always reason, and of those that were asked not to.
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SILENT = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")


@pytest.fixture
def roll(monkeypatch):
    return partial(roll_out, monkeypatch)


REASONING = [
    "I must put it in <answer></answer> tags.",
    "The format is <answer> and </answer>.",
    "Maybe <answer>Cusco</answer>? No.",
    "<answer>Cusco</answer> is wrong, not <answer>Quito</answer> either.",
    "First <search>peru</search> would do.",
    "Never <search>x</answer> nor <tool_call></tool_call> nor <tool_call>{cut off.",
    "It said <information>Cusco</information>, or <information>",
    "<think> again, and </think> early.",
]


@pytest.mark.parametrize("reasoning", REASONING)
@pytest.mark.parametrize(
    ("template", "opening"), [(TEMPLATE, "<think>"), (THINKING, ""), (THINKING, "<think>"), (SILENT, "")]
)
@pytest.mark.parametrize("said", ["<answer> Lima </answer>", "Lima"])
def test_what_reasoning_says_of_tags_is_no_answer(roll, reasoning, template, opening, said):
    before = f"{opening}{reasoning}</think>\n"
    output, trace, tok, *_ = roll(before + said + END, template=template)
    assert (trace.turns[0].kind, trace.answer, trace.stop_reason) == ("answer", "Lima", "answer")
    assert text(output, tok, trace.answer_span) == "Lima" and score_trace(trace).score == 1.0
    assert text(output, tok, (0, trace.answer_span[0])) == before + said[: said.index("Lima")]


def test_every_tag_of_the_reasoning_is_gated(roll):
    _, trace, *_ = roll("<think>use <answer></answer></think><answer>Lima</answer>" + END)
    # a token a byte, but </think> and the end are one each: 7 4 8 9 1 | 8 4 9 | 1
    assert trace.turns[0].span == (0, 51) and trace.answer_span == (37, 41)
    assert trace.turns[0].tag_spans == ((0, 7), (11, 19), (19, 28), (28, 29), (29, 37), (41, 50), (50, 51))
    _, trace, *_ = roll("<think>so <answer>x</answer></think>" + call() + END, ANSWER)
    # 7 3 8 1 9 1 | 1, then {"name": "search", "arguments": {"query": "peru"}} of 50, then 1 and 1
    assert trace.turns[0].tag_spans == ((0, 7), (10, 18), (19, 28), (28, 29), (29, 30), (80, 81), (81, 82))


def test_a_token_that_ends_the_reasoning_and_begins_the_answer(roll):
    """``><`` is a token of many vocabularies."""
    tok = tokenizer(marks=(), merges=[("<", "/"), (">", "<")])
    output, trace, *_ = roll("so</think><answer>Lima</answer>" + END, tok=tok)
    assert [tok.decode([i]) for i in output.response_ids[8:11]] == ["><", "a", "n"]
    # s o </ t h i n k >< a n s w e r > L i m a </ a n s w e r > end
    assert trace.answer == "Lima" and trace.answer_span == (16, 20) and trace.turns[0].span == (0, 29)
    assert trace.turns[0].tag_spans == ((2, 9), (8, 16), (20, 28), (28, 29))


@pytest.mark.parametrize(
    ("template", "said", "limit", "answer", "stop"),
    [
        (TEMPLATE, "<think>Is it <answer>Lima</answer>" + END, None, None, "no_action"),
        (TEMPLATE, "<think>Is it <answer>Lima</answer>? Or", 36, None, "length"),
        (THINKING, "Is it <answer>Lima</answer>" + END, None, None, "no_action"),
        (THINKING, "Is it <answer>Lima</answer>? Or", 29, None, "length"),
        (THINKING, "Lima" + END, None, None, "no_action"),
        (TEMPLATE, "It is <answer>Lima</answer>" + END, None, "Lima", "answer"),
        (TEMPLATE, "It is <answer>Lima</answer>, the", 29, "Lima", "answer"),
        (TEMPLATE, "<answer>Lima</answer> (no <think> needed)" + END, None, "Lima", "answer"),
        (SILENT, "It is <answer>Lima</answer>" + END, None, "Lima", "answer"),
        (TEMPLATE, "<think>It is <answer>Lima</answer></think>" + END, None, None, "no_action"),
        (TEMPLATE, "<think>Lima</think>Use <answer></answer>: <answer>Lima</answer>" + END, None, None, "no_action"),
    ],
)
def test_reasoning_that_never_ends_gives_no_answer(roll, template, said, limit, answer, stop):
    _, trace, *_ = roll(said, template=template, agent={"turn_tokens": limit} if limit else None)
    assert (trace.answer, trace.stop_reason) == (answer, stop)
    assert trace.turns[0].kind == ("answer" if answer else "malformed")


@pytest.mark.parametrize("said", ["Lima", "<answer>Lima</answer>"])
def test_the_final_channel_of_gpt_oss(roll, said):
    tok = tokenizer(marks=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"))
    thought = "<|channel|>analysis<|message|>In <answer></answer>. Cusco?<|end|>"
    output, trace, *_ = roll(
        f"{thought}<|start|>assistant<|channel|>final<|message|>{said}{END}", tok=tok, format="gpt-oss"
    )
    assert trace.answer == "Lima" and text(output, tok, trace.answer_span) == "Lima"
    gated = [text(output, tok, tag) for tag in trace.turns[0].tag_spans]
    assert gated[:6] == ["<|channel|>", "<|message|>", "<answer>", "</answer>", "<|end|>", "<|start|>"]
    _, trace, *_ = roll(thought + END, tok=tok, format="gpt-oss")
    assert trace.answer is None


BROKEN, GOOGLE = call(words=["x"]), call("Lima", name="google")
TURNS = [
    ["<think>Look up peru, then chile.</think>" + call("peru"), call("chile")],
    ['<think>"peru"?</think>I search "peru" and "chile". ' + call("peru") + ' "chile"\n', call("chile") + ' "peru".'],
    ["<think>Lima, Lima</think>Lima: " + call("Lima") + "\nLima again\n", call("Lima") + " Lima"],
    ["<think>With <tool_call></tool_call>: peru, chile.</think>" + call("peru"), call("chile")],
    ["<think>" + call("peru") + "I could say chile.</think>", call("chile")],
    ["<think>chile</think>" + call("peru"), '<tool_call>{"query": "chile"}</tool_call>' + call("chile")],
    ["search, query: " + call("search"), call("query"), call("search")],
    [call("a"), call("l"), call("a")],
    [call("peru"), call("peru, Lima says"), call("peru")],
    ["<think>What is it?</think>" + call("what is <tool_call>"), call("<tool_call> of what"), call("what")],
    ["<think>Perú</think>" + call("Perú"), call('the "Inca"') + "\n", call("Perú")],
    [call("Perú"), call("Perú").replace("ú", "\\u00fa")],
    ["<think>Lima, x</think>" + call("Lima"), BROKEN],
    ["<think>Lima, x, words</think>" + BROKEN, call("Lima")],
    ["<think>Lima</think>Lima. " + call("Lima"), BROKEN, call("Lima")],
    ["<think>google Lima</think>" + call("Lima"), GOOGLE],
]


def shipped():
    """The demo policy's: byte-level BPE that spells the marks of a call with many tokens."""
    tok = AutoTokenizer.from_pretrained(Path(verl_bridge.embedded.__file__).parent / "policy")
    tok.chat_template = TEMPLATE
    return tok


@pytest.mark.parametrize("make", [tokenizer, shipped])
@pytest.mark.parametrize("pieces", TURNS)
def test_calls_of_a_turn_share_it_out(roll, pieces, make):
    tok = make()
    pieces = [*pieces[:-1], pieces[-1] + tok.eos_token]
    output, trace, *_ = roll("".join(pieces), ANSWER, tok=tok)
    assert [text(output, tok, turn.span) for turn in trace.turns[:-1]] == pieces
    for turn, piece in zip(trace.turns, pieces, strict=False):
        assert turn.kind == ("malformed" if BROKEN in piece or GOOGLE in piece else "search")
        gated = [text(output, tok, tag) for tag in turn.tag_spans]
        assert gated == re.findall(r"</?(?:think|tool_call)>|<eos>|<\|im_end\|>", piece)


def test_a_token_that_ends_a_call_and_begins_the_next_belongs_to_the_first(roll):
    tok = tokenizer(marks=(), merges=[("<", "/"), (">", "<")])
    said = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    output, trace, *_ = roll(said + said + END, ANSWER, tok=tok)
    # < to > 11, {...} 47, </ to l 10, >< 1; t to > 10, {...} 47, </ to l 10, > 1, the end 1
    first, second = trace.turns[:2]
    assert (first.span, second.span) == ((0, 69), (69, 138))
    assert first.tag_spans == ((0, 11), (58, 69), (68, 69))
    assert second.tag_spans == ((69, 79), (126, 137), (137, 138))
    assert output.response_mask[:139] == [1] * 138 + [0]


@pytest.mark.parametrize(
    ("format", "pieces"),
    [
        (
            "kimi",
            [
                "Lima? <|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
                '{"query": "Lima"}<|tool_call_end|>',
                "<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{Lima}<|tool_call_end|>"
                "<|tool_calls_section_end|>",
            ],
        ),
        (
            "qwen3_coder",
            [
                "Lima <tool_call>\n<function=search>\n<parameter=query>Lima</parameter>\n</function>\n</tool_call>\n",
                "<tool_call>\n<function=search>\n<parameter=words>\nx\n</parameter>\n</function>\n</tool_call>",
            ],
        ),
        (
            "glm",
            [
                "Lima?</think><tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Lima</arg_value>\n</tool_call>",
                "<tool_call>search\n<arg_key>words</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
            ],
        ),
        (
            "seed",
            [
                "Lima? <seed:tool_call><function=search><parameter=query>Lima</parameter></function></seed:tool_call>",
                "<seed:tool_call><function=search><parameter=words>x</parameter></function></seed:tool_call>",
            ],
        ),
        (
            "minimax",
            [
                'Lima? <minimax:tool_call><invoke name="search"><parameter name="query">Lima</parameter></invoke>',
                '<invoke name="search"><parameter name="words">x</parameter></invoke></minimax:tool_call>',
            ],
        ),
        (
            "deepseek_v4",
            [
                'Lima?</think><｜DSML｜tool_calls><｜DSML｜invoke name="search">'
                '<｜DSML｜parameter name="query" string="true">Lima</｜DSML｜parameter></｜DSML｜invoke>\n',
                '<｜DSML｜invoke name="search"><｜DSML｜parameter name="words" string="true">x</｜DSML｜parameter>'
                "</｜DSML｜invoke></｜DSML｜tool_calls>",
            ],
        ),
        (
            "gpt-oss",
            [
                "<|channel|>analysis<|message|>Lima?<|end|><|start|>assistant<|channel|>commentary to=functions.search "
                '<|constrain|>json<|message|>{"query": "Lima"}<|call|>',
                "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{x<|call|>",
            ],
        ),
    ],
)
def test_the_formats_of_verls_parsers(roll, format, pieces):
    tok = tokenizer(marks=())
    pieces = [pieces[0], pieces[1] + END]
    output, trace, *_ = roll("".join(pieces), ANSWER, tok=tok, format=format)
    assert [turn.kind for turn in trace.turns] == ["search", "malformed", "answer"]
    assert [text(output, tok, turn.span) for turn in trace.turns[:2]] == pieces


def test_a_format_of_ones_own(roll, monkeypatch):
    """Calls as a JSON list without any mark."""
    import json

    from verl.experimental.agent_loop.tool_parser import FunctionCall, HermesToolParser

    async def extract(self, ids, tools=None):
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        calls = json.loads(said[said.index("[") :]) if "[" in said else []
        return said, [FunctionCall(name=c["name"], arguments=json.dumps(c["arguments"])) for c in calls]

    monkeypatch.setattr(HermesToolParser, "extract_tool_calls", extract)
    pieces = [
        'Lima or Cusco? [{"name": "search", "arguments": {"query": "Lima"}}, ',
        '{"name": "search", "arguments": {"query": "Cusco"}}]' + END,
    ]
    output, trace, tok, *_ = roll("".join(pieces), ANSWER)
    assert [text(output, tok, turn.span) for turn in trace.turns[:2]] == pieces


@pytest.mark.parametrize("turns", [9, 1])
def test_equal_calls_beyond_the_limit_belong_to_the_last_one_made(roll, turns):
    pieces = ["Lima " + call("Lima"), call("Lima") + call("Lima") + call("Lima") + END]
    output, trace, tok, *_, source = roll("".join(pieces), ANSWER, max_parallel_calls=2, agent={"max_turns": turns})
    assert [text(output, tok, turn.span) for turn in trace.turns[:2]] == pieces
    assert source.asked == (["Lima"] * 2 if turns > 1 else []) and len(trace.turns) == (3 if turns > 1 else 2)


def test_a_search_that_found_evidence_is_not_blamed_beside_a_malformed_call(roll):
    output, trace, *_ = roll("<think>Lima?</think>" + call("Lima") + BROKEN + END, ANSWER)
    # 7 5 1 | 1 50 1, then 1, {"name": "search", "arguments": {"words": ["x"]}} of 49, 1 | 1
    hit, broken = trace.turns[:2]
    assert (hit.kind, hit.span, broken.kind, broken.span) == ("search", (0, 65), "malformed", (65, 117))
    assert hit.tag_spans == ((0, 7), (12, 13), (13, 14), (64, 65))
    assert broken.tag_spans == ((65, 66), (115, 116), (116, 117))
    _, wrong, *_ = roll("Quito" + END)
    for sign in (1.0, -1.0):
        mask = torch.zeros(2, trace.response_length)
        mask[0], mask[1, :6] = torch.tensor(output.response_mask), 1.0
        advantages, group = torch.tensor([[sign], [-sign]]) * mask, torch.tensor([0, 0])
        signals = batch_signals([trace, wrong], group)
        result = ground(
            [trace, wrong],
            signals,
            advantages,
            mask,
            group,
            torch.tensor([0.8, 0.0]),
            group_relative=True,
            settings=replace(GCAConfig(enable=True), salience="uniform"),
        )
        change = (result.advantages - advantages)[0]
        # ρ·λ·c_max/2 = 0.2 · ±0.5 · 0.25, on words alone
        assert change[14:64].tolist() == pytest.approx([0.025] * 50)
        assert change[66:115].tolist() == pytest.approx([-0.025] * 49)
        assert change[:7].tolist() == [0.0] * 7 and change[[12, 13, 64, 65, 115, 116]].tolist() == [0.0] * 6


def test_information_that_the_model_wrote_is_no_evidence(roll):
    said = "<think><information>Lima</information></think><information>Lima</information>"
    _, trace, *_ = roll(call("chile") + END, said + ANSWER)
    signals = rollout_signals(trace)
    assert trace.answer == "Lima" and (signals.hit, signals.first_hit_turn, signals.correct) == (False, -1, True)
