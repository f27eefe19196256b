"""An agent program for a tiny policy. The reward is the share of even bytes in its answer."""

import httpx

from agentrl_env import TaskSample


async def play(base_url: str, sample: TaskSample) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": sample.data["question"]}]}
        answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
    said = (answer["choices"][0]["message"]["content"] or "").encode()
    return {
        "reward": sum(byte % 2 == 0 for byte in said) / max(1, len(said)),
        "metrics": {"length": len(said)},
    }
