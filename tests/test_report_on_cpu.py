"""The report on good, empty, broken and half-written files, of OPPO and of stock verl, and what it says is lacking."""

import base64
import json
from html.parser import HTMLParser

import pytest

from verl_oppo.report.__main__ import main
from verl_oppo.report.content import carries_prompts, missing_metrics, phases, typical_step, words
from verl_oppo.report.metrics_file import read_lines, read_run

PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br"}


def step_data(step, oppo=True, emulated=False):
    data = {
        "timing_s/step": 6.0 + step,
        "timing_s/gen": 3.0,
        "timing_s/old_log_prob": 0.2,
        "timing_s/ref": 0.2,
        "timing_s/values": 0.2,
        "timing_s/adv": 0.1,
        "timing_s/update_critic": 0.5,
        "timing_s/update_actor": 0.5,
        "timing_s/update_weights": 0.5,
        "response_length/mean": 20.0,
        "response_length/max": 60.0,
        "response_length/min": 5.0,
        "prompt_length/mean": 10.0,
        "perf/total_num_tokens": 480.0,
        "critic/score/mean": 0.4 + 0.01 * step,
    }
    if oppo:
        data |= {
            "oppo/overcommit/delta": 4.0,
            "oppo/overcommit/slope": 0.01,
            "oppo/chunk/size": 16,
            "oppo/chunk/num": 30,
            "oppo/overlap/cached_token_ratio": 0.8,
            "oppo/overlap/hidden_ratio": 0.9,
            "oppo/overlap/reward_exposed_s": 0.1,
            "oppo/deferred/num": 4,
            "oppo/deferred/age_mean": 1.0,
            "oppo/deferred/age_max": 2,
            "oppo/staleness/stale_token_ratio": 0.2,
        }
    return data | ({"oppo/emulated": 1.0} if emulated else {})


def write_run(folder, steps=6, oppo=True, emulated=False, traces=True):
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "data": step_data(step, oppo, emulated)}) + "\n")
    if traces:
        with (folder / "spans.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                at = 100.0 * step
                spans = [["prefill", at + 1.0, at + 1.4], ["score", at + 2.9, at + 3.0]] if oppo else []
                scorers = {"reward": spans} if oppo else {}
                file.write(json.dumps({"step": step, "sample": [at, at + 3.0], "scorers": scorers}) + "\n")
        with (folder / "rollouts.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                for row in range(8):
                    started = 100.0 * step + 0.1
                    file.write(json.dumps({"length": 20 + row, "started": started, "ended": started + row / 2}) + "\n")
    return folder


class Page(HTMLParser):
    """Every tag is closed, in order; keeps texts and images."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.images = [], "", []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(tmp_path, *folders):
    out = tmp_path / "out"
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return Page((out / "report.html").read_text()), sorted(path.name for path in out.glob("*.png"))


def test_a_page_of_two_runs_holds_its_pictures_and_needs_no_other_file(tmp_path):
    oppo = write_run(tmp_path / "oppo <b>&", emulated=True)
    sync = write_run(tmp_path / "sync", oppo=False)
    page, pngs = report(tmp_path, oppo, sync)
    assert len(pngs) == 9 and len(page.images) == 9
    for image in page.images:
        head, _, data = image["src"].partition(",")
        assert head == "data:image/png;base64" and base64.b64decode(data).startswith(PNG)
    assert "EMULATED" in page.text and "some are not: do not compare" in page.text
    assert "oppo <b>&: 6 steps" in page.text


def test_repeats_of_an_arm_are_compared_together(tmp_path):
    for name, arm, steps in (("a", "sync", 6), ("b", "oppo", 4), ("c", "sync", 6), ("d", "oppo", 4)):
        folder = write_run(tmp_path / name, steps=steps)
        (folder / "run.json").write_text(json.dumps({"arm": arm}))
    page, pngs = report(tmp_path, *(tmp_path / name for name in "abcd"))
    assert [png for png in pngs if png.startswith("timeline")] == ["timeline-a.png", "timeline-b.png"]
    # Steps 3 to 4 of oppo take 9 and 10 s, 3 to 6 of sync 9 to 12 s.
    assert "oppo has the shortest step (median without warm-up): 0.90 of sync's." in page.text
    assert "Repeats (2 of sync, 2 of oppo)" in page.text
    assert "2 of 4 runs, one an arm" in page.text


@pytest.mark.parametrize("record", [b"", b"[]", b'{"arm": 3}', b'{"arm": ""}', b"\xff"])
def test_a_run_without_a_readable_arm_is_its_own(tmp_path, record):
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "run.json").write_bytes(record)
    assert read_run(folder).arm == "run"


def test_a_stock_run_says_what_it_lacks(tmp_path):
    page, _ = report(tmp_path, write_run(tmp_path / "sync", oppo=False, traces=False))
    assert "for staleness: oppo/staleness/stale_token_ratio" in page.text
    assert "no spans.jsonl" in page.text
    assert "Staleness: no run has what this picture needs." in page.text


def test_an_empty_file_and_a_folder_without_one(tmp_path):
    for name in ("empty", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    page, pngs = report(tmp_path, tmp_path / "empty", tmp_path / "none")
    assert pngs == []
    assert "metrics.jsonl is empty" in page.text and "metrics.jsonl does not exist" in page.text
    assert "empty: no training step was recorded yet." in page.text


BROKEN = [
    b"not json\n",
    b'{"step": 3}\n',
    b"[1, 2]\n",
    b'{"step": "x", "data": {}}\n',
    b'{"step": 9, "data": {"timing_s/step": "slow"}}\n',
    b'{"step": 9, "data": {"timing_s/step": NaN}}\n',
    b"\xff\xfe\x00\n",
    b"\n\n",
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_costs_only_itself(tmp_path, line):
    folder = write_run(tmp_path / "run", steps=3)
    good = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(line + good)
    assert [step for step, _ in read_run(folder).steps] == [1, 2, 3]


def test_a_file_cut_at_any_byte_gives_the_steps_before(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, traces=False)
    whole = (folder / "metrics.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(0, len(whole), 97):
        (folder / "metrics.jsonl").write_bytes(whole[:cut])
        run = read_run(folder)
        assert len(run.steps) == int(cut >= first)
        assert any("half written" in remark for remark in run.remarks) == (cut not in (0, first))


def test_broken_and_half_written_files_give_a_page_that_says_so(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'nonsense\n{"step": 4, "data": {"timing_s/st')
    with (folder / "spans.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "sample": [1], "scorers": {}}\n{"step"')
    page, pngs = report(tmp_path, folder)
    assert "1 line of metrics.jsonl could not be read" in page.text
    assert "the last line of metrics.jsonl is half written" in page.text
    assert "1 line of spans.jsonl could not be read" in page.text
    assert "timeline-run.png" in pngs


def test_a_resumed_run_repeats_steps_and_the_last_record_counts(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "data": step_data(2) | {"critic/score/mean": 0.9}}) + "\n")
    assert read_run(folder).series("critic/score/mean") == ([1, 2, 3], pytest.approx([0.41, 0.9, 0.43]))


def test_a_run_that_does_not_exist_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_what_the_page_is_made_of(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert missing_metrics(run) == {}
    assert carries_prompts(run)
    assert typical_step(run) == 5
    assert phases(run, 5)[:2] == [("wait for generation", 0.0, 3.0), ("log-probs", 3.0, 3.2)]
    (sentence,) = words([run])
    assert "6 steps; a step takes 10.50 s" in sentence and "Δ was 4 to 4 prompts; 20 %" in sentence


def test_lines_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b'{"a": 1}\n[]\n{"b"')
    lines = read_lines(tmp_path / "a")
    assert (lines.objects, lines.broken, lines.is_half_written) == ([{"a": 1}], 1, True)
    assert read_lines(tmp_path / "b").is_missing
