"""Stage `steps`: seconds of vLLM's steps, beside what the simulator takes for them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from bench.gpu.stage import Json, Stage, Verdict
from bench.serve import tiny_model
from bench.serve.replay import FIRST_TOKEN_ID
from bench.sim.hardware import HARDWARE
from bench.sim.models import MODELS
from bench.sim.steptime import Roofline, StepTime
from bench.tables import equal

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

#: New tokens of a prompt whose other tokens are cached.
EXTENSION_TOKENS = 256
_REPEATS = 3
#: Context of the decodes that are timed.
_CONTEXT_TOKENS = 512


def steps(stage: Stage) -> Verdict:
    """Prefills by length, cold and cached, and decode steps by batch."""
    sizes = stage.sizes
    gpu = stage.machine["gpu"].lower()
    name = next((name for name in HARDWARE if name in gpu), "h100")
    model = Roofline.of(HARDWARE[name], MODELS["llama-3.1-8b"])
    driver = cache(partial(Driver, stage))  # an engine only where a cell is missing

    def prefill(tokens: int) -> Json:
        return driver().prefill(tokens, model)

    def decode(batch: int) -> Json:
        return driver().decode(batch, sizes.step_tokens, model)

    for length in sizes.step_prompts:
        stage.cell(f"prefill {length}", partial(prefill, length))
    for batch in sizes.step_batches:
        stage.cell(f"decode {batch}", partial(decode, batch))
    found = stage.cells.values()
    warm = sum(cell.get("cold_cached_tokens", 0) for cell in found)
    missing = sum(c["batch"] - c["fewest_in_a_step"] for c in found if "batch" in c)
    return Verdict(
        [
            equal("cached tokens of cold prefills", warm, 0),
            equal("requests missing in decode steps", missing, 0),
        ]
    )


class Driver:
    """vLLM's engine in this process, stepped by hand."""

    def __init__(self, stage: Stage) -> None:
        agents = stage.sizes.serve
        longest = max(stage.sizes.step_prompts) + 2 * EXTENSION_TOKENS
        rows = max(stage.sizes.step_batches) * (
            _CONTEXT_TOKENS + 4 * stage.sizes.step_tokens
        )
        options = type(agents.server(None))(
            num_blocks=2 * max(longest, rows) // 32,
            max_model_len=longest,
            extra_args=agents.extra_args,
        )
        os.environ |= options.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        folder = stage.folder / f"model-{stage.name}"
        model = tiny_model.build(folder, shape=agents.shape)
        parser: Any = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
        EngineArgs.add_cli_args(parser)
        given, _ = parser.parse_known_args(options.arguments(model, 0))
        self._engine: LLMEngine = LLMEngine.from_engine_args(
            EngineArgs.from_cli_args(given)
        )
        self._chunk_tokens = given.max_num_batched_tokens
        self._requests = 0
        self.prefill_s(
            self.prompt(_CONTEXT_TOKENS)
        )  # compiles what the first step needs

    def prompt(self, tokens: int) -> list[int]:
        """Tokens that no prompt before had."""
        self._requests += 1
        rng = random.Random(self._requests)
        vocab = tiny_model.DEFAULT_SHAPE.vocab
        return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(tokens)]

    def prefill(self, tokens: int, model: StepTime) -> Json:
        """The fastest of some: others' load only slows."""
        cold, cached = [], []
        for _ in range(_REPEATS):
            prompt = self.prompt(tokens)
            cold.append(self.prefill_s(prompt))
            longer = [*prompt, *self.prompt(EXTENSION_TOKENS)]
            cached.append(self.prefill_s(longer))
        seconds, hit = min(cold), min(cached)
        chunk = self._chunk_tokens
        return {
            "tokens": tokens,
            "cold_s": seconds[0],
            "cold_cached_tokens": seconds[1],
            "model_cold_s": model.prefill_s(tokens, chunk),
            "extension_s": hit[0],
            "extension_cached_tokens": hit[1],
            "model_extension_s": model.prefill_s(
                tokens + EXTENSION_TOKENS, chunk, hit[1]
            ),
        }

    def prefill_s(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and the tokens that were cached."""
        self._add(prompt, 1)
        began_s = time.perf_counter()
        cached = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                cached = getattr(output, "num_cached_tokens", 0) or 0
        return time.perf_counter() - began_s, cached

    def decode(self, batch: int, timed: int, model: StepTime) -> Json:
        """The mean of steps in which all decode."""
        warm_steps = 2 + batch * _CONTEXT_TOKENS // self._chunk_tokens
        # One request decodes while others are prefilled: it must not end before them.
        for _ in range(batch):
            self._add(self.prompt(_CONTEXT_TOKENS), timed + 2 * warm_steps + 2)
        while (
            self._engine.has_unfinished_requests() and len(self._engine.step()) < batch
        ):
            pass
        self._engine.step()
        began_s = time.perf_counter()
        seen = [len(self._engine.step()) for _ in range(timed)]
        seconds = (time.perf_counter() - began_s) / timed
        while self._engine.has_unfinished_requests():
            self._engine.step()
        context = _CONTEXT_TOKENS + warm_steps + timed // 2
        return {
            "batch": batch,
            "context_tokens": context,
            "step_s": seconds,
            "fewest_in_a_step": min(seen),
            "model_step_s": model.seconds([(1, context)] * batch),
        }

    def _add(self, prompt: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        self._requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._engine.add_request(
            str(self._requests), {"prompt_token_ids": list(prompt)}, params
        )
