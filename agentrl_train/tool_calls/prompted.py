"""Syntaxes of tool calls that the system prompt describes, for chat templates that write no calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSyntax:
    """The texts that describe tools, calls and results to a model."""

    family: str
    """Family of the calls, a name of ``PARSERS``."""
    instructions: str
    """Text of the system prompt, with a ``{tools}`` field."""
    result: str
    """Text of a result, with a ``{}`` field."""


_TOOLS = """\
You can call these tools, described by their JSON Schemas:
<tools>
{tools}
</tools>
"""
PROMPTED: Mapping[str, PromptSyntax] = MappingProxyType(
    {
        "prompt": PromptSyntax(
            family="hermes",
            instructions=_TOOLS
            + """\
To call one, write a JSON object with its name and arguments inside these tags, one pair of tags per call:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
The result follows in the next message, inside <tool_response></tool_response>.""",
            result="<tool_response>\n{}\n</tool_response>",
        ),
        "prompt_python": PromptSyntax(
            family="llama_python",
            instructions=_TOOLS
            + """\
To call some, write a list of Python calls with named arguments:
[NAME(ARGUMENT=VALUE, ...)]
Each result follows in the next message, after "Result:".""",
            result="Result: {}",
        ),
    }
)
"""Values of ``tool_parser`` that describe tools in the system prompt. A call in Python has less than half of
the tokens of one in JSON."""
