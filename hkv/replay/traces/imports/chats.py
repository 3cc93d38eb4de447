"""Traces with texts: ShareGPT's conversations, logs and batches of OpenAI's API, prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.replay.traces.imports.imported import (
    Fields,
    Imported,
    ImportOptions,
    Remarks,
    json_entries,
    json_lines,
    require,
    text_lines,
)
from hkv.replay.traces.imports.texts import BYTES, TEMPLATES, Message, Prompts, load_tokenizer, text_of

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
         "bing": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip
"""Roles of speakers, as ShareGPT's files name them."""

UNANSWERED = "conversations without a question that was answered, left out"
AS_BYTES = "source whose bytes stand for tokens: several times as many as a model's"


def _prompts(options: ImportOptions, format: str, remarks: Remarks) -> Prompts:
    tokenizer = require(options, "tokenizer", format, "a tokenizer.json, or bytes, each of which is a token then")
    if tokenizer == BYTES:
        remarks.note(AS_BYTES)
    return Prompts(load_tokenizer(tokenizer), TEMPLATES[options.template])


def sharegpt(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """ShareGPT's conversations: every answer is a request whose prompt is all that was said before it."""
    prompts = _prompts(options, "sharegpt", remarks)
    for entry in json_entries(path):
        said: list[Message] = []
        answered = 0
        for index, turn in enumerate(_list(entry, "conversations")):
            role = ROLES.get(str(turn.get("from", turn.get("role")))) if isinstance(turn, dict) else None
            text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
            if role is None or not isinstance(text, str):
                raise entry.error(f"conversations[{index}]", turn, f"from, one of {', '.join(ROLES)}, and value")
            if role == "assistant" and said:
                session = str(entry.values.get("id", entry.line))
                yield prompts.request(entry, said, text, None, session=f"{entry.line} {session}")
                answered += 1
            said.append(Message(role, text))
        if not answered:
            remarks.note(UNANSWERED)


def openai_log(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
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


def openai_batch(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """A file of OpenAI's batch API; its answers, where they are known, come from the batch's output file."""
    prompts = _prompts(options, "openai-batch", remarks)
    answers = {}
    for line in json_lines(options.answers) if options.answers else ():
        response = line.values.get("response")
        answers[line.values.get("custom_id")] = response.get("body") if isinstance(response, dict) else None
    for line in json_lines(path):
        asked = line.values.get("body")
        yield _request(prompts, options, line, asked, answers.get(line.values.get("custom_id")), None)


def prompt_lines(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Lines with a `prompt`, and perhaps `output_tokens`: what `vllm bench serve` reads as a custom dataset."""
    prompts = _prompts(options, "prompts", remarks)
    for line in json_lines(path):
        text = line.values.get("prompt")
        if not isinstance(text, str):
            raise line.error("prompt", text, "a text")
        output = line.integer("output_tokens") if "output_tokens" in line.values else options.output_tokens
        arrival = line.number("timestamp") * 1000 if "timestamp" in line.values else None
        yield prompts.request(line, [Message("user", text)], None, output, timestamp=arrival)


def plain_text(path: str, options: ImportOptions, remarks: Remarks) -> Iterator[Imported]:
    """Plain text: every line that is not empty is a prompt."""
    prompts = _prompts(options, "text", remarks)
    for number, text in text_lines(path):
        line = Fields(path, number, {})
        yield prompts.request(line, [Message("user", text)], None, options.output_tokens)


def _request(
    prompts: Prompts, options: ImportOptions, line: Fields, asked: Any, answered: Any, arrival: float | None
) -> Imported:
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
