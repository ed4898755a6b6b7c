"""Weight sync through shared memory on a CPU: copies instead of views, and an error instead of a hang.

The sender runs in verl's trainer worker, the receiver in vLLM's worker; `cpu.weight_transfer_copies_and_reports` puts
each mixin before verl's own class (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py, verl 0.9.1).
`cpu_rollout.CpuServerAdapter` tells the sender how the receiver's call ended.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import zmq

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 600.0
"""How long one side waits for the other's next message."""

POLL_MS = 200
"""How often a waiting sender looks whether the receiver's call has ended."""

receiver_calls: dict[str, Future] = {}
"""The pending `update_weights_from_ipc` of vLLM's worker by ZMQ handle; absent where this rank has no server."""


class WatchedSocket:
    """A ZMQ socket that waits for its peer only while the peer's call is pending, and not beyond the deadline.

    `send_pyobj` and `recv` raise whatever the peer's call raised, RuntimeError when that call has returned although an
    answer is due, and TimeoutError when the peer takes longer than `SYNC_TIMEOUT_S`.
    """

    def __init__(self, socket: zmq.Socket, peer_call: Future | None, waits_for: str) -> None:
        self._socket = socket
        self._peer_call = peer_call
        self._waits_for = waits_for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, message: Any) -> None:
        self._wait_until_ready(zmq.POLLOUT)  # a REQ socket without a peer blocks on sending
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait_until_ready(zmq.POLLIN)
        return self._socket.recv()

    def _wait_until_ready(self, event: int) -> None:
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        while not self._socket.poll(POLL_MS, event):
            if self._peer_call is not None and self._peer_call.done():
                self._peer_call.result()
                if self._socket.poll(POLL_MS, event):
                    return
                raise RuntimeError(f"{self._waits_for}, but its call has returned")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._waits_for}: no answer within {SYNC_TIMEOUT_S:g} s")


class WatchingSenderMixin:
    """To stand before `BucketedWeightSender`: does not wait for a receiver that has failed."""

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = WatchedSocket(
            self.socket,
            receiver_calls.get(self.zmq_handle),
            f"weight sync waits for vLLM's worker on {self.zmq_handle}",
        )


class CopyingReceiverMixin:
    """To stand before `BucketedWeightReceiver`: no view of the shared segment outlives its bucket.

    After an error in one bucket the remaining buckets are acknowledged and dropped, so the sender gets through; then
    the error is raised.
    """

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket.setsockopt(zmq.RCVTIMEO, int(SYNC_TIMEOUT_S * 1000))

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, torch.Tensor]], bool], None]) -> None:
        """verl's `receive_weights`; raises what `on_bucket_received` raised, TimeoutError when the sender is silent."""
        failure: Exception | None = None

        def apply_copies(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            nonlocal failure
            copies = [(name, tensor.clone()) for name, tensor in weights]
            weights.clear()  # the caller's list: a traceback must not keep its views alive
            if failure is not None:
                return
            try:
                on_bucket_received(copies, is_last)
            except Exception as error:
                logger.exception("weight sync failed while loading a bucket of %d tensors", len(copies))
                failure = error

        try:
            super().receive_weights(apply_copies)
        except zmq.Again as error:
            raise TimeoutError(
                f"weight sync waits for weights on {self.zmq_handle}: none within {SYNC_TIMEOUT_S:g} s"
            ) from error
        if failure is not None:
            raise failure

    def _cleanup(self) -> None:
        try:
            super()._cleanup()
        except BufferError as error:
            if error.__context__ is None:
                raise
            logger.warning("the shared segment stays mapped: views of it are held by the error that is being raised")
            self.socket.close()
            self.socket = None
