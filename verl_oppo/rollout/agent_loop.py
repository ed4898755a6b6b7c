"""Agent loop workers that know whose tokens they make: identity, token versions, completion signal.

`PPOTrainerOppo` names `AgentLoopManagerOppo` in `rollout.agent.agent_loop_manager_class`, where verl's task runner
finds it. Works for every agent loop, since identity travels in a context variable and not through the loop's arguments.
It does not know how a trajectory is trained.
"""

from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from verl_oppo.rollout import partial

TOKEN_VERSIONS_KEY = "token_versions"
"""Key in a trajectory's `extra_fields`: run-length coded weight version of each response token."""


def attach_versions(outputs: list[AgentLoopOutput], session: partial.TokenLedger) -> None:
    """Write the version of each response token, and their smallest and largest, into `extra_fields`.

    verl's multi-turn loop keeps only the last turn's versions; the session's record covers all turns. A loop with
    several outputs hands them out in the order in which it generated them.
    """
    versions = partial.token_versions(session.runs)
    for output in outputs:
        runs = partial.align_versions(versions, output.response_mask)
        output.extra_fields[TOKEN_VERSIONS_KEY] = runs
        generated = [version for version, _ in runs if version != partial.TOOL_TOKEN_VERSION]
        if generated:
            output.extra_fields["min_global_steps"] = min(generated)
            output.extra_fields["max_global_steps"] = max(generated)


# The decorator and the module-level name must be one: Ray then ships the class and verl's base by value together. Under
# another name the base would come by import and verl's `super().__init__` would meet two copies of it.
@ray.remote
class AgentLoopWorkerOppo(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; every training session runs with its own `TokenLedger` in the context.

    Invariant: `completed` is told after the prompt's terminal status is in TransferQueue, never before.
    """

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        if trajectory["validate"]:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)
        # verl runs each session in an asyncio task of its own, so the variable is private to it.
        partial.current_session.set(partial.TokenLedger(uid=kwargs["uid"], session_id=kwargs["session_id"]))
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)
        except Exception as error:
            self.llm_client.controller.failed.remote(kwargs["uid"], f"{type(error).__name__}: {error}")
            raise

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        session = partial.current_session.get()
        if session is not None:
            attach_versions(output if isinstance(output, list) else [output], session)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        uid = prompt["uid"]
        if self.llm_client.stream is not None and not trajectory["validate"]:
            # The token tees know ids only; a reward model with a template of its own reads the messages.
            self.llm_client.stream.register_prompt.remote(uid, list(prompt["raw_prompt"]))
        await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        if not trajectory["validate"]:
            self.llm_client.controller.completed.remote(uid)


class AgentLoopManagerOppo(AgentLoopManagerTQ):
    """verl's manager with workers that report to the rollout controller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # AgentLoopManagerTQ sets its own class first thing, so this comes after it.
        self.agent_loop_workers_class = AgentLoopWorkerOppo
