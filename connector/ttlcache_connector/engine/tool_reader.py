"""Reads the next tool from a finished turn's output tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ttlcache.clock import cpu_s
from ttlcache.toolcalls import detect, detect_items
from ttlcache.types import GapKey
from ttlcache_connector.log import logger

log = logger(__name__)

#: From an output text to its gap key, None without a call.
Read = Callable[[str], GapKey | None]

#: Output tokens at the end of a turn that are searched for tool calls.
TAIL_TOKENS = 2048
#: Output tokens that may come between a stop string and the abort that follows it.
STOP_LAG_TOKENS = 64
#: Stop strings of one request that are looked for; clients may send any number.
MAX_STOPS = 32


class OutputReader:
    """Detokenises the tail of an output and looks for tool calls.

    The engine process holds no tokenizer; this one is loaded in the background,
    and until it is there (or when there is none) `ready` is False.

    Args:
        parser_name: vLLM's tool parser, asked where our parsers see no call. A
            server that names one has no fenced shell blocks as calls.
    """

    def __init__(
        self,
        model_config: Any,
        parser_name: str | None = None,
        tail_tokens: int = TAIL_TOKENS,
    ) -> None:
        self._tail_tokens = tail_tokens
        self._parser_name = parser_name
        self._tokenizer: Any = None
        self._read: Read = detect
        if getattr(model_config, "skip_tokenizer_init", False):
            return
        threading.Thread(
            target=self._load,
            args=(model_config,),
            name="ttlcache-tokenizer",
            daemon=True,
        ).start()

    @property
    def ready(self) -> bool:
        return self._tokenizer is not None

    def read(self, output_token_ids: Sequence[int]) -> GapKey | None:
        """The gap key of the tool call in an output, None when there is none."""
        tail = list(output_token_ids[-self._tail_tokens :])
        # Tool-call markers are special tokens in many vocabularies: keep them.
        return self._read(self._tokenizer.decode(tail, skip_special_tokens=False))

    def holds_stop(self, output_token_ids: Sequence[int], params: Any) -> bool:
        """Whether a stop string of these sampling parameters ends an output."""
        stops = [stop for stop in (params.stop or ())[:MAX_STOPS] if stop]
        if not stops or not self.ready:
            return False
        # No token is shorter than a byte.
        longest = max(len(stop.encode("utf-8", "replace")) for stop in stops)
        num_tokens = min(longest + STOP_LAG_TOKENS, self._tail_tokens)
        tail = list(output_token_ids[-num_tokens:])
        text = self._tokenizer.decode(
            tail, skip_special_tokens=params.skip_special_tokens
        )
        return any(stop in text for stop in stops)

    def _load(self, model_config: Any) -> None:
        try:
            from vllm.tokenizers import cached_tokenizer_from_config

            self._tokenizer = cached_tokenizer_from_config(model_config)
        except Exception:
            log.warning(
                "ttlcache: no tokenizer, tools are known from hints only",
                exc_info=True,
            )
            return
        if self._parser_name is not None:
            self._read = VLLMParser(self._parser_name, self._tokenizer).read


class VLLMParser:
    """Our structured formats first, then vLLM's own parser.

    Ours go first because vLLM's log an error on every half-written call. vLLM runs
    its parsers in the API server and some of them raise for whole models or take
    quadratic time; here they would stop the engine. So one that is unknown, that
    cannot work or that is slow is dropped, and ours read alone from then on.
    """

    #: Characters at the end of an output that vLLM's parser gets to see.
    TAIL_CHARS = 1536
    #: A call that takes more of the CPU is the parser's last one.
    SLOW_S = 0.1

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._parser_cls: Any = None
        self._request: Any = None
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import (
                ChatCompletionRequest,
            )
            from vllm.tool_parsers import ToolParserManager

            # Pydantic fills in the rest.
            self._request = ChatCompletionRequest(messages=[], model="")  # type: ignore[call-arg]
            self._parser_cls = ToolParserManager.get_tool_parser(name)
        except Exception:  # noqa: BLE001 - detection is optional
            self._drop("is unknown to the engine process")

    def read(self, text: str) -> GapKey | None:
        """The gap key of the calls in `text`; never raises because of vLLM."""
        key = detect(text, fences=False)
        if key is not None or self._parser_cls is None:
            return key
        started_s = cpu_s()
        try:
            parser = self._parser_cls(self._tokenizer)
            found = parser.extract_tool_calls(text[-self.TAIL_CHARS :], self._request)
            key = detect_items([call.model_dump() for call in found.tool_calls])
        except Exception:  # noqa: BLE001 - detection is optional
            self._drop("failed")
            return None
        if cpu_s() - started_s > self.SLOW_S:
            self._drop(f"took more than {self.SLOW_S:g} s")
        return key

    def _drop(self, why: str) -> None:
        self._parser_cls = None
        log.warning(
            "ttlcache: vLLM's tool parser %r %s; tool calls are read by ttlcache's "
            "own parsers from now on",
            self._name,
            why,
        )
