"""What the demo finds in the log of a training run; the lines have the form in which Ray, verl and Hydra print them."""

import pytest

from verl_oppo.demo.child_log import clean_line, errors, last_words, total_steps

DRIVER_FAILURE = """\
\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m INFO:2026-01-01 00:00:00,000:Total training steps: 40
\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m RuntimeError: mentioned in passing, no traceback
Error executing job with overrides: ['trainer.v1.oppo.inter_step.window=1']
Traceback (most recent call last):
  File "main_ppo.py", line 1, in main
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=12, ip=127.0.0.1)
  File "schema.py", line 1, in __post_init__
ValueError: trainer.v1.oppo.inter_step.window=1: expected 2 or more
""".splitlines()


def test_the_error_of_an_actor_is_found_behind_its_wrapper():
    assert errors(DRIVER_FAILURE) == ("ValueError: trainer.v1.oppo.inter_step.window=1: expected 2 or more",)


def test_the_first_and_the_last_error_are_both_named_when_they_differ():
    log = [
        "(WorkerDict pid=5, ip=10.0.0.1) Traceback (most recent call last):",
        "(WorkerDict pid=5, ip=10.0.0.1) torch.OutOfMemoryError: too large",
        "Traceback (most recent call last):",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    ]
    assert errors(log) == (
        "torch.OutOfMemoryError: too large",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    )


def test_a_wrong_override_is_an_error_without_a_traceback():
    log = ["Could not override 'trainer.nonsense'.", "To append to your config use +trainer.nonsense=1"]
    assert errors(log) == ("Could not override 'trainer.nonsense'.",)


def test_no_error_is_made_up():
    assert errors(["all fine", "ValueError: quoted in a message"]) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(TaskRunnerV1 pid=1) INFO:x:Total training steps: 40", 40),
        ("Training Progress:   5%|5         | 2/60 [00:06<02:54,  3.00s/it]", 60),
        ("loading", None),
    ],
)
def test_the_number_of_steps_is_what_verl_announced(text, expected):
    assert total_steps(text) == expected


def test_a_line_is_shown_without_colours_prefix_and_earlier_states_of_a_bar():
    assert clean_line("\x1b[36m(A pid=1)\x1b[0m   0%| | 0/2\r 50%|#| 1/2") == " 50%|#| 1/2"
    assert clean_line("\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m hello\n") == "hello"


def test_last_words_skip_empty_lines_and_are_cut():
    assert last_words(["one", "(A pid=1) two", "", "(A pid=1) "]) == "two"
    assert last_words(["x" * 200], width=10) == "xxxxxxx..."
    assert last_words([]) == ""
