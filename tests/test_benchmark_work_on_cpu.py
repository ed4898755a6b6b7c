"""Length lists, the data set that carries them, and what the agent loop asks vLLM for."""

import statistics

import pyarrow
import pyarrow.parquet
import pytest

from verl_oppo.benchmark.agent_loop import NEVER, length_of, replay_parameters
from verl_oppo.benchmark.work import LengthList, write_work

LONG_TAIL = LengthList("long_tail", minimum=4, median=32, maximum=320, sigma=1.2)


def test_a_long_tail_is_the_stated_distribution():
    drawn = LONG_TAIL.draw(20000, seed=3)
    assert min(drawn) >= 4 and max(drawn) == 320
    assert statistics.median(drawn) == pytest.approx(32, abs=1)
    # P(X > 320) of a log-normal: P(Z > ln(10) / 1.2) = P(Z > 1.919) = 0.0275
    assert sum(length == 320 for length in drawn) / len(drawn) == pytest.approx(0.0275, abs=0.005)


def test_equal_seeds_give_equal_lists_and_others_differ():
    assert LONG_TAIL.draw(50, seed=1) == LONG_TAIL.draw(50, seed=1)
    assert LONG_TAIL.draw(50, seed=1) != LONG_TAIL.draw(50, seed=2)


def test_uniform_and_constant_lists():
    uniform = LengthList("uniform", minimum=2, median=4, maximum=6).draw(2000, seed=1)
    assert set(uniform) == {2, 3, 4, 5, 6}
    assert set(LengthList("constant", minimum=9, median=9, maximum=9).draw(5, seed=1)) == {9}


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "bimodal", "minimum": 1, "median": 2, "maximum": 3},
        {"kind": "constant", "minimum": 0, "median": 2, "maximum": 3},
        {"kind": "uniform", "minimum": 3, "median": 2, "maximum": 3},
        {"kind": "long_tail", "minimum": 1, "median": 2, "maximum": 3, "sigma": -1.0},
    ],
)
def test_a_list_that_cannot_be_is_refused(values):
    with pytest.raises(ValueError, match="allowed"):
        LengthList(**values)


def test_a_row_carries_its_length_and_prompts_repeat(tmp_path):
    prompts = [{"prompt": [{"role": "user", "content": text}], "extra_info": {"topic": text}} for text in ("a", "b")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(prompts), tmp_path / "prompts.parquet")
    write_work(tmp_path / "prompts.parquet", [5, 6, 7], tmp_path / "work.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "work.parquet").to_pylist()
    assert [length_of(row) for row in rows] == [5, 6, 7]
    assert [row["extra_info"]["topic"] for row in rows] == ["a", "b", "a"]


@pytest.mark.parametrize("fields", [{}, {"extra_info": None}, {"extra_info": {"response_length": 0}}])
def test_a_prompt_without_a_length_is_refused(fields):
    with pytest.raises(ValueError, match="response_length"):
        length_of(fields)


def test_vllm_is_asked_for_exactly_the_length():
    from vllm.sampling_params import SamplingParams

    asked = {"temperature": 1.0, "top_p": 1.0}
    parameters = replay_parameters(asked, length=17, end_token=2)
    assert asked == {"temperature": 1.0, "top_p": 1.0}
    made = SamplingParams(**parameters)
    assert (made.max_tokens, made.ignore_eos, made.logit_bias) == (17, True, {2: NEVER})
    # A carried response goes on with what is left of its budget: nothing else bounds it from below.
    assert SamplingParams(**parameters | {"max_tokens": 1}).min_tokens == 0
