"""verl's vLLM server of a discriminative reward model, with the calls that warm its prefix cache and score.

The replica class in `rollout.vllm_server` starts it for reward models; `vllm_reward.VllmRewardTarget` calls it.
Everything else is verl's, its HTTP routes included. It knows token ids only. Importing it imports vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import uuid4

import numpy as np
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import PoolingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import PoolingRequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from verl_oppo.scoring.vllm_reward import UNUSABLE_TOKENS, RewardServerInfo


class RewardServerMethods:
    """What a reward server does on vLLM's engine.

    Invariant: a score is the answer to one ordinary classify request on the final ids; the requests before it leave
    nothing behind but blocks in vLLM's prefix cache, which are addressed by their content.
    """

    engine: AsyncLLM

    async def oppo_describe(self) -> RewardServerInfo:
        config = self.engine.vllm_config
        return RewardServerInfo(
            block_size=config.cache_config.block_size,
            longest_input=self._longest_input(),
            caches_prefixes=bool(config.cache_config.enable_prefix_caching),
            classifies="classify" in await self.engine.get_supported_tasks(),
        )

    async def oppo_prefill(self, prefixes: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Computes these ids [tokens] of unfinished trajectories; what of each was found cached, in tokens."""
        outputs = await asyncio.gather(*[self._classify(name, ids) for name, ids in prefixes.items()])
        return {name: output.num_cached_tokens for name, output in zip(prefixes, outputs, strict=True)}

    async def oppo_score(self, trajectory_id: str, ids: np.ndarray) -> tuple[float, int]:
        """The score of the final ids [tokens], and how many of them were found cached.

        Raises ValueError, naming the trajectory, if they do not fit into the model's context.
        """
        longest = self._longest_input()
        if not 1 <= len(ids) <= longest:
            raise ValueError(
                f"trajectory {trajectory_id}: the reward model's input has {len(ids)} tokens, allowed is 1 to "
                f"{longest} (reward.reward_model.rollout.max_model_len is {longest + UNUSABLE_TOKENS})"
            )
        output = await self._classify(trajectory_id, ids)
        # The last label, as verl's reward loop takes it; a reward model has one.
        return float(output.outputs.data[-1]), output.num_cached_tokens

    def _longest_input(self) -> int:
        return self.engine.model_config.max_model_len - UNUSABLE_TOKENS

    async def _classify(self, trajectory_id: str, ids: np.ndarray) -> PoolingRequestOutput:
        """The request behind `POST /classify` with `use_activation: false`, which is verl's."""
        prompt = TokensPrompt(prompt_token_ids=np.asarray(ids).tolist())
        params = PoolingParams(task="classify", use_activation=False)
        request_id = f"{trajectory_id}-{uuid4().hex}"
        try:
            async for output in self.engine.encode(prompt, params, request_id):
                if output.finished:
                    return output
        except Exception as error:
            # A plain error: whoever gets it need not import vLLM.
            raise RuntimeError(
                f"the reward server failed on trajectory {trajectory_id} ({len(ids)} tokens): "
                f"{type(error).__name__}: {error}"
            ) from None
        raise RuntimeError(f"the reward server gave no answer for trajectory {trajectory_id}")


class vLLMRewardServer(RewardServerMethods, vLLMHttpServer):
    """verl's server with `RewardServerMethods`, for a replica with `is_reward_model`."""
