"""Loggers that show in a vLLM process."""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """A logger that shows: vLLM attaches its handler to the `vllm` logger only."""
    return logging.getLogger(f"vllm.{name}")
