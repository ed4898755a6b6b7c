"""Puts a report together: PNG files and one self-contained HTML page with the same pictures in it.

Called by `python -m verl_oppo.report` and by the benchmark.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from verl_oppo.report import plots
from verl_oppo.report.content import by_arm, missing_metrics, table_rows, words
from verl_oppo.report.metrics_file import RunFiles, read_run
from verl_oppo.report.timeline import timeline

PAGE = "report.html"
DPI = 110
MAX_NAMES, MAX_TIMELINES = 4, 8
SECTIONS = (
    ("breakdown", "Where a step's time goes", plots.breakdown),
    ("reward", "Reward", plots.reward),
    ("overcommit", "Overcommit degree Δ and the slope of the reward", plots.overcommit),
    ("chunks", "Chunks", plots.chunks),
    ("ages", "Deferred prompts", plots.ages),
    ("lengths", "Response lengths", plots.lengths),
    ("staleness", "Staleness", plots.staleness),
)
STYLE = """
body { font-family: sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; } table { border-collapse: collapse; font-size: 85%; }
th, td { border: 1px solid #ccc; padding: 0.25em 0.5em; text-align: right; } td:first-child { text-align: left; }
.emulated { color: #a00000; font-weight: bold; } .lacking { color: #666; font-size: 90%; }
"""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes `report.html` and the PNGs into `out` and returns the page's path.

    Raises:
        ValueError: no folder is named, or one does not exist.
    """
    if not folders:
        raise ValueError("no run is named; allowed: one folder or more")
    runs = [read_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    arms = list(by_arm(runs))
    body = [f"<h1>{html.escape(', '.join(arms[:MAX_NAMES]) + (', ...' if len(arms) > MAX_NAMES else ''))}</h1>"]
    if any(run.is_emulated for run in runs):
        body.append('<p class="emulated">Times are those of EMULATED accelerators (emulate=on), not of a machine.</p>')
    body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in words(runs)]
    body.append(_table(runs))
    body += _pictures(runs, out)
    body += _remarks(runs)
    page = out / PAGE
    page.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>OPPO report</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    return page


def unique_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder; those that share a last part get a number."""
    names: list[str] = []
    for folder in folders:
        stem = (folder.parent if folder.is_file() else folder).resolve().name
        name, number = stem, 2
        while name in names:
            name, number = f"{stem} ({number})", number + 1
        names.append(name)
    return names


def _table(runs: Sequence[RunFiles]) -> str:
    header, rows = table_rows(runs)
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>", "<p>Medians without the first two steps; seconds where no unit is said.</p>"])


def _pictures(runs: Sequence[RunFiles], out: Path) -> list[str]:
    body = ["<h2>A step at a glance</h2>"]
    shown = [repeats[0] for repeats in by_arm(runs).values()][:MAX_TIMELINES]
    for run in shown:
        body.append(_picture(timeline(run), out / f"timeline-{_file_name(run.name)}.png", f"{run.name}: a step"))
    if len(shown) < len(runs):
        body.append(f"<p>{len(shown)} of {len(runs)} runs, one an arm; name a run alone to see its own.</p>")
    for name, title, draw in SECTIONS:
        body += [f"<h2>{html.escape(title)}</h2>", _picture(draw(runs), out / f"{name}.png", title)]
    return body


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _picture(figure: Figure | None, path: Path, title: str) -> str:
    if figure is None:
        path.unlink(missing_ok=True)
        return f'<p class="lacking">{html.escape(title)}: no run has what this picture needs.</p>'
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,{data}"></p>'


def _remarks(runs: Sequence[RunFiles]) -> list[str]:
    """What each run lacks, and what of its files could not be read."""
    body = ["<h2>What the runs lack</h2>"]
    for run in runs:
        lines = [*run.remarks]
        if run.steps:
            lines += [f"for {picture}: {', '.join(keys)}" for picture, keys in missing_metrics(run).items()]
            if not run.spans:
                lines.append("no spans.jsonl: the timeline has no scorer calls and no single responses")
        listed = "".join(f"<li>{html.escape(line)}</li>" for line in lines) or "<li>nothing</li>"
        body.append(f'<p>{html.escape(run.name)}</p><ul class="lacking">{listed}</ul>')
    return body
