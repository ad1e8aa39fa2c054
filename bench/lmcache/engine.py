"""An engine without a model: what vLLM's LMCache connector asks of a server, and bytes.

It speaks LMCache's own protocol to a real server (lookup, retrieve, store, end of
session), so that tests and benches of the server side need no GPU and no vLLM. A
chunk's bytes follow from its tokens, so that every retrieved byte can be compared.
"""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

LAYERS = 2
_TIMEOUT_S = 60.0


class LMCacheEngine:
    """One client of one server.

    Args:
        hidden: floats a token, layer and half of KV: a chunk of n tokens has
            2 * LAYERS * n * hidden * 4 bytes.
        salt: part of every key, as a client's `cache_salt`.
    """

    def __init__(
        self,
        url: str,
        chunk_tokens: int,
        hidden: int = 64,
        model: str = "toy",
        salt: str = "",
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.hidden = hidden
        self.model = model
        self.salt = salt
        self._numbers = itertools.count()
        self._instance = id(self) % (1 << 30)
        self.client = RequestClientFactory.create(url, context=zmq.Context.instance())
        self.client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=self._instance,
                model_name=model,
                world_size=1,
                block_size=chunk_tokens,
                num_layers=LAYERS,
                hidden_dim_size=hidden,
                dtype_str="float32",
                use_mla=False,
                num_physical_slots=chunk_tokens,
            )
        ).result(timeout=_TIMEOUT_S)

    @property
    def chunk_bytes(self) -> int:
        return 2 * LAYERS * self.chunk_tokens * self.hidden * 4

    def chunk(self, tokens: Sequence[int], index: int) -> torch.Tensor:
        """The KV of chunk `index`: a function of all tokens up to its end."""
        end = (index + 1) * self.chunk_tokens
        seed = zlib.crc32(np.asarray(tokens[:end], dtype=np.int64).tobytes())
        shape = (2, LAYERS, self.chunk_tokens, self.hidden)
        values = np.random.default_rng(seed).random(shape, dtype=np.float32)
        return torch.from_numpy(values)

    def lookup(self, request_id: str, tokens: Sequence[int]) -> int:
        """Tokens that the server found, locked for a retrieve."""
        end = len(tokens) // self.chunk_tokens * self.chunk_tokens
        key = self._key(request_id, tokens, 0, end, worker=None)
        self.client.lookup(key, 1).result(timeout=_TIMEOUT_S)
        while True:
            found = self.client.query_prefetch_status(request_id)
            chunks = found.result(timeout=_TIMEOUT_S)
            if chunks is not None:
                return int(chunks) * self.chunk_tokens

    def retrieve(
        self, request_id: str, tokens: Sequence[int], end: int
    ) -> list[torch.Tensor] | None:
        """The chunks of the first `end` tokens; None if they went away."""
        key = self._key(request_id, tokens, 0, end, worker=0)
        answer = self.client.prepare_retrieve(key, self._instance)
        found = answer.result(timeout=_TIMEOUT_S)
        self.client.commit_retrieve(key, self._instance).result(timeout=_TIMEOUT_S)
        if not found.success:
            return None
        chunks: list[torch.Tensor] = pickle.loads(found.data)
        return chunks

    def store(self, request_id: str, tokens: Sequence[int], start: int) -> bool:
        """Store the full chunks from token `start` (a chunk's first) on."""
        end = len(tokens) // self.chunk_tokens * self.chunk_tokens
        if end <= start:
            return True
        key = self._key(request_id, tokens, start, end, worker=0)
        self.client.prepare_store(key, self._instance).result(timeout=_TIMEOUT_S)
        first, last = start // self.chunk_tokens, end // self.chunk_tokens
        data = pickle.dumps([self.chunk(tokens, i) for i in range(first, last)])
        answer = self.client.commit_store(key, self._instance, data)
        return bool(answer.result(timeout=_TIMEOUT_S))

    def end(self, request_id: str) -> None:
        self.client.end_session(request_id).result(timeout=_TIMEOUT_S)

    def turn(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        check: bool = True,
        request_id: str | None = None,
    ) -> int:
        """One request: look up, retrieve, store what is new, end.

        Returns:
            Prompt tokens served from the server.

        Raises:
            AssertionError: a retrieved byte is wrong.
        """
        request_id = request_id or f"{self.model}-{next(self._numbers)}"
        found = self.lookup(request_id, prompt)
        if found:
            chunks = self.retrieve(request_id, prompt, found)
            if chunks is None:
                found = 0
            for index, chunk in enumerate(chunks or () if check else ()):
                assert torch.equal(chunk, self.chunk(prompt, index)), index
        self.store(request_id, [*prompt, *output], found)
        self.end(request_id)
        return found

    def close(self) -> None:
        """Leave; the server forgets this engine's layout."""
        client: Any = self.client
        client.unregister_kv_cache_engine_driven_context(self._instance).result(
            timeout=_TIMEOUT_S
        )
        client.close()

    def _key(
        self,
        request_id: str,
        tokens: Sequence[int],
        start: int,
        end: int,
        worker: int | None,
    ) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self.model,
            world_size=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=start,
            end=end,
            request_id=request_id,
            num_kv_readers=1,
            cache_salt=self.salt,
        )
