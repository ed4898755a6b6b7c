"""Preference pairs of a batch: which rows, in which order, with which weight in the loss.

Called by `online_dpo.py` with scores and lengths of the sampled rows. Pure functions on keys and numbers, with verl's
own balancing underneath; they know neither TransferQueue nor Ray.

verl's `force_group_size` keeps rows together that are adjacent, so pairs are adjacent wherever rows are: a pair is the
unit that is balanced over ranks, counted into minibatches and padded with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


@dataclass(frozen=True)
class Pair:
    """Keys of two rows of one prompt. `tie`: their scores are equal, so there is no preference to learn."""

    chosen: str
    rejected: str
    tie: bool = False

    @property
    def keys(self) -> tuple[str, str]:
        return self.chosen, self.rejected


def choose_pairs(scores: Mapping[str, float]) -> list[Pair]:
    """One pair a prompt: its best row is chosen, its worst rejected, the lower session first among equals.

    A prompt whose scores are all equal gives its first two rows, marked as a tie. A prompt with one row gives none.

    Args:
        scores: score of each row, by verl's key `{uid}_{session}_{output}`.

    Raises:
        ValueError: a session has several outputs, for which no pair is defined.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for key in scores:
        uid, session, output = key.rsplit("_", 2)
        if output != "0":
            raise ValueError(f"row {key} is output {output} of its session; online DPO allows one output a session")
        groups.setdefault(uid, []).append((int(session), key))
    pairs = []
    for rows in groups.values():
        keys = [key for _, key in sorted(rows)]
        if len(keys) < 2:
            continue
        best, worst = max(keys, key=scores.__getitem__), min(keys, key=scores.__getitem__)
        tie = scores[best] == scores[worst]
        pairs.append(Pair(*keys[:2], tie=True) if tie else Pair(best, worst))
    return pairs


def balance_pairs(lengths: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """Order of the pairs in which consecutive equal parts, one a rank, have about the same work.

    Args:
        lengths: tokens of the chosen and of the rejected row of each pair; as many pairs as `num_ranks` divides.
    """
    workloads = calculate_workload(torch.tensor(lengths, dtype=torch.int64)).sum(dim=1).tolist()
    partitions = get_seqlen_balanced_partitions(workloads, k_partitions=num_ranks, equal_size=True)
    return [index for partition in partitions for index in partition]


def mini_batch_of(position: int, num_pairs: int, num_ranks: int, mini_batch_pairs: int) -> int:
    """Which minibatch the pair at this position is trained in: each rank goes through its part in order."""
    return position % (num_pairs // num_ranks) // (mini_batch_pairs // num_ranks)


def pair_weights(trained: Sequence[bool], num_ranks: int, mini_batch_pairs: int) -> tuple[list[float], list[int]]:
    """Weight of each pair, 1 over the trained pairs of its minibatch or 0, and the number of them a minibatch.

    With these the sum over a minibatch's pairs, on whatever rank and in whatever micro batch, is their mean.

    Args:
        trained: whether each pair, in balanced order, has a preference; False for ties and padding.
        mini_batch_pairs: pairs a minibatch over all ranks.
    """
    num_pairs = len(trained)
    assert num_pairs % mini_batch_pairs == 0 and mini_batch_pairs % num_ranks == 0, (num_pairs, mini_batch_pairs)
    counts = [0] * (num_pairs // mini_batch_pairs)
    places = [mini_batch_of(position, num_pairs, num_ranks, mini_batch_pairs) for position in range(num_pairs)]
    for place, counts_here in zip(places, trained, strict=True):
        counts[place] += counts_here
    weights = [1.0 / counts[place] if here else 0.0 for place, here in zip(places, trained, strict=True)]
    return weights, counts
