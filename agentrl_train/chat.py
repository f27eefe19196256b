"""Step 4 of 9: messages -> token ids, and completions -> messages, append-only.

The chat template is rendered once, for the opening of a session. Every turn then appends the tokens of the
completion exactly as sampled, followed by the rendered reply. Tokens are never decoded and re-encoded; text
is decoded only to parse tool calls. Control tokens come from the template alone: where a message of the
environment spells one, it is encoded as the text that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentrl_env.types import FunctionCall, Message, ToolCall, ToolSpec
from agentrl_train.errors import ConfigError

_MARK = "\u2042the completion goes here\u2042"
_BREAK = "\ufdd0"
"""Splits a control token within a message into two texts; Unicode reserves it for internal use."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class ChatFormat:
    """Renders sessions with the chat template of one tokenizer.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template does not support appending turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(f"{tokenizer.name_or_path} has no chat template: use an instruct model")
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{tokenizer.name_or_path} has no eos token: set eos_token")
        self.tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self._stop_text: str = tokenizer.eos_token
        self._control = _control_tokens(tokenizer)
        self._check_template()

    def _check_template(self) -> None:
        answers = [
            Message(role="user", content="hello"),
            Message(role="tool", content="done", tool_call_id="call_1"),
        ]
        for answer in answers:
            try:
                self.reply([answer], stopped=True)
            except TemplateError as error:
                raise ConfigError(f"the chat template rejects a {answer.role} message: {error}") from error

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the opening messages and the tools, ending with the generation prompt."""
        return self._encode(self._render(messages, tools))

    def reply(self, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """Render the tokens between one completion and the next.

        Args:
            messages: the reply of the environment.
            stopped: whether the completion ended with a sampled stop token; if not, the end of the turn is
                added here, unsampled.
        """
        before = [Message(role="user", content="hello"), Message.assistant(_MARK)]
        text = self._render([*before, *messages], ()).partition(_MARK)[2]
        if not text.startswith(self._stop_text):
            raise ConfigError(
                f"the chat template does not end an assistant turn with {self._stop_text!r}, "
                "so turns cannot be appended: fix the template, or set eos_token to the token it writes"
            )
        return self._encode(text.removeprefix(self._stop_text) if stopped else text)

    def parse(self, token_ids: Sequence[int], *, turn: int) -> Message:
        """Parse a completion as an assistant message with Hermes tool calls.

        A call that is not JSON becomes a call with an empty name, which the environment answers with an error
        message for the model. Calls inside ``<think>`` are ignored.
        """
        ids = [i for i in token_ids if i not in self.stop_token_ids]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        reasoning, closing_tag, answer = text.rpartition("</think>")
        calls = [
            _tool_call(match.group(1), call_id=f"call_{turn}_{number}")
            for number, match in enumerate(_CALL.finditer(answer))
        ]
        content = (reasoning + closing_tag + _CALL.sub("", answer)).strip()
        return Message.assistant(content or None, *calls)

    def completion(self, message: Message) -> list[int]:
        """Return the tokens a model would sample to produce ``message`` (for supervised fine-tuning)."""
        calls = "\n".join(_call_text(call) for call in message.tool_calls or ())
        text = "\n".join(part for part in (message.content, calls) if isinstance(part, str) and part)
        return self._encode(text.replace(_BREAK, "\ufffd") + self._stop_text)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        rendered = self.tokenizer.apply_chat_template(
            [self._as_text(_for_template(message)) for message in messages],
            tools=[self._as_text(tool.model_dump()) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert isinstance(rendered, str)
        return rendered

    def _as_text(self, value: Any) -> Any:
        """Return a JSON value in whose strings ``_encode`` finds no control token."""
        if isinstance(value, str):
            value = value.replace(_BREAK, "\ufffd")
            return self._control.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", value)
        if isinstance(value, list | tuple):
            return [self._as_text(item) for item in value]
        if isinstance(value, dict):
            return {self._as_text(key): self._as_text(item) for key, item in value.items()}
        return value

    def _encode(self, text: str) -> list[int]:
        parts = (self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(_BREAK))
        return [token_id for part in parts for token_id in part]


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the special tokens, and of those added tokens that the chat template writes."""
    names = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if str(token).strip() and (token.special or str(token) in str(tokenizer.chat_template))
    ]
    # Longest first: one may begin with another.
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)")


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: arguments as an object, or as text if they are not JSON."""
    data = message.wire()
    for call in data.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
    return data


def _tool_call(text: str, *, call_id: str) -> ToolCall:
    try:
        call = json.loads(text)
        name, arguments = str(call["name"]), call["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: not JSON, or a number too long
        name, arguments = "", text
    return ToolCall(
        id=call_id,
        function=FunctionCall(name=_replace_surrogates(name), arguments=_replace_surrogates(arguments)),
    )


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _call_text(call: ToolCall) -> str:
    body = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"
