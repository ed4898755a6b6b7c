"""verl's vLLM rollout adapter on a CPU: lets the weight sender see how the receiver's call ended.

Named in verl's rollout registry by `cpu.vllm_adapter_watches_the_receiver`; imported by verl when it builds a rollout.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_oppo.platform.cpu_weight_sync import receiver_calls


class CpuServerAdapter(ServerAdapter):
    """verl's `ServerAdapter` (workers/rollout/vllm_rollout/vllm_rollout.py), whose sender waits blind otherwise."""

    async def _execute_method(self, method: str, non_block: bool = False, **kwargs: Any) -> Any:
        result = await super()._execute_method(method, non_block=non_block, **kwargs)
        if method == "update_weights_from_ipc" and non_block and result is not None:
            receiver_calls[self.zmq_handle] = result.future()
        return result
