"""Traces with texts: conversations (ShareGPT, LMSYS, WildChat), logs and batches of OpenAI's API, prompts; tokens.

Messages become prompts by a template, and tokens by a `tokenizer.json` or byte by byte.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hkv.errors import FileError, MissingExtraError
from hkv.files import shown
from hkv.replay.traces.imported import (
    BYTES,
    TEMPLATES,
    ImportOptions,
    Remarks,
    Template,
    json_entries,
    json_lines,
    require,
    text_lines,
)
from hkv.replay.traces.reader import Fields, NewRequest, csv_formats

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
         "bing": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip
"""Roles of speakers, as ShareGPT's files name them."""

WHEN_ANSWERED = "requests that are taken to come when they were answered"
UNANSWERED = "conversations without a question that was answered, left out"
AS_BYTES = "source whose bytes stand for tokens: several times as many as a model's"


def _prompts(options: ImportOptions, format: str, remarks: Remarks) -> Prompts:
    tokenizer = require(options, "tokenizer", format, "a tokenizer.json, or bytes, each of which is a token then")
    if tokenizer == BYTES:
        remarks.note(AS_BYTES)
    return Prompts(load_tokenizer(tokenizer), TEMPLATES[options.template])


def conversations(format: str, field: str) -> Callable[[str, ImportOptions, Remarks], Iterator[NewRequest]]:
    """Reads conversations under such a field: every answer is a request whose prompt is all that was said before it.

    ShareGPT's turns have `from` and `value`, those of LMSYS-Chat-1M and WildChat `role` and `content`. A request comes
    at its answer's `timestamp`, which WildChat has.
    """

    def read(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
        prompts = _prompts(options, format, remarks)
        for entry in json_entries(path):
            said: list[Message] = []
            answered = 0
            for index, turn in enumerate(_list(entry, field)):
                role = ROLES.get(str(turn.get("from", turn.get("role")))) if isinstance(turn, dict) else None
                text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
                if role is None or not isinstance(text, str):
                    expected = f"from or role, one of {', '.join(ROLES)}, and value or content"
                    raise entry.error(f"{field}[{index}]", turn, expected)
                if role == "assistant" and said:
                    time = _time(entry, f"{field}[{index}].timestamp", turn.get("timestamp"), remarks)
                    yield prompts.request(entry, said, text, None, session=str(entry.line), timestamp=time)
                    answered += 1
                said.append(Message(role, text))
            if not answered:
                remarks.note(UNANSWERED)

    return read


def _time(entry: Fields, field: str, value: Any, remarks: Remarks) -> float | None:
    """Milliseconds of an answer's time, in ISO 8601 or in milliseconds; None where it has none."""
    if value is None:
        return None
    remarks.note(WHEN_ANSWERED)
    try:
        time = datetime.datetime.fromisoformat(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        raise entry.error(field, value, "a time such as 2023-04-09T00:02:53+00:00, or milliseconds") from None
    if not isinstance(time, datetime.datetime):
        return time
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp() * 1000


def openai_log(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Requests of OpenAI's chat API with their answers, one a line.

    The request is the line itself, or stands under `request` or `body`; the answer, a chat completion, under `response`
    or among the line's own fields; without one, a last message of the assistant is the answer. Seconds of arrival are
    `timestamp` or `created`.
    """
    prompts = _prompts(options, "openai-chat", remarks)
    for line in json_lines(path):
        asked = next((line.values[name] for name in ("request", "body") if name in line.values), line.values)
        answered = line.values.get("response", line.values if "choices" in line.values else None)
        yield _request(prompts, options, line, asked, answered, _arrival(line, answered))


def openai_batch(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """A file of OpenAI's batch API; its answers, where they are known, come from the batch's output file."""
    prompts = _prompts(options, "openai-batch", remarks)
    answers = {}
    for line in json_lines(options.answers) if options.answers else ():
        response = line.values.get("response")
        answers[line.values.get("custom_id")] = response.get("body") if isinstance(response, dict) else None
    for line in json_lines(path):
        asked = line.values.get("body")
        yield _request(prompts, options, line, asked, answers.get(line.values.get("custom_id")), None)


def prompt_lines(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Lines with a `prompt`, and perhaps `output_tokens`: what `vllm bench serve` reads as a custom dataset."""
    prompts = _prompts(options, "prompts", remarks)
    for line in json_lines(path):
        text = line.values.get("prompt")
        if not isinstance(text, str):
            raise line.error("prompt", text, "a text")
        output = line.integer("output_tokens") if "output_tokens" in line.values else options.output_tokens
        arrival = line.number("timestamp") * 1000 if "timestamp" in line.values else None
        yield prompts.request(line, [Message("user", text)], None, output, timestamp=arrival)


def plain_text(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[NewRequest]:
    """Plain text: every line that is not empty is a prompt."""
    prompts = None
    for number, text in text_lines(path):
        if prompts is None and (known := csv_formats(text)):
            expected = f"a prompt a line; of a CSV with their columns --from {' or '.join(known)}"
            raise FileError(shown(path), number, "", text[:40], expected)
        prompts, line = prompts or _prompts(options, "text", remarks), Fields(path, number, {})
        yield prompts.request(line, [Message("user", text)], None, options.output_tokens)


def _request(
    prompts: Prompts, options: ImportOptions, line: Fields, asked: Any, answered: Any, arrival: float | None
) -> NewRequest:
    if not isinstance(asked, dict):
        raise line.error("body", asked, "the body of a request")
    if isinstance(answered, dict) and isinstance(answered.get("body"), dict):
        answered = answered["body"]
    messages = _messages(line, asked)
    answer, output = _answer(line, answered)
    if answered is None and len(messages) > 1 and messages[-1].role == "assistant":
        answer = messages.pop().text
    if answer is None and output is None:
        limits = ("max_completion_tokens", "max_tokens")
        given = next((asked[name] for name in limits if type(asked.get(name)) is int), None)
        output = options.output_tokens if options.output_tokens is not None else given
    return prompts.request(line, messages, answer, output, timestamp=arrival)


def _messages(line: Fields, asked: dict[str, Any]) -> list[Message]:
    if isinstance(asked.get("prompt"), str):
        return [Message("user", asked["prompt"])]
    entries = asked.get("messages")
    if not isinstance(entries, list) or not entries:
        raise line.error("messages", entries, "a list of messages")
    said = [Message("system", msgspec.json.encode(asked["tools"]).decode())] if asked.get("tools") else []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise line.error(f"messages[{index}]", entry, "a message with its role")
        said.append(Message(entry["role"], text_of(line, f"messages[{index}]", entry)))
    return said


def _answer(line: Fields, answered: Any) -> tuple[str | None, int | None]:
    """The text of a completion, or its length where it has only that."""
    if not isinstance(answered, dict):
        return None, None
    choices = answered.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict):
            return text_of(line, "choices[0].message", message), None
        if isinstance(choices[0].get("text"), str):
            return choices[0]["text"], None
    usage = answered.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return None, count if type(count) is int and count >= 0 else None


def _arrival(line: Fields, answered: Any) -> float | None:
    for name in ("timestamp", "created"):
        if line.values.get(name) is not None:
            return line.number(name) * 1000
    created = answered.get("created") if isinstance(answered, dict) else None
    return created * 1000.0 if isinstance(created, int | float) and not isinstance(created, bool) else None


def _list(entry: Fields, name: str) -> list[Any]:
    value = entry.values.get(name)
    if not isinstance(value, list):
        raise entry.error(name, value, "a list")
    return value


# Messages as prompts: what stands around each, and the tokens of all.


@dataclasses.dataclass(frozen=True)
class Message:
    """A message: its role, and its text."""

    role: str
    text: str


class Prompts:
    """Makes requests of messages. Pieces of text become tokens one by one, so that equal messages are equal tokens
    wherever they stand: a prompt that goes on from another one begins with all of its tokens and those of its answer.
    """

    def __init__(self, tokenize: Tokenize, template: Template) -> None:
        self._tokenize, self._template = tokenize, template

    def request(
        self, entry: Fields, messages: Sequence[Message], answer: str | None, output: int | None, **rest: Any
    ) -> NewRequest:
        """The request that asks for what follows these messages."""
        pieces = [piece for message in messages for piece in self._pieces(message)]
        pieces.append(self._template.before.format(role="assistant"))
        tokens = [token for piece in pieces for token in self._tokenize(piece)]
        if not tokens:
            raise entry.error("", [message.text for message in messages], "a prompt of at least one token")
        if answer is None and output is None:
            raise entry.error("", "an answer of unknown length", "one, or its length, or --output-tokens")
        said = None if answer is None else [*self._tokenize(answer), *self._tokenize(self._template.end)]
        length = len(said) if said is not None else output or 0
        return NewRequest(
            line=entry.line,
            input_length=len(tokens),
            output_length=length,
            tokens=tokens,
            output_tokens=said,
            **{"timestamp": None, **rest},
        )

    def _pieces(self, message: Message) -> tuple[str, ...]:
        template = self._template
        return template.before.format(role=message.role), message.text, template.end, template.after


def text_of(entry: Fields, field: str, message: dict[str, Any]) -> str:
    """The text of an OpenAI message: its content, a text or parts that are texts, and its tool calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise entry.error(f"{field}.content", part, "a text, or parts that are texts")
        texts.append(text)
    if calls:
        texts.append(msgspec.json.encode(calls).decode())
    if content is None and not calls:
        raise entry.error(f"{field}.content", None, "a text, or tool_calls")
    return "".join(texts)


Tokenize = Callable[[str], Sequence[int]]


def load_tokenizer(path: str) -> Tokenize:
    """A function from a piece of text to its tokens, none added at its ends; what it was given before, it remembers."""
    if path == BYTES:
        return lambda text: text.encode()
    try:
        package: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise MissingExtraError("tokenizers", "traces", "to make tokens of texts") from None
    try:
        tokenizer = package.Tokenizer.from_file(path)
    except Exception as error:  # the package raises nothing narrower
        raise FileError(path, None, "", str(error), "a tokenizer.json") from None
    known: dict[str, list[int]] = {}

    def tokenize(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return known[text]

    return tokenize
