"""The conversation of lookup.py as a program that speaks to an OpenAI endpoint.

    bash examples/agents/run.sh lookup reward.tasks.lookup.environment=lookup_client:lookup

The loop knows nothing of this project but an address and a key.
"""

from lookup import find
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from verification.environments import EpisodeInput, Outcome, Policy

# The package imports much of itself at first use: once here, not in each conversation.
AsyncOpenAI(base_url="http://127.0.0.1", api_key="none").chat.completions  # noqa: B018


async def lookup(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Reward 1 for the value of the key; one call of the tool is allowed."""
    async with AsyncOpenAI(base_url=policy.url, api_key=policy.key) as client:
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": message["content"]} for message in prompt.messages
        ]

        async def say() -> str:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=3
            )
            content = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})
            return content

        said = await say()
        has_called = said.startswith("=")
        if has_called:
            messages.append({"role": "user", "content": find(prompt.entry, said[1:])})
            said = await say()
    how = "wrong_answer" if has_called else "no_call"
    is_right = said == prompt.answer
    return Outcome(float(is_right), "correct" if is_right else how)
