"""Runs mini-swe-agents in parallel; prints each one's response ids as JSON.

    python mini_agents.py SERVER_URL AGENTS FOLDER

A program of its own, because mini-swe-agent and litellm change process-wide state.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

STEPS = 6
#: The one thing that the tiny model needs and a real one does not.
BASH_BLOCK = r"```mswea_bash_command\n(sleep 0\.[1-3]|ls -la)\n```"


def work(url: str, number: int, folder: Path) -> list[str]:
    model = LitellmTextbasedModel(
        model_name="hosted_vllm/tiny",
        model_kwargs={
            "api_base": f"{url}/v1",
            "api_key": "none",
            "max_tokens": 64,
            "extra_body": {"structured_outputs": {"regex": BASH_BLOCK}},
        },
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(folder)),
        system_template="You are a helpful assistant that can use a computer. " * 6,
        instance_template="Please solve this issue: {{task}}",
        step_limit=STEPS,
        cost_limit=0.0,
    )
    agent.run(f"file {number} is missing")
    return [
        message["extra"]["response"]["id"]
        for message in agent.messages
        if message["role"] == "assistant"
    ]


def main() -> None:
    url, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    folders = [folder / f"work-{number}" for number in range(count)]
    for each in folders:
        each.mkdir()
    with ThreadPoolExecutor(count) as pool:
        jobs = pool.map(work, [url] * count, range(count), folders)
        sys.stdout.write(json.dumps(list(jobs)) + "\n")


if __name__ == "__main__":
    main()
