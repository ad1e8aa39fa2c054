"""Load generators that others wrote, and the demo's agents in their formats.

Each is installed as it is published; a metric is a path into the file that it writes.
To add one: an entry of `HARNESSES`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from bench.serve.server import ServerOptions
from ttlcache_sim.load.programs import Program, Turn

#: Tokens that a hash of a trace stands for.
_BLOCK = ServerOptions(num_blocks=1).block_size
#: Seconds that a turn is given where a trace says when the next one starts.
_TURN_S = 3.0
#: Tokens a second at which agentic-bench thinks that an unknown model was recorded.
_RECORDED_TOKENS_PER_S = 140.0
#: `vllm bench serve`; the CPU build's `vllm` asks for a package that has another name.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator is pointed at."""

    base_url: str
    model: Path
    folder: Path
    """For its data and its results."""
    programs: Sequence[Program]
    at_once: int
    seed: int


@dataclass(frozen=True, slots=True)
class Harness:
    """One load generator.

    arguments: writes its data, returns what follows the program's name.
    program: beside the interpreter of its environment.
    package: what pip installs into an environment of its own; "": it is in ours.
    """

    arguments: Callable[[Load], Sequence[str]]
    program: str
    result: str
    """The file with its results, below the folder of the load."""
    metrics: Sequence[str]
    """Paths into it; `*` is the mean over all entries."""
    package: str = ""
    python: tuple[int, int] = (3, 11)
    good_statuses: tuple[int, ...] = (0,)
    """Exit statuses of a run whose numbers count."""
    env: Mapping[str, str] = field(default_factory=dict)


def _agentic_bench(load: Load) -> Sequence[str]:
    text = _words(load)
    with (load.folder / "data.jsonl").open("w") as file:
        for program in load.programs:
            context_tokens, gap_s, turns = 0, 0.0, []
            for index, turn in enumerate(program.turns):
                context_tokens += turn.new_prompt_tokens
                generated_s = turn.output_tokens / _RECORDED_TOKENS_PER_S
                new = {"role": "user", "content": text(turn.new_prompt_tokens)}
                turns.append(
                    {
                        "index": index,
                        "input_delta": [new],
                        "assistant_text": text(turn.output_tokens),
                        "input_tokens": context_tokens,
                        "output_tokens": turn.output_tokens,
                        "pre_gap_ms": 1000.0 * (gap_s + generated_s),
                    }
                )
                context_tokens, gap_s = context_tokens + turn.output_tokens, turn.gap_s
            session = {"session_id": program.program_id, "turns": turns, "source": {}}
            file.write(json.dumps({**session, "system_prompt": ""}) + "\n")
    return (
        *("run", "--backend", "vllm", "--base-url", load.base_url),
        *("--model", "tiny", "--tokenizer", str(load.model)),
        *("--dataset-path", str(load.folder / "data.jsonl"), "--disable-tqdm"),
        *("--num-sessions", str(len(load.programs)), "--seed", str(load.seed)),
        *("--max-concurrency", str(load.at_once)),
        *("--output-file", str(load.folder / "result.jsonl"), "--no-output-details"),
    )


def _vllm_bench(load: Load) -> Sequence[str]:
    requests = [
        {
            "timestamp": program.arrival_s + start_s,
            "input_length": tokens,
            "output_length": turn.output_tokens,
            "hash_ids": [number * 1_000_000 + n for n in range(tokens // _BLOCK)],
        }
        for number, program in enumerate(load.programs)
        for start_s, tokens, turn in _requests(program)
    ]
    requests.sort(key=itemgetter("timestamp"))
    trace = load.folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return (
        *("-c", _VLLM_BENCH, "--backend", "vllm", "--base-url", load.base_url),
        *("--model", "tiny", "--tokenizer", str(load.model), "--disable-tqdm"),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
        *("--timed-trace-chunk-hash-size", str(_BLOCK), "--disable-shuffle"),
        *("--num-prompts", str(len(requests)), "--seed", str(load.seed)),
        *("--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,95,99", "--save-result"),
        *("--result-dir", str(load.folder), "--result-filename", "result.json"),
    )


def _agentx(load: Load) -> Sequence[str]:
    traces = load.folder / "traces"
    traces.mkdir()
    for program in load.programs:
        requests = [
            {
                "t": start_s,
                "type": "s",
                "model": "tiny",
                "in": tokens,
                "out": turn.output_tokens,
                "hash_ids": list(range(tokens // _BLOCK)),
                "api_time": _TURN_S,
                "stop": "tool_use" if turn.tool else "end_turn",
            }
            for start_s, tokens, turn in _requests(program)
        ]
        head = {"id": program.program_id, "models": ["tiny"], "hash_id_scope": "local"}
        trace = {**head, "block_size": _BLOCK, "requests": requests}
        (traces / f"{program.program_id}.json").write_text(json.dumps(trace))
    return (
        *("profile", "--url", load.base_url, "--endpoint", "/v1/chat/completions"),
        *("--model", "tiny", "--tokenizer", str(load.model)),
        *("--input-file", str(traces), "--custom-dataset-type", "weka_trace"),
        *("--concurrency", str(load.at_once), "--random-seed", str(load.seed)),
        # A submission runs for an hour; a shorter run must say that it is none.
        *("--benchmark-duration", "120", "--unsafe-override"),
        *("--warmup-requests-per-lane", "2", "--ui", "none"),
        *("--output-artifact-dir", str(load.folder)),
    )


def _requests(program: Program) -> Iterator[tuple[float, int, Turn]]:
    """Of each turn the second at which a trace says it starts, and its prompt tokens.

    A prompt is whole blocks, for a trace cannot say how one ends within a block.
    """
    start_s, context_tokens = 0.0, 0
    for turn in program.turns:
        blocks = -(-(context_tokens + turn.new_prompt_tokens) // _BLOCK)
        yield start_s, blocks * _BLOCK, turn
        context_tokens = blocks * _BLOCK + turn.output_tokens
        start_s += _TURN_S + turn.gap_s


def _agent_sim(load: Load) -> Sequence[str]:
    longest = max(program.context_tokens for program in load.programs)
    return (
        *("--base-url", f"{load.base_url}/v1", "--model", "tiny", "--no-viz"),
        *("--sessions", str(load.at_once), "--salt", str(load.seed)),
        *("--main-tokens", str(longest // 2), "--step-tokens", str(longest // 20)),
        *("--sub-tokens", str(longest // 4), "--finalize-tokens", str(longest // 20)),
        # Its default ends the run at the first miss.
        *("--miss-threshold", "0", "--output", str(load.folder / "result.json")),
    )


def _words(load: Load) -> Callable[[int], str]:
    """Text of about so many tokens, never the same again."""
    from transformers import AutoTokenizer  # as slow to import as a server to start

    rng = random.Random(f"{load.seed}/words")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(3000)]
    tokenizer = AutoTokenizer.from_pretrained(load.model)
    tokens_per_word = len(tokenizer(" ".join(words))["input_ids"]) / len(words)
    return lambda tokens: " ".join(
        rng.choices(words, k=max(1, round(tokens / tokens_per_word)))
    )


def _each(name: str, *statistics: str) -> tuple[str, ...]:
    return tuple(f"{name}.{statistic}" for statistic in statistics)


HARNESSES = {
    "agentic-bench": Harness(
        _agentic_bench,
        "abench",
        "result.jsonl",
        (
            *_each("metrics", "successful_turns", "wall_duration_s"),
            *_each("metrics", "mean_trajectory_time_s", "tpot_ms", "itl_p99_ms"),
            *_each("metrics.t1_ttft", "p99_ms"),
            *_each("metrics.t2plus_ttft", "mean_ms", "p99_ms"),
            *_each("metrics.e2e_overall", "mean_ms", "p99_ms"),
            "metrics.prefix_cache_ratio",
        ),
        package="agentic-bench[tokenizer]==0.2.0",
    ),
    "vllm-bench": Harness(
        _vllm_bench,
        "python",
        "result.json",
        (
            *("completed", "failed", "duration", "mean_ttft_ms", "p99_ttft_ms"),
            *("mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms"),
        ),
        # It draws a prompt's tokens from the hash of a text.
        env={"PYTHONHASHSEED": "0"},
    ),
    "agentx": Harness(
        _agentx,
        "agentx",
        "profile_export_aiperf.json",
        (
            *_each("request_throughput", "avg"),
            *_each("time_to_first_token", "avg", "p50", "p99"),
            *_each("request_latency", "avg", "p50", "p99"),
            *_each("inter_token_latency", "avg", "p99"),
        ),
        package="agentx-harness==1.0.12",
        # Told to be offline it takes a folder for a repository's name.
        env={"HF_HUB_OFFLINE": ""},
    ),
    "agent-sim": Harness(
        _agent_sim,
        "agent-sim",
        "result.json",
        (
            *_each("summary", "elapsed", "finalize_ttft_pct"),
            *_each("summary.finalize_ttft.*", "finalize_ttft", "ttft_ratio", "reuse"),
            *_each("records.*", "reuse", "ttft", "wall"),
        ),
        package="cache-pressure==0.6.3",
        good_statuses=(0, 1),  # 1: a session lost its cache
        python=(3, 12),
    ),
}
