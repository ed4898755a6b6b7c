"""The weight sync on a CPU: verl's real sender and receiver, over ZMQ and shared memory, with faults on either side."""

import asyncio
import importlib.util
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType

import pytest
import torch
import zmq
from verl.plugin.platform import platform_manager

from verl_oppo.platform import cpu, cpu_weight_sync, shims
from verl_oppo.platform.cpu_device import PlatformCPU

pytestmark = pytest.mark.skipif(
    shims.accelerator_available(), reason="the platform for machines without an accelerator"
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's current platform is the CPU platform."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())


def copy_of_transfer_module() -> ModuleType:
    """verl's bucketed_weight_transfer, not shared with anything else in this process."""
    spec = importlib.util.find_spec("verl.workers.rollout.vllm_rollout")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "bucketed_weight_transfer.py"
    copy = importlib.util.module_from_spec(importlib.util.spec_from_file_location("transfer_copy", path))
    copy.__spec__.loader.exec_module(copy)
    return copy


@pytest.fixture
def transfer() -> ModuleType:
    module = copy_of_transfer_module()
    cpu.weight_transfer_copies_and_reports.change(module)
    return module


@pytest.fixture
def handle() -> Iterator[str]:
    address = f"ipc:///tmp/oppo-test-{uuid.uuid4().hex[:12]}.sock"
    yield address
    cpu_weight_sync.receiver_calls.pop(address, None)


def weights_of(num_tensors: int = 5) -> list[tuple[str, torch.Tensor]]:
    """Tensors of 0.4 MiB, two to a bucket."""
    return [(f"weight{i}", torch.full((MIB // 10,), float(i))) for i in range(num_tensors)]


def send(transfer: ModuleType, handle: str, weights: list[tuple[str, torch.Tensor]]) -> None:
    sender = transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(sender.async_send_weights(iter(weights)))


def receive(transfer: ModuleType, handle: str, load: Callable[[list, bool], None]) -> None:
    transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(load)


@contextmanager
def scripted_sender(handle: str, tensors: dict[str, tuple[torch.Size, int]]) -> Iterator[None]:
    """Sends one bucket of float32 tensors, given by shape and byte offset in a segment of 64 bytes; then leaves."""
    segment = SharedMemory(create=True, size=64)
    bucket = {
        name: {"name": name, "shape": shape, "dtype": torch.float32, "offset": offset, "handle": None}
        for name, (shape, offset) in tensors.items()
    }

    def run(socket: zmq.Socket) -> None:
        socket.send_pyobj({"name": segment.name, "size": 64})
        socket.recv()
        socket.send_pyobj({"bucket_meta": bucket, "is_last": True})

    with zmq.Context() as context, context.socket(zmq.REQ) as socket, ThreadPoolExecutor(1) as pool:
        socket.linger = 0
        socket.bind(handle)
        sent = pool.submit(run, socket)
        yield
        sent.result(timeout=10)
    segment.close()
    segment.unlink()


def sync(transfer: ModuleType, handle: str, load: Callable[[list, bool], None]) -> tuple[Future, Future]:
    """Sender's and receiver's outcome, each in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(receive, transfer, handle, load)
        sending = pool.submit(send, transfer, handle, weights_of())
    return sending, receiving


def test_received_weights_outlive_their_bucket(transfer: ModuleType, handle: str) -> None:
    kept: dict[str, torch.Tensor] = {}
    last: list[bool] = []

    def load(weights: list, is_last: bool) -> None:
        kept.update(weights)
        last.append(is_last)

    sending, receiving = sync(transfer, handle, load)
    assert (sending.exception(), receiving.exception()) == (None, None)
    assert last == [False, False, True]
    for name, weight in weights_of():
        assert torch.equal(kept[name], weight)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_verl_alone_cannot_keep_received_weights(handle: str) -> None:
    """Should this fail, verl has learned to copy on a CPU, and the shim may go."""
    kept: list = []
    with scripted_sender(handle, {"good": (torch.Size([4]), 0)}):
        with pytest.raises(BufferError, match="cannot close exported pointers"):
            receive(copy_of_transfer_module(), handle, lambda weights, is_last: kept.extend(weights))


def test_error_while_loading_a_bucket_reaches_the_caller(transfer: ModuleType, handle: str) -> None:
    loaded: list[str] = []

    def load(weights: list, is_last: bool) -> None:
        loaded.extend(name for name, _ in weights)
        raise ValueError("weight0 has no loader")

    sending, receiving = sync(transfer, handle, load)
    assert sending.exception() is None, "the sender must get through"
    with pytest.raises(ValueError, match="weight0 has no loader"):
        receiving.result()
    assert loaded == ["weight0", "weight1"], "buckets after the failed one must not be loaded"


def test_error_of_the_protocol_is_not_hidden_by_live_views(transfer: ModuleType, handle: str) -> None:
    with scripted_sender(handle, {"good": (torch.Size([4]), 0), "beyond the segment": (torch.Size([64]), 32)}):
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            receive(transfer, handle, lambda weights, is_last: None)


def test_sender_raises_what_the_receivers_call_raised(transfer: ModuleType, handle: str) -> None:
    call: Future = Future()
    call.set_exception(RuntimeError("Worker failed with error 'no attribute weight_loader'"))
    cpu_weight_sync.receiver_calls[handle] = call
    with pytest.raises(RuntimeError, match="no attribute weight_loader"):
        send(transfer, handle, weights_of())


def test_sender_raises_when_the_receiver_returned_without_a_word(transfer: ModuleType, handle: str) -> None:
    call: Future = Future()
    call.set_result(None)
    cpu_weight_sync.receiver_calls[handle] = call
    with pytest.raises(RuntimeError, match="waits for vLLM's worker on .*, but its call has returned"):
        send(transfer, handle, weights_of())


def test_neither_side_waits_for_ever(transfer: ModuleType, handle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weight_sync, "SYNC_TIMEOUT_S", 0.5)
    with pytest.raises(TimeoutError, match="waits for vLLM's worker on"):
        send(transfer, handle, weights_of())
    with pytest.raises(TimeoutError, match="waits for weights on"):
        receive(transfer, handle, lambda weights, is_last: None)
