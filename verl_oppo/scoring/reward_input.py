"""What a discriminative reward model reads: verl's text of a trajectory and its token ids, final or while it grows.

The reward loop's worker builds the final input with it. The stream service holds a `RewardInputTranslator`, since
chunks come as the actor's token ids and the reward model has a chat template, and often a tokenizer, of its own. It
knows neither Ray nor the reward model.

The translator guesses what will not change any more. A wrong guess costs time only: the scorer keeps of its cache what
the final input confirms (see `scorer`).
"""

from __future__ import annotations

import os.path
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local

from verl_oppo.scoring.growing_text import GrowingText, GrowingTokens, extended
from verl_oppo.scoring.prefix_cache import as_ids, common_prefix_length
from verl_oppo.scoring.scorer import Chunk, TokenIds

Messages = Sequence[Mapping[str, Any]]
"""A chat, as in verl's `raw_prompt`."""

MARK = "\ue000oppo\ue001"
"""Stands for what follows a response: private-use characters, which neither a template nor a response contains."""
THINK, END_OF_THINK = "<think>", "\n</think>\n\n"
"""Templates of reasoning models move or drop what stands between them."""
PROMPT_TAIL = 8
"""Tokens at the end of the actor's prompt that may open the reasoning."""
MAX_PROMPTS = 16384
"""Prompts the translator remembers; the oldest go first, and their trajectories no longer stream."""
MAX_TRAJECTORIES = 65536
"""Trajectories it remembers; the oldest go first."""


class RewardInput:
    """verl's input of a reward model (`RewardLoopWorker._preprocess_reward_inputs`, and vLLM's tokens of that text).

    Invariant: `text` is a function of messages and response tokens alone, and equal to verl's.
    """

    def __init__(self, actor_tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase) -> None:
        self.actor_tokenizer = actor_tokenizer
        self.reward_tokenizer = reward_tokenizer

    @classmethod
    def from_paths(cls, actor_path: str, reward_path: str) -> RewardInput:
        """The tokenizers as verl's reward loop loads them."""
        return cls(
            hf_tokenizer(copy_to_local(actor_path), trust_remote_code=True),
            hf_tokenizer(copy_to_local(reward_path), trust_remote_code=True),
        )

    def text(self, messages: Messages, response_ids: TokenIds) -> str:
        """The reward model's input for a response [tokens] of the actor."""
        return self.render(messages, self.without_eos(self.actor_tokenizer.decode(as_ids(response_ids))))

    def token_ids(self, text: str) -> np.ndarray:
        """Token ids of an input, int64 [tokens], special tokens added as vLLM's `/classify` adds them."""
        return as_ids(self.reward_tokenizer(text, add_special_tokens=True)["input_ids"])

    def without_eos(self, decoded: str) -> str:
        return decoded.replace(self.actor_tokenizer.eos_token, "")

    def render(self, messages: Messages, response: str) -> str:
        chat = [*messages, {"role": "assistant", "content": response}]
        text = self.reward_tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
        bos = self.reward_tokenizer.bos_token
        return text.removeprefix(bos) if bos is not None else text

    def render_open(self, messages: Messages, response: str, opening: str = "") -> str:
        """The input up to the end of an unfinished response; empty if the template does not show it.

        Space at its end is left out: templates trim a response, and tokenizers join space with what follows.
        `opening`: the end of the actor's prompt. Where it or the response leaves the reasoning open, the input is the
        one of a response that will close it; where it may still be opened, what both have in common.
        """
        response, before = response.rstrip(), opening + response
        closing = END_OF_THINK + MARK
        if before.rfind(THINK) > before.rfind(END_OF_THINK.strip()):
            return self._render_until_mark(messages, response, closing)
        plain = self._render_until_mark(messages, response)
        if not THINK.startswith(response.strip()):
            return plain
        return os.path.commonprefix([plain, self._render_until_mark(messages, response, closing)])

    def _render_until_mark(self, messages: Messages, response: str, following: str = "") -> str:
        text = self.render(messages, response + MARK + following)
        return text[: max(0, text.find(MARK))]

    def response_span(self, messages: Messages, input_ids: np.ndarray) -> tuple[int, int]:
        """First position of the response in the input [tokens], and the position after its last."""
        before, mark, after = self.render(messages, MARK).partition(MARK)
        if not mark:
            return len(input_ids), len(input_ids)
        suffix = self.reward_tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        start = common_prefix_length(self.token_ids(before), input_ids)
        return start, max(start, len(input_ids) - len(suffix))


@dataclass
class GrowingInput:
    """One trajectory on its way through the translator.

    Invariant: `sent` are the ids of the reward model's input that went downstream, from position 0 on.
    """

    response: GrowingText
    tokens: GrowingTokens
    prompt_length: int | None = None
    """Where the response starts in the actor's ids, once known."""
    actor_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    sent: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def take(self, chunk: Chunk) -> bool:
        """Takes in the actor's ids; False where there is nothing to send: known ones, or an earlier chunk is missing.

        A chunk from position 0 on is a trajectory that starts again, known or not: its scorer may have lost it.
        """
        ids = extended(self.actor_ids, chunk)
        if ids is None or (ids is self.actor_ids and chunk.offset > 0):
            return False
        if chunk.offset == 0:
            self.sent = self.sent[:0]
        self.actor_ids = ids
        return True

    def send(self, ids: np.ndarray) -> tuple[int, np.ndarray]:
        """Offset and ids [tokens] of what is new in `ids`; where it contradicts what was sent, from there on."""
        agreed = common_prefix_length(self.sent, ids)
        if agreed < len(ids):
            self.sent = ids
        return agreed, ids[agreed:]


class RewardInputTranslator:
    """A chunk translator of the stream service: the actor's chunks in, chunks of the reward model's input out.

    Invariant: for each trajectory the chunks that come out are consecutive from position 0 on, and end before the part
    of the input that the next token can still change; what contradicts an earlier chunk begins at the difference.
    """

    def __init__(
        self, actor_path: str, reward_path: str, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Paths of the two models; `chat_template_kwargs` is verl's `data.apply_chat_template_kwargs`."""
        self._paths = (actor_path, reward_path)
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._input: RewardInput | None = None
        self._prompts: OrderedDict[str, tuple[Messages, int | None]] = OrderedDict()
        self._trajectories: OrderedDict[str, GrowingInput] = OrderedDict()

    def register_prompt(self, uid: str, messages: Messages, prompt_length: int | None = None) -> None:
        """What the actor's prompt was made of; without it nothing of the uid's trajectories is streamed.

        `prompt_length`: the actor's tokens before the response. Left out, it is found by the actor's own chat template,
        which does not know the schemas of tools.
        """
        self._prompts[uid] = (list(messages), prompt_length)
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def translate(self, chunk: Chunk) -> list[Chunk]:
        """Chunks of the reward model's input that this chunk decides; often none, if it is short."""
        if chunk.offset > 0 and chunk.trajectory_id not in self._trajectories:
            return []
        messages, prompt_length = self._prompts.get(chunk.trajectory_id.rpartition("_")[0], (None, None))
        growing = self._growing(chunk.trajectory_id, prompt_length)
        if not growing.take(chunk) or messages is None:
            return []
        ids = self._stable_ids(messages, growing)
        offset, new = growing.send(ids)
        return [Chunk(chunk.trajectory_id, offset, new)] if len(new) else []

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """These are over; unknown ids are fine. A prompt stays, for its other trajectories, until it is the oldest."""
        for trajectory_id in trajectory_ids:
            self._trajectories.pop(trajectory_id, None)

    def _growing(self, trajectory_id: str, prompt_length: int | None) -> GrowingInput:
        growing = self._trajectories.get(trajectory_id)
        if growing is None:
            tokenizers = self._loaded()
            growing = GrowingInput(
                GrowingText(tokenizers.actor_tokenizer), GrowingTokens(tokenizers.reward_tokenizer), prompt_length
            )
            self._trajectories[trajectory_id] = growing
            if len(self._trajectories) > MAX_TRAJECTORIES:
                self._trajectories.popitem(last=False)
        if growing.prompt_length is None:
            growing.prompt_length = prompt_length
        return growing

    def _loaded(self) -> RewardInput:
        """The tokenizers, loaded where they are used, so that the translator can be sent to another process."""
        if self._input is None:
            self._input = RewardInput.from_paths(*self._paths)
        return self._input

    def _stable_ids(self, messages: Messages, growing: GrowingInput) -> np.ndarray:
        tokenizers = self._loaded()
        if growing.prompt_length is None:
            growing.prompt_length = self._prompt_length(messages, growing.actor_ids)
        if growing.prompt_length is None:
            return growing.tokens.stable_ids(tokenizers.render_open(messages, ""))
        prompt, response = np.split(growing.actor_ids, [growing.prompt_length])
        text = tokenizers.without_eos(growing.response.text(response))
        opening = tokenizers.actor_tokenizer.decode(prompt[-PROMPT_TAIL:])
        return growing.tokens.stable_ids(tokenizers.render_open(messages, text, opening))

    def _prompt_length(self, messages: Messages, actor_ids: np.ndarray) -> int | None:
        """Length of the prompt as verl's agent loop builds it, or None if these ids do not begin like that."""
        prompt = self._loaded().actor_tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **self._template_kwargs
        )
        return len(prompt) if common_prefix_length(as_ids(prompt), actor_ids) == len(prompt) else None
