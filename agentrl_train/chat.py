"""Step 4 of 9: messages -> token ids, and completions -> messages, append-only.

The chat template is rendered whole once, for the opening of a session. Every turn then appends the tokens of
the completion exactly as sampled, followed by the reply: the text that the template itself writes after the
assistant message, from its stop token on. Tokens are never decoded and re-encoded. Text is decoded only to
parse tool calls (``tool_calls.py``). Only the template produces control tokens: if a message of the
environment contains the text of one, it is encoded as plain text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentrl_env.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.errors import ConfigError
from agentrl_train.tool_calls import (
    PARSERS,
    PROMPTED,
    THOUGHT,
    THOUGHT_BEGINS,
    ParsedCall,
    ParsedTurn,
    ToolParser,
    parser_for,
    parser_named,
)
from agentrl_train.tool_calls.schemas import ordered
from agentrl_train.tool_calls.turn import read_turn

_MARK = "THE-COMPLETION-ENDS-AFTER-THIS"
_BREAK = "\ufdd0"
"""Splits a control token within a message into two texts; Unicode reserves it for internal use."""
_OPEN_THOUGHT = re.compile(rf"{THOUGHT_BEGINS}\s*\Z")
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""Errors that templates raise for unsupported messages."""
_HELLO = {"role": "user", "content": "hello"}
_SAID = {"role": "assistant", "content": "hello"}
_TEXT_TURN = {"role": "assistant", "content": _MARK}
_CALL_ID = "call00000"
_DONE = Message(role="tool", content="done", tool_call_id=_CALL_ID, name="probe")
_PROBE = ToolSpec(function=FunctionSpec(name="probe", parameters={"type": "object", "properties": {}}))
_TAG_TOKENS = 32
"""This many tokens at the end of a prompt contain the start of a thought, in any tokenizer."""
_KEPT = 512
"""Cached encodings of texts and of tools: siblings share their opening, their tools and many replies."""


class _CallForm(NamedTuple):
    """The form in which a template accepts assistant messages with calls."""

    no_content: str | None
    text_arguments: bool


_CALL_FORMS = [_CallForm(no_content, text) for text in (False, True) for no_content in (None, "")]


class Reading(NamedTuple):
    """A completion as parsed."""

    message: Message
    """The message for the environment."""
    thought: str | None
    """The thought, which the environment never sees."""
    tolerant: bool
    """True if its calls were parsed although they are not in the syntax of the model's family."""


class ChatFormat:
    """Renders sessions with the chat template of one tokenizer.

    Raises:
        ConfigError: the tokenizer has no chat template, its template does not support appending turns, or a
            setting does not fit it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        tool_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        """Initialize the format.

        Args:
            tokenizer: the tokenizer, with its chat template.
            eos_token_ids: stop tokens of the model's generation configuration, in addition to the
                tokenizer's.
            stop: more stop tokens, as text.
            tool_parser: a name of ``PARSERS`` or ``PROMPTED``; None selects the parser from the template.
            template_kwargs: variables of the template, such as ``enable_thinking``.
            system_prompt: text in front of every opening, as a system message.
        """
        self.tokenizer = tokenizer
        self.name = str(tokenizer.name_or_path) or "this tokenizer"
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{self.name} has no chat template: use an instruct model, or set model.chat_template"
            )
        self._in_prompt = PROMPTED.get(tool_parser or "")
        self.chosen = tool_parser is not None
        """Whether a setting chose the syntax of calls, and not the template."""
        self._kwargs = _template_variables(tokenizer, template_kwargs or {})
        self._system_prompt = system_prompt
        self._special, self._control = _control_tokens(tokenizer)
        self._encoded = lru_cache(_KEPT)(self._encode_text)
        self._shown_tool = lru_cache(_KEPT)(lambda tool: self._as_text(_order(json.loads(tool))))
        self._form = _CALL_FORMS[0]
        self._tools_in_replies = True
        """Whether replies depend on the tools. If they do not, omitting the tools saves half of the time."""
        eos = [*eos_token_ids, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])]
        self._stops = {text: i for i in eos if (text := self.text([i]))}
        self._stops |= {text: self._id_of(text) for text in stop}
        self._instead: dict[int, int] = {}
        """End of a turn within a conversation -> the stop token that the template writes there at its end."""
        self._no_tools: list[Any] | None = None
        if not self._takes([_HELLO], tools=()):
            self._no_tools = []  # some templates iterate over the tools without checking that there are any
        roles = ("system", "developer")
        self._shown_roles = {role for role in roles if self._shows(role)}
        self._later_roles = {role for role in roles if self._shows(role, before=[_HELLO, _SAID])}
        """Roles that the template also shows within a conversation."""
        self._alternating = "system" not in self._shown_roles or not self._takes([_HELLO, _HELLO])
        """Whether messages of the user never follow one another."""
        self._find_ends()
        self._check_template()
        self.parser = self._choose_parser(tool_parser)
        self.syntax = tool_parser if tool_parser and self._in_prompt else self.parser.name
        """The syntax of calls, as a value of ``model.tool_parser``."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return tuple(dict.fromkeys(self._stops.values()))

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Render the opening messages and the tools, ending with the generation prompt."""
        return self._encode(self._render(messages, tools))

    def in_thought(self, prompt: Sequence[int]) -> bool:
        """Return True if a prompt opens a thought, so that its completion starts inside the thought.

        Templates decide this for each turn. Some open a thought only after a message of the user, and some
        close it immediately if a message requests no thought.
        """
        return bool(_OPEN_THOUGHT.search(self.text(prompt[-_TAG_TOKENS:])))

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        turn: int,
        tools: Sequence[ToolSpec] = (),
        prompt: Sequence[int] = (),
    ) -> Reading:
        """Parse a completion of a prompt.

        A call that cannot be parsed becomes a call with an empty name, which is answered with an error
        message for the model. Text in a thought is never a call, even if the thought is not closed.
        """
        stopped = len(token_ids) > 0 and token_ids[-1] in self._stops.values()
        ids = list(token_ids[:-1] if stopped else token_ids)
        return self.parse_text(self.text(ids), turn=turn, tools=tools, in_thought=self.in_thought(prompt))

    def parse_text(
        self, text: str, *, turn: int, tools: Sequence[ToolSpec] = (), in_thought: bool = False
    ) -> Reading:
        """Parse the text of a completion like ``parse``."""
        parsed, tolerant = read_turn(self.parser, text, tools, thought=THOUGHT, in_thought=in_thought)
        own_ids = {call.id for call in parsed.calls if call.id}
        calls = [
            ToolCall(
                # The result names the id that the model wrote, if it wrote one for each call.
                id=call.id
                if len(own_ids) == len(parsed.calls)
                else self.parser.call_id(turn, number, call.name),
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(parsed.calls)
        ]
        return Reading(Message.assistant(parsed.content, *calls), parsed.thought, tolerant)

    def completion(self, message: Message, *, prompt: Sequence[int] = ()) -> list[int]:
        """Return the tokens a model would sample after a prompt to produce ``message``."""
        text = self._write(message, in_thought=self.in_thought(prompt)).replace(_BREAK, "\ufffd")
        end = self._call_end if message.tool_calls else self._text_end
        return self._encode_after(prompt, text.removesuffix(end) + end)

    def reply(
        self,
        messages: Sequence[Message],
        *,
        after: Message,
        tools: Sequence[ToolSpec] = (),
        stop: int | None = None,
    ) -> list[int]:
        """Render the tokens between one completion and the next.

        Args:
            messages: the reply of the environment.
            after: the completion, as parsed.
            tools: the tools of the session.
            stop: the stop token that ended the completion, or None if it was cut off. The end of the turn is
                then added here without being sampled.

        Raises:
            Exception: the template rejects the messages, usually with one of ``REFUSALS``.
        """
        ids = self._encode(self._reply(messages, after=after, tools=tools))
        # Encode it with the preceding stop token, because some tokenizers strip blanks after a stop token.
        sampled = stop is not None and stop in (ids[0], self._instead.get(ids[0]))
        return ids[1:] if sampled else ids

    def reply_text(
        self, messages: Sequence[Message], *, after: Message, tools: Sequence[ToolSpec] = ()
    ) -> str:
        """Return the text of ``reply`` for a completion that was cut off."""
        return self._reply(messages, after=after, tools=tools).replace(_BREAK, "")

    def _reply(self, messages: Sequence[Message], *, after: Message, tools: Sequence[ToolSpec]) -> str:
        before, replies, problem = self._with_system([_HELLO], ()), self._prepare(messages), None
        for assistant in self._stand_ins(after):
            try:
                text = self._template([*before, assistant, *replies], tools if self._tools_in_replies else ())
            except REFUSALS as error:
                problem = problem or error
                continue
            _, mark, rest = text.rpartition(_MARK)
            if mark and (end := self._end.search(rest)):
                return rest[end.start() :]
        raise problem or TemplateError("it does not write the end of the assistant turn")

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation_prompt: bool = True
    ) -> str:
        """Return the text of a whole conversation, as the template writes it.

        Raises:
            Exception: the template rejects the messages, usually with one of ``REFUSALS``.
        """
        return self._render(messages, tools, generation_prompt=generation_prompt).replace(_BREAK, "")

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation_prompt: bool = True
    ) -> str:
        prepared = self._with_system(self._prepare(messages, opening=True), tools)
        return self._template(prepared, tools, generation_prompt=generation_prompt)

    def _template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[ToolSpec],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Render prepared messages; in the text, ``_BREAK`` splits what only looks like a control token."""
        shown = [self._shown_tool(tool.model_dump_json()) for tool in tools]
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=self._no_tools if self._in_prompt or not shown else shown,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **self._kwargs,
        )
        assert isinstance(text, str)
        return text

    # Messages as templates take them

    def _prepare(self, messages: Sequence[Message], *, opening: bool = False) -> list[dict[str, Any]]:
        """Return messages as the template accepts them. Unsupported roles become the next best role."""
        prepared: list[dict[str, Any]] = []
        for message in messages:
            shown = self._shown_roles if opening and not prepared else self._later_roles
            data = message.wire() | {"content": plain_text(message.content)}
            for call in data.get("tool_calls", ()):
                call["function"]["arguments"] = self._arguments(call["function"]["arguments"])
                data["content"] = data["content"] or self._form.no_content
            data = self._as_text(data)
            if data["role"] == "developer" and "developer" not in shown:
                data["role"] = "system"
            if data["role"] == "system" and "system" not in shown:
                data["role"] = "user"
            if self._in_prompt and message.role == "tool":
                data = {"role": "user", "content": self._in_prompt.result.format(data["content"] or "")}
            if self._in_prompt and message.tool_calls:
                data = {"role": "assistant", "content": self._write(message)}
            prepared.append(data)
        if self._in_prompt or self._alternating:
            return _join_user_messages(prepared)
        return prepared

    def _with_system(self, messages: list[dict[str, Any]], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """Return the opening with the texts of the settings in front."""
        texts: list[str] = [self._as_text(self._system_prompt)] if self._system_prompt else []
        if self._in_prompt and tools:
            shown = (json.dumps(_order(tool.model_dump())["function"], ensure_ascii=False) for tool in tools)
            texts.append(self._in_prompt.instructions.format(tools=self._as_text("\n".join(shown))))
        if not texts:
            return messages
        role = "system" if "system" in self._shown_roles else "user"
        if messages and messages[0]["role"] in (role, "developer"):
            role, *texts = messages[0]["role"], *texts, messages[0]["content"] or ""
            messages = messages[1:]
        return [{"role": role, "content": "\n\n".join(texts)}, *messages]

    def _arguments(self, text: str) -> Any:
        """Return arguments as the template accepts them: an object, or text if they are not JSON."""
        try:
            return text if self._form.text_arguments else json.loads(text)
        except (ValueError, RecursionError):
            return text

    def _stand_ins(self, after: Message) -> Iterator[dict[str, Any]]:
        """Yield replacements of ``after`` with a mark at the end of the sampled part, the best first.

        Names and ids of the calls are real, because templates show them with the results.
        """
        calls = (
            [] if self._in_prompt else [self._as_text(call.model_dump()) for call in after.tool_calls or ()]
        )
        # A template that accepts only one call in a turn still shows all results.
        for some in dict.fromkeys((len(calls), min(1, len(calls)))):
            if some:
                yield _message_with_calls(calls[-some:], self._form)
        # If a template writes no calls, turns with calls end in the same way as text.
        yield _TEXT_TURN

    def _write(self, message: Message, *, in_thought: bool = False) -> str:
        """Return the text of an assistant message in the model's own syntax."""
        calls = tuple(ParsedCall(c.function.name, c.function.arguments) for c in message.tool_calls or ())
        return self.parser.render(ParsedTurn(plain_text(message.content), None, calls), in_thought=in_thought)

    def _as_text(self, value: Any) -> Any:
        """Return a JSON value whose strings contain no control token and no mark of ``reply``."""
        if isinstance(value, str):
            value = value.replace(_BREAK, "\ufffd")
            return self._control.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", value)
        if isinstance(value, list | tuple):
            return [self._as_text(item) for item in value]
        if isinstance(value, dict):
            return {self._as_text(key): self._as_text(item) for key, item in value.items()}
        return value

    # Tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def _encode_after(self, prompt: Sequence[int], text: str) -> list[int]:
        """Return the tokens of a text that continues a prompt.

        Some tokenizers put a blank in front of a text that does not follow another one (SentencePiece).
        """
        if text[:1].isspace():  # a control token with rstrip would take it away
            return self._encode(text)
        shown = self.text(prompt)
        begin, end = max((match.span() for match in self._control.finditer(shown)), default=(0, 0))
        control, rest = shown[begin:end], shown[end:]
        for before in (control + rest, control + rest.removeprefix(" ")):  # decoding shows that blank
            known, ids = self._encode_text(before), self._encode_text(before + text)
            if tuple(prompt[len(prompt) - len(known) :]) == known == ids[: len(known)]:
                return list(ids[len(known) :])
        return self._encode(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        parts = (self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(_BREAK))
        return tuple(token_id for part in parts for token_id in part)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with control tokens."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **options))

    def _id_of(self, text: str) -> int:
        ids = self._encode_text(text)
        if len(ids) != 1:
            raise ConfigError(f"model.stop: {text!r} is not one token of {self.name}, but {len(ids)}")
        return ids[0]

    # What the template can do

    def _takes(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[ToolSpec] = (_PROBE,)) -> bool:
        """Return True if the template writes these messages without an error."""
        try:
            self._template(messages, tools)
        except REFUSALS:
            return False
        return True

    def _shows(self, role: str, *, before: Sequence[dict[str, Any]] = ()) -> bool:
        """Return True if the template writes a message of this role there, and keeps it in later turns."""
        opening = [*before, {"role": role, "content": _MARK}, _HELLO]
        try:
            text = self._template(opening, (_PROBE,))
            later = self._template([*opening, _SAID, _HELLO], (_PROBE,))
        except REFUSALS:
            return False
        start, mark, _ = text.partition(_MARK)
        return bool(mark) and later.startswith(start + mark)

    def _find_ends(self) -> None:
        """Find the stop tokens that end turns, with and without calls, and those that the template writes."""
        last, middle = (self._after_mark(_TEXT_TURN, *more) or "" for more in ((), (_HELLO,)))
        if (end := self._stop_in(last)) is not None:
            other = self._control.match(middle, end.start())
            if other and last[: end.start()] == middle[: end.start()] and other[0] not in self._stops:
                if first := self._control.search(last[: end.start()]):  # eos ends the document (Phi-3.5)
                    self._stops[first[0]] = self._id_of(first[0])
                else:
                    self._instead[self._id_of(other[0])] = self._stops[end[0]]
        elif self._stop_in(middle) is None and (token := self._control.search(last)):
            self._stops[token[0]] = self._id_of(token[0])  # a base model's eos token ends documents
        call_end = "" if self._in_prompt else self._end_of_calls()
        end = self._stop_in(last) or self._stop_in(middle)
        if end is None:
            token = self._control.search(middle)
            self._refuse_errors([_HELLO, _TEXT_TURN, _HELLO])
            raise ConfigError(
                f"the chat template of {self.name} does not end an assistant turn with a stop token, so "
                f"turns cannot be appended: set model.stop to what it writes there"
                f"{f' ({token[0]!r})' if token else ''}, or model.chat_template to another template"
            )
        self._text_end, self._call_end = end[0], call_end or end[0]
        self._end = _any_of([*self._stops, *(self.text([i]) for i in self._instead)])

    def _refuse_errors(self, messages: Sequence[dict[str, Any]]) -> None:
        try:
            self._template(messages, (_PROBE,))
        except REFUSALS as error:
            raise ConfigError(
                f"the chat template of {self.name} cannot write a conversation ({error}): set "
                "model.chat_template to another template"
            ) from error

    def _end_of_calls(self) -> str:
        """Return the stop token after calls, "" if the template writes none; find the form of calls."""
        call = ToolCall.of("probe", call_id=_CALL_ID).model_dump()
        taken = []
        for self._form in _CALL_FORMS:
            turn = _message_with_calls([call], self._form)
            last, middle = (self._after_mark(turn, *more) for more in ((), (_DONE.wire(),)))
            if last is None or middle is None:
                continue
            taken.append(self._form)
            if end := self._stop_in(last) or self._stop_in(middle):
                return end[0]
            # An added token that is not special can close the call itself.
            if special := self._special.findall(last)[-1:] or self._special.findall(middle)[:1]:
                self._stops[special[0]] = self._id_of(special[0])
                return str(special[0])
        self._form = taken[0] if taken else _CALL_FORMS[0]
        return ""

    def _after_mark(self, *messages: dict[str, Any]) -> str | None:
        """Return the text after the mark: "" if the template drops the mark, None if it raises an error."""
        try:
            text = self._template([_HELLO, *messages], (_PROBE,), generation_prompt=len(messages) > 1)
        except REFUSALS:
            return None
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    def _stop_in(self, text: str) -> re.Match[str] | None:
        return _any_of(self._stops).search(text)

    def _check_template(self) -> None:
        """Check that both kinds of reply can be rendered."""
        call = ToolCall.of("probe", call_id=_CALL_ID)
        user = Message(role="user", content="hello")
        turns = (Message.assistant("hello"), user), (Message.assistant(None, call), _DONE)
        texts = []
        for after, answer in turns:
            try:
                texts.append(self.reply_text([answer], after=after, tools=(_PROBE,)))
            except REFUSALS as error:
                raise ConfigError(
                    f"the chat template of {self.name} rejects a {answer.role} message: {error}; set "
                    "model.tool_parser = 'prompt' to write tools and results as text, or model.chat_template "
                    "to another template"
                ) from error
        try:
            without = [self.reply_text([answer], after=after) for after, answer in turns]
        except REFUSALS:
            without = []
        self._tools_in_replies = texts != without

    def _choose_parser(self, name: str | None) -> ToolParser:
        choices = ", ".join([*PARSERS, *PROMPTED])
        if name is not None and name not in {*PARSERS, *PROMPTED}:
            raise ConfigError(f"model.tool_parser: there is no {name!r}; choose one of {choices}")
        template = str(self.tokenizer.get_chat_template(tools=[_PROBE.model_dump()]))
        if name is None and (written := parser_for(template)):
            name = written.name
        if name is None:
            raise ConfigError(
                f"the chat template of {self.name} writes tool calls in no known syntax: set "
                "model.tool_parser to that of the model, or to 'prompt' to describe tools and calls in the "
                f"system prompt; choose one of {choices}"
            )
        return parser_named(name, template)


def _order(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the keywords of its schema in the usual order."""
    function = tool["function"]
    return tool | {"function": function | {"parameters": ordered(function["parameters"])}}


def _template_variables(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as variables of the template.

    Raises:
        ConfigError: one of them is an argument of the rendering instead.
    """
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
    if wrong := sorted(taken.intersection(settings)):
        raise ConfigError(
            f"model.template_kwargs: {wrong[0]!r} is set by the trainer and is no variable of a template; "
            "leave it out"
        )
    return dict(settings)


def _message_with_calls(calls: Sequence[dict[str, Any]], form: _CallForm) -> dict[str, Any]:
    """Return an assistant message with these calls, and the mark in the arguments of the last."""
    marked: list[dict[str, str]] = [{} for _ in calls]
    marked[-1]["mark"] = _MARK
    functions = [
        {"name": call["function"]["name"], "arguments": json.dumps(values) if form.text_arguments else values}
        for call, values in zip(calls, marked, strict=True)
    ]
    return {
        "role": "assistant",
        "content": form.no_content,
        "tool_calls": [call | {"function": f} for call, f in zip(calls, functions, strict=True)],
    }


def _join_user_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of the user, because some templates require alternating roles."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            message = {"role": "user", "content": f"{joined.pop()['content']}\n\n{message['content']}"}
        joined.append(message)
    return joined


def plain_text(content: str | list[dict[str, Any]] | None) -> str | None:
    """Return content as text: the texts of its parts, and the types of parts that are not text."""
    if not isinstance(content, list):
        return content
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)


def hidden_parts(messages: Iterable[Message]) -> list[str]:
    """Return the types of message parts for which a policy sees only the type, such as images."""
    parts = (part for one in messages if isinstance(one.content, list) for part in one.content)
    return sorted({str(part.get("type")) for part in parts if "text" not in part})


def hidden_parts_warning(task: str, types: Sequence[str]) -> str:
    """Return a warning about parts of messages that a policy does not see."""
    return (
        f"task {task} sends {' and '.join(types)} in messages, which the policy reads as "
        f"{', '.join(f'[{one}]' for one in types)}: only text is trained on, so let the task describe them"
    )


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the special tokens, and of these, the added ones of the template, and the mark."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if str(token).strip()]
    special = [str(token) for token in added if token.special]
    written = [str(token) for token in added if str(token) in str(tokenizer.chat_template)]
    return _any_of(special), _any_of([*special, *written, _MARK])


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    # Longest first, because one pattern can start with another.
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")
