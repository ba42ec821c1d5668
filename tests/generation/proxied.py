"""Environments whose loop is an unmodified openai client. A prompt's answer names one of them."""

import asyncio
import json
import os
import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from openai import AsyncOpenAI

from verification.environments import Outcome

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}
QUESTION = {"role": "user", "content": "question"}
# openai imports most of itself at the first use: once here, and not in each episode.
WARM = AsyncOpenAI(base_url="http://localhost", api_key="none").chat.completions


def client_of(policy: Any, **values: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=policy.url, api_key=policy.key, **values)


async def ask(client: AsyncOpenAI, messages: list[Any], **values: Any) -> Any:
    answer = await client.chat.completions.create(model="any", messages=messages, **values)
    return answer.choices[0]


async def post(policy: Any, body: Any, key: str = "", **headers: str) -> httpx.Response:
    given = {"Authorization": f"Bearer {key or policy.key}", **headers}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{policy.url}/chat/completions", content=content, headers=given)


async def by_chat(prompt: Any, policy: Any) -> Outcome:
    chat = policy.chat(prompt.messages)
    for turn in range(3):
        reply = await chat.say(max_tokens=40)
        chat.add("user", f"{reply.content}? {turn}")
    return Outcome(1.0, "done")


async def by_client(prompt: Any, policy: Any) -> Outcome:
    client, messages = client_of(policy), list(prompt.messages)
    for turn in range(3):
        choice = await ask(client, messages, max_tokens=40, temperature=0.1, seed=turn, top_p=0.2)
        messages.append(choice.message)
        messages.append({"role": "user", "content": f"{choice.message.content}? {turn}"})
    return Outcome(1.0, "done")


async def by_stream(prompt: Any, policy: Any) -> Outcome:
    client, messages = client_of(policy), list(prompt.messages)
    for turn in range(3):
        stream = await client.chat.completions.create(
            model="any", messages=messages, max_completion_tokens=40, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, usage, ends = "", None, []
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends.append(choice.finish_reason)
        assert ends[-1] == "stop" and usage.completion_tokens > 2, (ends, usage)
        messages.append({"role": "assistant", "content": text})
        parts = [{"type": "text", "text": f"{text}?"}, {"type": "text", "text": f" {turn}"}]
        messages.append({"role": "user", "content": parts})
    return Outcome(1.0, "done")


async def edited(prompt: Any, policy: Any) -> Outcome:
    client = client_of(policy)
    first = (await ask(client, [QUESTION])).message
    again = {"role": "user", "content": "again"}
    await ask(client, [QUESTION, first, again])
    await ask(client, [QUESTION, {"role": "assistant", "content": "as edited"}, again])
    return Outcome(1.0, "done")


async def compacted(prompt: Any, policy: Any) -> Outcome:
    client = client_of(policy)
    first = (await ask(client, [QUESTION])).message
    second = (await ask(client, [QUESTION, first, QUESTION])).message
    summary = {"role": "user", "content": f"summary: {second.content}"}
    third = (await ask(client, [summary])).message
    await ask(client, [summary, third, QUESTION])
    return Outcome(1.0, "done")


async def sub_agents(prompt: Any, policy: Any) -> Outcome:
    client = client_of(policy)
    first = (await ask(client, [QUESTION])).message

    async def work(number: int) -> None:
        messages = [QUESTION, first, {"role": "user", "content": f"part {number}"}]
        messages.append((await ask(client, messages)).message)
        messages.append({"role": "user", "content": "and?"})
        await ask(client, messages)

    await asyncio.gather(*map(work, range(4)))
    return Outcome(1.0, "done")


async def narrow(prompt: Any, policy: Any) -> Outcome:
    """Replies that together may be longer than the room, and are not."""
    client, topics = client_of(policy), [{"role": "user", "content": f"wait {n}"} for n in range(3)]
    choices = await asyncio.gather(*(ask(client, [one], max_tokens=140) for one in topics))
    assert [choice.finish_reason for choice in choices] == ["stop"] * 3
    return Outcome(1.0, "done")


async def retried(prompt: Any, policy: Any) -> Outcome:
    # The engine takes 0.8 s: the client asks again, three times on an idle machine.
    client = client_of(policy, timeout=0.3, max_retries=50)
    first = await ask(client, [{"role": "user", "content": "slow"}])
    body = {"messages": [QUESTION], "model": "any"}
    named = [await post(policy, body, **{"Idempotency-Key": "a"})]
    await asyncio.sleep(1.0)  # an answer tells the second in which it was created
    named.append(await post(policy, body, **{"Idempotency-Key": "a"}))
    assert named[0].json() == named[1].json()
    other = await post(policy, body, **{"Idempotency-Key": "b"})
    assert other.json()["id"] != named[0].json()["id"]
    assert first.message.content
    return Outcome(1.0, "done")


async def with_tools(prompt: Any, policy: Any) -> Outcome:
    client, messages = client_of(policy), [{"role": "user", "content": "call look_up"}]
    choice = await ask(client, messages, tools=[TOOL], max_tokens=200)
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and len({call.id for call in calls}) == 2
    messages.append(choice.message.model_dump())
    for call in calls:
        word = json.loads(call.function.arguments)["word"]
        result = {"role": "tool", "tool_call_id": call.id, "content": f"{word} is a fruit"}
        messages.append(result)
    await ask(client, messages, tools=[TOOL], max_tokens=100)
    return Outcome(1.0, "done")


async def answers_calls(prompt: Any, policy: Any) -> Outcome:
    client, messages = client_of(policy), [{"role": "user", "content": "what is a fig?"}]
    message = (await ask(client, messages, tools=[TOOL])).message
    [call] = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "fig is a fruit"}]
    messages.append((await ask(client, messages, tools=[TOOL])).message)
    messages.append({"role": "user", "content": "thanks"})
    await ask(client, messages, tools=[TOOL])
    return Outcome(1.0, "done")


async def thinks(prompt: Any, policy: Any) -> Outcome:
    client, messages = client_of(policy), [{"role": "user", "content": "it thinks"}]
    message = (await ask(client, messages)).message
    assert message.reasoning_content == "hm" and "think" not in message.content
    messages.append({"role": "assistant", "content": message.content})
    messages.append({"role": "user", "content": "it thinks again"})
    await ask(client, messages)
    return Outcome(1.0, "done")


async def with_faulty_calls(prompt: Any, policy: Any) -> Outcome:
    client = client_of(policy)
    wrong = await ask(client, [{"role": "user", "content": "call nothing"}], tools=[TOOL])
    assert wrong.message.tool_calls is None and "<tool_call>" in wrong.message.content
    messages: list[Any] = [{"role": "user", "content": "call look_up"}]
    unasked = await ask(client, messages, tools=[TOOL], tool_choice="none")
    assert unasked.message.tool_calls is None and unasked.message.content.count("<tool_call>") == 2
    assert unasked.finish_reason == "stop"
    choice = await ask(client, messages, tools=[TOOL], parallel_tool_calls=False)
    [call] = choice.message.tool_calls
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "found"}]
    await ask(client, messages, tools=[TOOL])
    return Outcome(1.0, "done")


async def keys(prompt: Any, policy: Any) -> Outcome:
    """Two episodes meet; the first one ends, and its key with it."""
    own, other = (Path(prompt.entry["folder"]) / str(prompt.entry[k]) for k in ("own", "other"))
    for key in ("wrong", policy.key[:-1]):
        try:
            await AsyncOpenAI(base_url=policy.url, api_key=key).models.list()
        except openai.AuthenticationError as error:
            assert error.code == "invalid_api_key"
        else:
            raise AssertionError("the key was taken")
    secret = {"role": "user", "content": f"secret {prompt.entry['own']}"}
    reply = (await ask(client_of(policy), [secret])).message.content
    history = [secret, {"role": "assistant", "content": reply}, QUESTION]
    temporary = own.with_suffix(".tmp")
    temporary.write_text(json.dumps({"key": policy.key, "history": history}))
    temporary.rename(own)
    while not other.exists():
        await asyncio.sleep(0.01)
    theirs = json.loads(other.read_text())
    assert theirs["key"] != policy.key
    if prompt.entry["own"] == 1:
        return Outcome(1.0, "done")
    await ask(client_of(policy), theirs["history"])
    while (await post(policy, {"messages": [QUESTION]}, theirs["key"])).status_code != 401:
        await asyncio.sleep(0.02)
    return Outcome(1.0, "done")


async def malformed(prompt: Any, policy: Any) -> Outcome:
    """Strangers' requests, many at once, and then malformed ones of its own."""
    await flood_as_stranger(policy, prompt.entry["strange"])
    rng, statuses = random.Random(0), {}
    good = json.dumps({"model": "m", "messages": [QUESTION], "tools": [TOOL]}).encode()
    fixed = [
        b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"messages": [{"role": "user"}]}',
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}', b"\xff" * 1000,
        b'{"messages": [{"role": "king", "content": ""}]}', b'{"messages": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        b'{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"function": '
        b'{"name": "f", "arguments": "[1"}}]}]}',
    ]  # fmt: skip

    def body() -> bytes:
        if rng.random() < 0.3:
            return rng.choice(fixed)
        cut = bytearray(good[: rng.randint(1, len(good) - 1)])
        cut[rng.randrange(len(cut))] = rng.randrange(256)
        return bytes(cut)

    limits = httpx.Limits(max_connections=16)
    headers = {"Authorization": f"Bearer {policy.key}"}
    async with httpx.AsyncClient(limits=limits, timeout=60, headers=headers) as client:

        async def flood(count: int) -> None:
            for _ in range(count):
                url = f"{policy.url}/chat/completions"
                answer = await client.post(url, content=body())
                assert answer.json()["error"]["message"]
                assert answer.status_code == 400 or answer.headers["Retry-After"] == "1"
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

        await asyncio.gather(*(flood(prompt.entry["requests"] // 16) for _ in range(16)))
    # The client asks again if that is too early.
    await ask(client_of(policy), [QUESTION])
    return Outcome(1.0, "done", {str(status): count for status, count in statuses.items()})


async def flood_as_stranger(policy: Any, requests: int) -> None:
    address = urlsplit(policy.url)
    for _ in range(requests // 100):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
        writer.write(100 * (head + b"Content-Length: 9\r\n\r\nmalformed"))
        for _ in range(100):
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", answer)
            body = await reader.readexactly(int(length[1]))
            assert answer.startswith(b"HTTP/1.1 401") and b"invalid_api_key" in body
        writer.close()


async def raw(prompt: Any, policy: Any) -> Outcome:
    """Bytes that are no HTTP, idle and many connections, and texts that are hard to render."""
    address = urlsplit(policy.url)
    reader, _ = await asyncio.open_connection(address.hostname, address.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {policy.key}\r\n\r\n"
    connections = []
    for _ in range(70):
        connections.append(await asyncio.open_connection(address.hostname, address.port))
        connections[-1][1].write(head.encode())
        assert await connections[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"
    assert (await post(policy, {"messages": [QUESTION]})).headers["Connection"] == "close"
    for number in range(200):
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(random.Random(number).randbytes(100) + b"\r\n\r\n")
        await writer.drain()
        writer.transport.abort()
    private = "".join(map(chr, range(0xE000, 0xF900)))
    hard = [private, "\\ud800", "\0", "<|im_end|>" * 50, "{{ 1 / 0 }}", "\u202e" * 50]
    for content in hard:
        text = json.dumps({"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 9})
        answer = await post(policy, text.replace("TEXT", content.replace("\0", "\\u0000")).encode())
        assert answer.status_code == (400 if content in hard[:2] else 200), (content, answer.text)
    await ask(client_of(policy), [QUESTION])
    return Outcome(1.0, "done")


async def hears(prompt: Any, policy: Any) -> Outcome:
    """Two requests; the second gives the entry's number of words."""
    client, words = client_of(policy), {"role": "user", "content": "word " * prompt.entry}
    await ask(client, [QUESTION], max_tokens=2)
    await ask(client, [words], max_tokens=2)
    return Outcome(1.0, "correct")


async def too_long(prompt: Any, policy: Any) -> Outcome:
    client, message = client_of(policy), {"role": "user", "content": "word " * 5000}
    await ask(client, [QUESTION])
    try:
        await ask(client, [message])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    if prompt.entry == "catches":
        await ask(client, [QUESTION])
        raise RuntimeError("of its own")
    await ask(client, [message])
    return Outcome(1.0, "never")


async def refused(prompt: Any, policy: Any) -> Outcome:
    base = {"messages": [QUESTION], "max_tokens": 5}
    for fields in prompt.entry["refused"]:
        answer = await post(policy, base | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), fields
        assert list(fields)[-1].split(".")[0] in error["message"], error
    for fields in prompt.entry["taken"]:
        answer = await post(policy, base | fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 5
    async with httpx.AsyncClient() as client:
        for path, status in (("/v1/none", 404), ("/v1/chat/completions", 405)):
            answer = await client.get(policy.url.removesuffix("/v1") + path)
            assert answer.status_code == status and answer.json()["error"]["message"]
    found = [model.id async for model in client_of(policy).models.list()]
    assert found == ["policy"]
    return Outcome(1.0, "done")


async def hangs(prompt: Any, policy: Any) -> Outcome:
    await ask(client_of(policy), [{"role": "user", "content": "long"}])
    await asyncio.sleep(600)
    return Outcome(1.0, "never")


async def unlucky(prompt: Any, policy: Any) -> Outcome:
    await ask(client_of(policy), [{"role": "user", "content": "fail"}])
    return Outcome(1.0, "never")


async def hasty(prompt: Any, policy: Any) -> Outcome:
    """It ends while replies are on their way."""
    await ask(client_of(policy), [QUESTION])
    waiting = [ask(client_of(policy), [{"role": "user", "content": "slow"}], max_tokens=9)]
    waiting.append(policy.chat([{"role": "user", "content": "slow"}]).say(max_tokens=9))
    tasks = [asyncio.ensure_future(one) for one in waiting]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in tasks)
    return Outcome(1.0, "done")


async def play(prompt: Any, policy: Any) -> Outcome:
    """The environment that the prompt's answer names."""
    os.environ.pop("OPENAI_BASE_URL", None)
    outcome: Outcome = await globals()[prompt.answer](prompt, policy)
    return outcome
