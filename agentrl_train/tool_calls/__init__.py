"""The syntax of tool calls, by family of models: text of a turn -> thought, content and calls, and back.

``parser_for`` selects a family for a chat template, and ``PARSERS`` has all families by name. Text in a
thought is never a call. A call that starts but cannot be parsed becomes a call without a name, not content.
It is answered with an error for the model (``errors.py``). ``read_turn`` (``turn.py``) also parses calls of
known tools that are JSON outside the syntax of the family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from agentrl_train.tool_calls.channels import Harmony
from agentrl_train.tool_calls.json_forms import (
    Apertus,
    Cohere,
    DeepSeek,
    Gemma,
    JsonFamily,
    Kimi,
    Llama,
    Mistral,
)
from agentrl_train.tool_calls.prompted import PROMPTED
from agentrl_train.tool_calls.python_forms import PythonFamily
from agentrl_train.tool_calls.turn import Family, ParsedCall, ParsedTurn, ToolParser, one_of
from agentrl_train.tool_calls.xml_forms import XmlFamily

__all__ = [
    "PARSERS",
    "PROMPTED",
    "THOUGHT",
    "THOUGHT_BEGINS",
    "ParsedCall",
    "ParsedTurn",
    "ToolParser",
    "parser_for",
    "parser_named",
]

_FAMILIES: tuple[Family | Harmony, ...] = (
    Harmony(),
    Gemma(name="gemma4", template=r"<\|tool_call>"),
    Kimi(name="kimi", template=r"<\|tool_calls_section_begin\|>|tool_declare"),
    DeepSeek(name="deepseek", template=r"<｜tool▁sep｜>(?=[\s\S]*```json)", fenced=True),
    DeepSeek(name="deepseek_v31", template="<｜tool▁(?:calls▁begin|sep)｜>", fenced=False),
    Mistral(
        name="mistral_call_id",
        template=r"\[CALL_ID\]",
        form="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    ),
    Mistral(name="mistral_args", template=r"\[ARGS\]", form="[TOOL_CALLS]{name}[ARGS]{arguments}"),
    Mistral(name="mistral", template=r"\[TOOL_CALLS\]", form="list"),
    Cohere(
        name="cohere",
        template=r"<\|START_ACTION\|>",
        opening_tag="<|START_ACTION|>",
        closing_tag="<|END_ACTION|>",
        thoughts=("<|START_THINKING|>{}<|END_THINKING|>",),
        spoken="<|START_RESPONSE|>{}<|END_RESPONSE|>",
        gap="",
    ),
    Apertus(
        name="apertus",
        template=r"<\|tools_prefix\|>",
        opening_tag="<|tools_prefix|>",
        closing_tag="<|tools_suffix|>",
        thoughts=("<|inner_prefix|>{}<|inner_suffix|>",),
        gap="",
    ),
    PythonFamily(
        name="lfm2",
        template=r"<\|tool_(?:call|list)_start\|>|\bList of tools: \[",
        opening=r"<\|tool_call_start\|>",
        closing=r"<\|tool_call_end\|>",
        form="<|tool_call_start|>[{}]<|tool_call_end|>",
        thoughts=("<think>{}</think>",),
    ),
    PythonFamily(
        name="olmo3",
        template="<function_calls>",
        opening="<function_calls>",
        closing="</function_calls>",
        form="<function_calls>{}</function_calls>",
        separator="\n",
    ),
    PythonFamily(
        name="llama_python",
        template=r"\[func_name1?\(|<\|python_start\|>\[",
        opening=r"<\|python_start\|>|(?:\A|(?<=[\n>]))(?=\[[A-Za-z_][\w.]*\()",
        closing=r"(?<=\])(?:<\|python_end\|>)?",
        form="[{}]",
        gap="\n",
    ),
    XmlFamily(
        name="minimax",
        template="<minimax:tool_call>",
        block=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=('<invoke name="{}">\n', "</invoke>\n"),
        parameter=('<parameter name="{}">', "</parameter>\n"),
        shared_block=True,
    ),
    XmlFamily(
        name="seed",
        template="<seed:tool_call>",
        block=("<seed:tool_call>\n", "</seed:tool_call>"),
        call=("<function={}>\n", "</function>\n"),
        parameter=("<parameter={}>", "</parameter>\n"),
        thoughts=("<seed:think>{}</seed:think>",),
    ),
    XmlFamily(
        name="glm",
        template="<arg_key>",
        call=("<tool_call>{}\n", "</tool_call>"),
        parameter=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
        thoughts=("\n<think>{}</think>\n",),
    ),
    XmlFamily(
        name="minicpm",
        template="<(?:param|function) name=",
        call=('<function name="{}">', "</function>"),
        parameter=('<param name="{}">', "</param>"),
        cdata=True,
    ),
    XmlFamily(
        name="qwen_xml",
        template="<function=",
        block=("<tool_call>\n", "</tool_call>"),
        call=("<function={}>\n", "</function>\n"),
        parameter=("<parameter={}>\n", "\n</parameter>\n"),
        gap="\n\n",
    ),
    JsonFamily(name="nemotron", template="<TOOLCALL>", opening_tag="<TOOLCALL>", closing_tag="</TOOLCALL>"),
    JsonFamily(
        name="phi4",
        template=r"<\|/tool(?:_call)?\|>",
        opening_tag="<|tool_call|>",
        closing_tag="<|/tool_call|>",
        gap="",
    ),
    JsonFamily(
        name="granite",
        template=r"<\|tool_call\|>",
        opening=r"<\|?tool_call\|?>",
        opening_tag="<|tool_call|>",
        closing_tag="",
        gap="",
    ),
    JsonFamily(
        name="hermes",
        template="<tool_call>",
        opening_tag="<tool_call>",
        closing_tag="</tool_call>",
        listed=False,
    ),
    Llama(
        name="llama",
        template=r"<\|python_tag\|>|<\|start_header_id\|>ipython|\"parameters\": dictionary of argument name",
    ),
)

PARSERS: Mapping[str, ToolParser] = {family.name: family for family in _FAMILIES}
"""Parsers by name, which is a value of the setting ``tool_parser``."""


def parser_for(chat_template: str) -> ToolParser | None:
    """Return the family of the calls that a chat template writes, or None if it writes no known calls."""
    return next((family for family in _FAMILIES if re.search(family.template, chat_template)), None)


def parser_named(name: str, chat_template: str) -> ToolParser:
    """Return the parser of a name in ``PARSERS`` or ``PROMPTED``. It also parses the template's thoughts."""
    family = PROMPTED[name].family if name in PROMPTED else name
    written, parser = parser_for(chat_template), PARSERS[family]
    if not isinstance(parser, Family):
        return parser
    first = written.thoughts if isinstance(written, Family | Harmony) else ()
    others = (form for family in _FAMILIES for form in family.thoughts if _tag(form) in chat_template)
    forms: dict[str, str] = {}
    for form in (*first, *parser.thoughts, *others):
        forms.setdefault(_tag(form), form)
    return replace(parser, thoughts=tuple(forms.values()))


def _tag(thought: str) -> str:
    """Return the text that opens a thought of some form."""
    return thought.partition("{}")[0].strip()


THOUGHT_BEGINS = f"(?:{one_of({_tag(form) for family in _FAMILIES for form in family.thoughts})})"
"""Pattern of the text that opens a thought."""
_THOUGHT_ENDS = one_of(
    {
        form.partition("{}")[2].strip()
        for family in _FAMILIES
        if isinstance(family, Family)
        for form in family.thoughts
    }
)
THOUGHT = re.compile(f"{THOUGHT_BEGINS}|{_THOUGHT_ENDS}")
"""Pattern of a mark that opens or closes a thought, of any family."""
