"""Every name of verl, vLLM and TransferQueue that this package relies on, pinned in `verl_contract.json`.

When a pin breaks under a new version of verl, the code that uses the name needs a look. When a new use has no pin yet:
`python tests/test_verl_contract_on_cpu.py` writes the file anew; read its diff.
"""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGES = ("verl", "vllm", "transfer_queue")
CONTRACT = Path(__file__).with_name("verl_contract.json")
SOURCES = Path(__file__).resolve().parent.parent / "verl_oppo"
ACTS_ON_IMPORT = ("verl_oppo.platform.emulated",)
"""Imported by emulated runs only, which it changes."""

pytestmark = pytest.mark.timeout(400)


# ---------------------------------- what our sources use ----------------------------------


def is_theirs(module: str | None) -> bool:
    return (module or "").split(".")[0] in PACKAGES


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def chains(tree: ast.AST, root: str) -> set[str]:
    """The longest chains of attributes on the name `root`, without it."""
    found = {dotted(node) or "" for node in ast.walk(tree)}
    found = {name.removeprefix(f"{root}.") for name in found if name.startswith(f"{root}.")}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


class Import(NamedTuple):
    """A name of theirs in our source: where it holds, what it is called there, and what it stands for.

    `name` is None where it stands for the module itself, as it also does for the argument of a shim.
    """

    scope: ast.AST
    here: str
    module: str
    name: str | None


def imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_theirs(alias.name):
                    yield Import(tree, alias.asname or alias.name, alias.name, None)
        elif isinstance(node, ast.ImportFrom) and is_theirs(node.module):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names = (inner, None) if is_module(inner) else (node.module, alias.name)
                yield Import(tree, alias.asname or alias.name, *names)
        elif isinstance(node, ast.FunctionDef) and (module := shimmed_module(node)):
            yield Import(node, node.args.args[0].arg, module, None)


def names_used_in(tree: ast.AST) -> Iterator[str]:
    """`module:name` of each import and of each attribute that is read from an imported module."""
    for scope, here, module, name in imports(tree):
        uses = chains(scope, here) if name is None else {name}
        yield from {f"{module}:{use}" for use in uses} or {f"{module}:"}


def calls_in(tree: ast.AST) -> Iterator[tuple[str, int, set[str]]]:
    """Each call of a name of theirs: `module:name`, the number of positional arguments, the keywords."""
    for scope, here, module, name in imports(tree):
        for node in ast.walk(scope):
            called = dotted(node.func) if isinstance(node, ast.Call) else None
            if called is None or not f"{called}.".startswith(f"{here}."):
                continue
            rest = [name] if name else []
            rest += called.removeprefix(here).strip(".").split(".") if called != here else []
            positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            yield f"{module}:{'.'.join(rest)}", positional, {word.arg for word in node.keywords if word.arg}


def shimmed_module(function: ast.FunctionDef) -> str | None:
    """The module that a shim of `verl_oppo.platform` changes."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and dotted(decorator.func) == "shim":
            module = ast.literal_eval(decorator.args[0])
            return module if is_theirs(module) else None
    return None


def sources() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield str(path.relative_to(SOURCES)), ast.parse(path.read_text())


def names_used() -> set[str]:
    return {name for _, tree in sources() for name in names_used_in(tree)}


# ---------------------------------- what they look like ----------------------------------


def parameters(function: Any) -> str:
    """Names of the parameters with their kinds; `=` where there is a default."""
    shown, star_shown = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if name.startswith("_ray_"):
            continue  # which Ray adds to the methods of actors
        if parameter.kind is parameter.KEYWORD_ONLY and not star_shown:
            shown.append("*")
            star_shown = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        star_shown = star_shown or stars == "*"
        shown.append(stars + name + ("=" if parameter.default is not parameter.empty else ""))
    return f"({', '.join(shown)})"


def look_up(name: str) -> Any:
    """The thing named `module:name`; an actor class unwrapped. Raises AttributeError if it is gone."""
    module, _, attributes = name.partition(":")
    thing: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        thing = getattr(thing, attribute)
    return getattr(thing, "__ray_actor_class__", thing)


def describe(name: str) -> str:
    """The parameters of a function, the members of an enum, the kind of anything else."""
    thing = look_up(name)
    if isinstance(thing, type):
        return f"enum: {', '.join(thing.__members__)}" if issubclass(thing, Enum) else "class"
    return parameters(thing) if callable(thing) else type(thing).__name__


@cache
def our_classes() -> list[type]:
    """Our classes under one of theirs, actor classes unwrapped."""
    import verl_oppo

    found = {}
    for info in pkgutil.walk_packages(verl_oppo.__path__, "verl_oppo."):
        if not info.name.endswith("__main__") and info.name not in ACTS_ON_IMPORT:
            for thing in vars(importlib.import_module(info.name)).values():
                thing = getattr(thing, "__ray_actor_class__", thing)
                if isinstance(thing, type) and thing.__module__ == info.name:
                    found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return [cls for _, cls in sorted(found.items()) if any(is_theirs(base.__module__) for base in cls.__mro__)]


def overridden(cls: type) -> Iterator[tuple[str, Any, type]]:
    """Name and function of each method of `cls` that replaces one of theirs, and the class that has theirs."""
    for name, member in vars(cls).items():
        if not inspect.isfunction(inspect.unwrap(member)) or (name.startswith("__") and name != "__init__"):
            continue
        for base in cls.__mro__[1:]:
            if name in vars(base):
                if is_theirs(base.__module__):
                    yield name, member, base
                break


def overrides() -> dict[str, str]:
    """Each of our methods that replaces one of theirs, and which one, with its parameters."""
    return {
        f"{cls.__module__}.{cls.__qualname__}.{name}": f"{base.__module__}.{base.__qualname__}.{name}"
        + parameters(vars(base)[name])
        for cls in our_classes()
        for name, _, base in overridden(cls)
    }


def current_contract() -> dict[str, dict[str, str]]:
    return {"names": {name: describe(name) for name in sorted(names_used())}, "overrides": overrides()}


# ---------------------------------- the tests ----------------------------------

PINNED = json.loads(CONTRACT.read_text()) if CONTRACT.exists() else {"names": {}, "overrides": {}}


def test_every_name_that_is_used_is_pinned():
    assert names_used() - PINNED["names"].keys() == set(), "no pin yet: see the docstring of this module"


def test_the_walk_finds_each_way_of_using_a_name():
    source = """
import transfer_queue as tq
import vllm.v1.engine.core
from verl.utils import tensordict_utils as tu
from verl.trainer.main_ppo import run_ppo as run
@shim("verl.utils.distributed")
def change(module):
    module.a.b = module.c
@shim("verl.utils.other")
def change_another(module):
    module.d(module)
def f():
    from verl.protocol import DataProto
    return tq.kv_list(1, partition_id=2), tu.get_tensordict, [tq.KVBatchMeta.size], run(*a, **b), DataProto.new(1)
"""
    assert set((name, num, *keywords) for name, num, keywords in calls_in(ast.parse(source))) == {
        ("transfer_queue:kv_list", 1, "partition_id"),
        ("verl.trainer.main_ppo:run_ppo", 0),
        ("verl.protocol:DataProto.new", 1),
        ("verl.utils.other:d", 1),
    }
    assert set(names_used_in(ast.parse(source))) == {
        "transfer_queue:kv_list",
        "transfer_queue:KVBatchMeta.size",
        "vllm.v1.engine.core:",
        "verl.utils.tensordict_utils:get_tensordict",
        "verl.trainer.main_ppo:run_ppo",
        "verl.utils.distributed:a.b",
        "verl.utils.distributed:c",
        "verl.utils.other:d",
        "verl.protocol:DataProto",
    }


@pytest.mark.parametrize("name", sorted(PINNED["names"]))
def test_a_name_is_where_it_was_and_takes_what_it_took(name):
    assert describe(name) == PINNED["names"][name]


def test_what_is_called_takes_what_we_give_it():
    checked = 0
    for path, tree in sources():
        for name, num_positional, keywords in calls_in(tree):
            try:
                signature = inspect.signature(look_up(name))
            except ValueError:
                continue  # an enum, a TypedDict
            checked += 1
            taken = signature.parameters.values()
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
            assert takes_all or keywords <= signature.parameters.keys(), f"{path}: {name} does not take {keywords}"
            takes_any_number = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken)
            positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            assert takes_any_number or num_positional <= len(positional), f"{path}: {name} takes {signature}"
    assert checked > 20, "the walk finds calls"


def test_our_methods_replace_the_same_methods_as_before():
    """A hook that verl renames would leave ours behind, called by nobody."""
    assert overrides() == PINNED["overrides"], "meant? see the docstring of this module"


def test_our_methods_take_what_theirs_take():
    for cls in our_classes():
        for name, ours, base in overridden(cls):
            if name == "__init__":
                continue
            given = inspect.signature(ours).parameters.values()
            accepted = {parameter.name for parameter in given}
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given)
            for parameter in inspect.signature(vars(base)[name]).parameters.values():
                fits = parameter.name in accepted or takes_all or parameter.kind is parameter.VAR_KEYWORD
                assert fits, f"{cls.__name__}.{name} does not take {parameter.name} of {base.__name__}.{name}"


def test_what_our_classes_read_from_themselves_exists():
    """Attributes and methods that ours inherit: defined by a class above, or assigned to `self` in one."""
    for cls in our_classes():
        above = [base for base in cls.__mro__ if base is not object]
        assigned = {name for base in above for name in re.findall(r"self\.(\w+)(?:,|:| =|\[.*\] =)", source_of(base))}
        for name in set(re.findall(r"self\.(\w+)", source_of(cls))):
            known = any(name in {*vars(base), *getattr(base, "__annotations__", {})} for base in above)
            assert known or name in assigned, f"{cls.__name__} reads self.{name}, which no class above it has"


def source_of(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def in_order(source: str, *parts: str) -> bool:
    positions = [source.find(part) for part in parts]
    return -1 not in positions and positions == sorted(positions)


def test_verl_waits_as_long_as_we_say():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    assert inspect.signature(ReplayBuffer.__init__).parameters["poll_interval"].default == 2.0
    assert "await asyncio.sleep(1)" in inspect.getsource(FullyAsyncLLMServerClient.generate)
    assert 'output.stop_reason not in ("aborted", "abort")' in inspect.getsource(FullyAsyncLLMServerClient.generate)


def test_a_replica_with_all_slots_taken_still_answers_control_calls():
    from verl.workers.rollout import replica

    from verl_oppo.config.schema import MAX_INFLIGHT_LIMIT

    at_least = inspect.getsource(replica.RolloutReplica.max_concurrency.fget)
    assert "return max(1000, self.config.max_num_seqs + CONTROL_METHOD_CONCURRENCY)" in at_least
    assert MAX_INFLIGHT_LIMIT + replica.CONTROL_METHOD_CONCURRENCY <= 1000


def test_verls_defaults_are_those_of_the_support_matrix(compose_config):
    sampler = compose_config(config_name="ppo_trainer").trainer.v1.sampler
    assert (sampler.max_off_policy_threshold, sampler.max_off_policy_strategy) == (8, "drop")


def test_verl_calls_its_hooks_in_the_order_that_ours_need():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

    assert in_order(
        inspect.getsource(PPOTrainer.fit),
        *("self.on_validate_begin()", "self._reissue_inflight_prompts()", "self.on_train_begin()", "self.step("),
        *("self._save_checkpoint()", "self.on_step_end()", "self._compute_metrics(", "tq.kv_clear("),
    )
    assert in_order(inspect.getsource(PPOTrainer.step), "self.prepare_step()", "self._step_once(")
    assert in_order(
        inspect.getsource(PPOTrainer._step_once),
        *("self.on_sample_begin()", "self.replay_buffer.sample(", "self.on_sample_end()", "self._balance_batch("),
        *("self._compute_old_log_prob(", "self._compute_values(", "self._update_critic(", "self._update_actor("),
    )
    save = inspect.getsource(PPOTrainer._save_checkpoint)
    assert in_order(save, "tq.save_checkpoint(", "latest_checkpointed_iteration.txt")
    sample_end = inspect.getsource(PPOTrainerColocateAsync.on_sample_end)
    assert in_order(sample_end, "abort_replicas()", "self.checkpoint_manager.sleep_")
    assert in_order(inspect.getsource(PPOTrainer.__init__), "self.trainer_mode =", "self._build_replay_buffer()")


def test_the_replay_buffer_decides_in_the_order_that_ours_needs():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    assert in_order(
        inspect.getsource(ReplayBufferAsync.wait_for_sampleable),
        *("self._sync_metadata_from_transfer_queue()", "self._evict_terminal_groups(", "self.refill_fn("),
        *("self._has_enough_samples(", "self._wait_for_next_poll("),
    )
    assert in_order(inspect.getsource(ReplayBufferAsync.sample), "self._select_prompt_uids(", "_materialize_batch(")
    assert "time.sleep(self.poll_interval)" in inspect.getsource(ReplayBuffer._wait_for_next_poll)
    statuses = re.findall(r'case "(\w+)"', inspect.getsource(ReplayBuffer._sync_metadata_from_transfer_queue))
    assert statuses == ["pending", "running", "finished", "failure"]


def test_the_agent_loop_worker_reports_as_ours_expects():
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

    worker = AgentLoopWorkerTQ.__ray_actor_class__
    run_prompt = inspect.getsource(worker._run_prompt)
    assert in_order(run_prompt, "asyncio.create_task(", "session_id=i", "_settle_session_tasks(", '"status": status')
    postprocess = inspect.getsource(worker._agent_loop_postprocess)
    assert in_order(postprocess, '{uid}_{session_id}_{i}"', '.get("min_global_steps")', "tq.async_kv_batch_put(")
    assert "self._agent_loop_postprocess(output, trajectory" in inspect.getsource(AgentLoopWorker._run_agent_loop)
    of_manager = inspect.getsource(AgentLoopManagerTQ.__init__)
    assert in_order(of_manager, "self.agent_loop_workers_class =", "super().__init__(")


def test_verls_worker_reads_the_settings_of_a_paired_update():
    """Keys of `online_dpo.update_settings`: a name that nobody reads would train rows instead of pairs."""
    from verl.workers.engine import utils
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    mini_batches = inspect.getsource(TrainingWorker.train_mini_batch) + inspect.getsource(TrainingWorker.train_batch)
    for key in ("mini_batch_size", "epochs", "seed", "dataloader_kwargs", "micro_batch_size_per_gpu"):
        assert f'key="{key}"' in mini_batches or f"{key}=" in mini_batches, key
    assert 'key="force_group_size"' in inspect.getsource(utils.prepare_micro_batches)
    assert "self.actor.set_loss_fn(loss_fn=loss_fn)" in inspect.getsource(ActorRolloutRefWorker.set_loss_fn)


if __name__ == "__main__":
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_oppo.platform.cpu"}
    sys.path.insert(0, str(SOURCES.parent))
    CONTRACT.write_text(json.dumps(current_contract(), indent=1) + "\n")
    print(f"{CONTRACT} written; read its diff")
