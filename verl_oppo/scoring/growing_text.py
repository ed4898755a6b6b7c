"""Ids, text and tokens of a sequence that grows: only its end is decoded or tokenised anew.

Used for reward models, chunk by chunk: doing the whole sequence each time would cost its length squared. It knows
neither models nor chat templates.
"""

from __future__ import annotations

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from verl_oppo.scoring.prefix_cache import as_ids, common_prefix_length
from verl_oppo.scoring.scorer import Chunk

CONTEXT_TOKENS = 16
"""Known tokens that the end is decoded or tokenised with: the first of them may come out otherwise than in the text."""
OVERLAP_TOKENS = 8
"""Known tokens after those that have to come out the same, or else the whole is done anew."""
MOST_HELD_BACK = 16
"""Tokens held back at most, where a tokenizer knows no words (SentencePiece takes the whole text for one)."""
INCOMPLETE = "\ufffd"
"""What stands for the bytes of a character that is not complete yet."""


def extended(known: np.ndarray, chunk: Chunk) -> np.ndarray | None:
    """The ids known of a trajectory and its next chunk, int64 [tokens]; `known` itself if it brings nothing new.

    None if an earlier chunk is missing. Where a chunk contradicts what is known, the chunk is right.
    """
    if chunk.offset > len(known):
        return None
    ids = as_ids(chunk.token_ids)
    if common_prefix_length(known[chunk.offset :], ids) == len(ids):
        return known
    return np.concatenate([known[: chunk.offset], ids])


class GrowingText:
    """Text of token ids that grow.

    Invariant: `text(ids)` is what decoding all ids gives, or ends before characters that are still incomplete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = np.empty(0, dtype=np.int64)
        self._text = ""

    def text(self, ids: np.ndarray) -> str:
        """Text of the ids, int64 [tokens]."""
        text = self._continued(ids)
        complete = text.rstrip(INCOMPLETE)
        if len(complete) == len(text):
            self._ids, self._text = ids, text
        return complete

    def _continued(self, ids: np.ndarray) -> str:
        known = len(self._ids)
        if known <= CONTEXT_TOKENS or common_prefix_length(self._ids, ids) < known:
            return self._tokenizer.decode(ids)
        before = self._tokenizer.decode(ids[known - CONTEXT_TOKENS : known])
        after = self._tokenizer.decode(ids[known - CONTEXT_TOKENS :])
        # The context may begin within a character, or the new tokens may change how it reads.
        if self._text.endswith(before) and after.startswith(before):
            return self._text + after[len(before) :]
        return self._tokenizer.decode(ids)


class GrowingTokens:
    """Token ids of a text that grows, without those at its end that more text is likely to change.

    Held back is the last word (piece, in the tokenizer's own splitting), since tokens do not cross words.

    Invariant: what is known of the text so far decides only how much of it has to be tokenised anew.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._ids = np.empty(0, dtype=np.int64)
        self._starts = np.empty(0, dtype=np.int64)
        """Character at which each token starts."""

    def stable_ids(self, text: str) -> np.ndarray:
        """Token ids, int64 [tokens], of the part of the text that more text is not expected to change."""
        if not text:
            return self._ids[:0]
        encoding = self._continue(text) or self._begin(text)
        return self._ids[: len(self._ids) - _last_word_length(encoding)]

    def _begin(self, text: str) -> BatchEncoding:
        is_fast = self._tokenizer.is_fast
        encoding = self._tokenizer(text, add_special_tokens=True, return_offsets_mapping=is_fast)
        ids = as_ids(encoding["input_ids"])
        # Special tokens that the tokenizer adds behind the text belong to no word.
        added = _count_from_end(encoding.word_ids(0), None) if is_fast else 0
        self._ids = ids[: len(ids) - added]
        self._starts = _starts(encoding)[: len(self._ids)] if is_fast else np.empty(0, dtype=np.int64)
        self._text = text
        return encoding

    def _continue(self, text: str) -> BatchEncoding | None:
        """The end of the text, if the rest of it is as before and tokenises as before."""
        first = len(self._starts) - MOST_HELD_BACK - OVERLAP_TOKENS - CONTEXT_TOKENS
        if first < CONTEXT_TOKENS:
            return None
        start, seam = self._starts[first], self._starts[first + CONTEXT_TOKENS]
        if not text.startswith(self._text[:seam]):
            return None
        encoding = self._tokenizer(text[start:], add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = as_ids(encoding["input_ids"]), _starts(encoding) + start
        keep, skip = np.searchsorted(self._starts, seam), np.searchsorted(starts, seam)
        overlap = self._ids[keep : keep + OVERLAP_TOKENS]
        if not np.array_equal(ids[skip : skip + OVERLAP_TOKENS], overlap):
            return None
        self._ids = np.concatenate([self._ids[:keep], ids[skip:]])
        self._starts = np.concatenate([self._starts[:keep], starts[skip:]])
        self._text = text
        return encoding


def _starts(encoding: BatchEncoding) -> np.ndarray:
    return np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]


def _last_word_length(encoding: BatchEncoding) -> int:
    """Tokens of the last word, special tokens behind it not counted."""
    if not encoding.is_fast:
        return min(MOST_HELD_BACK, len(encoding["input_ids"]))
    words = encoding.word_ids(0)
    words = words[: len(words) - _count_from_end(words, None)]
    return min(MOST_HELD_BACK, _count_from_end(words, words[-1])) if words else 0


def _count_from_end(words: list[int | None], value: int | None) -> int:
    count = 0
    for word in reversed(words):
        if word != value:
            break
        count += 1
    return count
