"""Where the weights of one of verl's engines are while a scorer computes with them.

A part of the scorers on verl's FSDP and Megatron engines. It knows neither forwards nor caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from verl.utils.device import get_device_name
from verl.workers.engine import BaseEngine


class EngineWeights(ABC):
    """`open_stream`, `close_stream` and `_eval_mode` of a `PagedScorer` around `_engine`.

    Invariant: weights move only where verl's own engine would move them, or with the stream.
    """

    _engine: BaseEngine
    _stream_open = False

    @abstractmethod
    def _weights_device(self) -> str:
        """Type of the device that holds the weights now."""

    def open_stream(self) -> None:
        self._stream_open = True
        if self._engine.is_param_offload_enabled:
            self._move_weights(get_device_name())

    def close_stream(self) -> None:
        if self._stream_open and self._engine.is_param_offload_enabled:
            self._move_weights("cpu")
        self._stream_open = False

    def _eval_mode(self) -> AbstractContextManager:
        """verl's evaluation mode; while the stream is open the weights stay on the device after it."""
        if not self._stream_open:
            return self._engine.eval_mode()
        # verl's own calls to the engine offload at their end, whether a stream is open or not.
        if self._engine.is_param_offload_enabled and self._weights_device() != get_device_name():
            self._move_weights(get_device_name())
        return self._engine.eval_mode(disable_auto_offload=True)

    def _move_weights(self, device: str) -> None:
        self._engine.to(device, model=True, optimizer=False, grad=False)
