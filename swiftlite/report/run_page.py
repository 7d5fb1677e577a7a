"""Make run_report.html, the page of a run. It shows the acceptance of the heads, training, rows and the environment."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import describe
from swiftlite.acceptance.thumbnails import read_thumbnail
from swiftlite.args.command_line import command_line, shell_line
from swiftlite.args.docs import options
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import clip
from swiftlite.methods.index import command_of_run
from swiftlite.report.figure import Bars, Line, draw_bars, draw_lines, draw_stacks, number, share
from swiftlite.report.metrics import LOST_SECONDS, NUM_RESTARTS, REPEATED_STEPS, curve, decisions_in, restarts_in
from swiftlite.report.page import Figure, MarkedAnswer, Page, Section, Table, Tile, render
from swiftlite.report.run_files import RunFiles, read_run
from swiftlite.runtime.decisions import DECISION

PAGE_FILE = "run_report.html"
WHENS = ("after", "before")
"""Names of the two measurements (after and before training), in order of importance."""
PARTS_OF_TIME = ("data", "forward", "backward", "optimizer", "checkpoint")
"""Names of the measured times in metrics.jsonl, after `time/`."""
MAX_BAD_ROWS = 50
MAX_OPERATOR = 120
"""Maximum number of characters of the name of a kernel."""
MAX_PROMPT = 200
"""Maximum number of characters of the prompt of a rollout."""
MAX_COMPLETION = 1500
"""Maximum number of characters of a rollout without marked tokens."""
MAX_TOKENS = 400
"""Maximum number of tokens of a rollout."""
ELLIPSIS = "…"


def write_run_page(directory: Path, path: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        path: path of the page; default: next to run_report.json.

    Returns:
        The path of the page.
    """
    path = path or directory / PAGE_FILE
    atomic_write(path, render(run_page(read_run(directory))))
    return path


def run_page(run: RunFiles) -> Page:
    """Return the page of one run."""
    sections = [
        _acceptance_section(run),
        _answers_section(run),
        _rollouts_section(run),
        _training_section(run),
        _profile_section(run),
        _rows_section(run),
        _run_section(run),
    ]
    filled = [section for section in sections if section is not None]
    return Page(f"Run: {run.name}", lead(run), list(tiles(run)), filled)


def lead(run: RunFiles) -> str:
    """Return the main result in one or two sentences."""
    state = ""
    if not run.report:
        state = f" This run is not finished: {run.last_step} steps are complete."
    before = run.generated("before").get("acceptance_rate")
    after = run.generated("after").get("acceptance_rate")
    if after is not None and before is not None:
        return f"{_ACCEPTED} is {share(after)} after training and {share(before)} before.{state}"
    if before is not None:
        return f"{_ACCEPTED} is {share(before)} before training.{state}"
    if after is not None:
        return f"{_ACCEPTED} is {share(after)} after training.{state}"
    return f"Acceptance of drafts was not measured in this run.{state}"


_ACCEPTED = "The share of accepted draft tokens on held-out prompts"


def tiles(run: RunFiles) -> Iterator[Tile]:
    """Yield the main figures."""
    before, after = run.generated("before"), run.generated("after")
    if before or after:
        yield Tile("drafts accepted", _change(before, after, "acceptance_rate", share), _accepted(after or before))
        yield Tile("tokens per step", _change(before, after, "mean_accepted_length", lambda value: f"{value:.2f}"))
    for name, counts in run.acceptance.get("engines", {}).items():
        yield Tile(f"accepted in {describe(name)}", share(counts["acceptance_rate"]), _accepted(counts))
    for name, title in (("eval_reward", "held-out reward"), ("eval_loss", "held-out loss"), ("loss", "training loss")):
        value = run.last(name)
        if value is not None:
            yield Tile(title, number(value))
            break
    speeds = sorted(value for _, value in curve(run.metrics, "tokens_per_second"))
    if speeds:
        yield Tile("training speed", f"{number(speeds[len(speeds) // 2])} tokens/s", "median of the logged steps")
    if "seconds" in run.report:
        yield Tile("time", _duration(run.report["seconds"]), _measured_steps(run))


def _measured_steps(run: RunFiles) -> str:
    """Return which steps the times of run_report.json belong to: those since the run was last resumed."""
    steps, first = run.report["steps"], run.report.get("resumed_from", 0)
    if first:
        return f"steps {first + 1} to {steps}, since the run resumed"
    return f"{steps} steps"


def _change(before: dict[str, Any], after: dict[str, Any], name: str, show: Any) -> str:
    shown = [show(counts[name]) for counts in (before, after) if counts]
    return " → ".join(shown)


def _accepted(counts: dict[str, Any]) -> str:
    return f"{counts['accepted']} of {counts['drafted']} drafted tokens, {counts['prompts']} prompts"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"


def _acceptance_section(run: RunFiles) -> Section | None:
    figures: list[Figure] = []
    held_out = held_out_agreement(run)
    if held_out:
        figures.append(
            draw_lines("acceptance", "Agreement on held-out rows", held_out, x="step", y="agreement", is_share=True)
        )
    training = lines_of(run, r"mtp_(\d+)_acceptance", "depth {}")
    if training:
        title = "Agreement on training rows"
        figures.append(draw_lines("agreement", title, training, x="step", y="agreement", is_share=True))
    measured = {when: run.generated(when) for when in WHENS if run.generated(when)}
    measured |= {describe(name): counts for name, counts in run.acceptance.get("engines", {}).items()}
    if measured:
        figures.append(position_bars(measured))
    if channels := _channel_bars(run):
        figures.append(channels)
    if not figures:
        return None
    text = (
        "Agreement is the share of labels where a head predicts the same token as its trunk. Accepted drafts are "
        "counted as in engines, along greedy answers to held-out prompts: a draft counts if all previous ones in its "
        "step were accepted."
    )
    return Section("Acceptance", text, figures=figures)


def held_out_agreement(run: RunFiles) -> list[Line]:
    """Return the share of held-out labels where a head predicts the same token as the trunk, by depth.

    The evaluations during training are in metrics.jsonl, the evaluation before the first step is in acceptance.json.
    """
    before = run.acceptance.get("before", {}).get("teacher_forced", {}).get("acceptance_per_depth", [])
    lines = []
    for line in lines_of(run, r"eval_mtp_(\d+)_acceptance", "{}"):
        depth = int(line.name)
        points = list(line.points)
        if depth <= len(before):
            points.insert(0, (0, before[depth - 1]))
        lines.append(Line(f"depth {depth}", points))
    return lines


def position_bars(measured: dict[str, dict[str, Any]]) -> Figure:
    """Draw the acceptance by draft position, with a bar for each key of `measured`."""
    depth = max(len(counts["acceptance_per_position"]) for counts in measured.values())
    bars = []
    for name, counts in measured.items():
        rates = counts["acceptance_per_position"]
        bars.append(Bars(name, [*rates, *[None] * (depth - len(rates))]))
    groups = [f"draft {position + 1}" for position in range(depth)]
    return draw_bars("positions", "Accepted by position", groups, bars, what="position", y="accepted")


def _channel_bars(run: RunFiles) -> Figure | None:
    found = {when: run.acceptance.get(when, {}).get("generated_by_channel", {}) for when in WHENS}
    found = {when: channels for when, channels in found.items() if channels}
    if not found:
        return None
    names = sorted(set().union(*found.values()))
    bars = []
    for when, channels in found.items():
        rates = [channels.get(name, {}).get("acceptance_rate") for name in names]
        bars.append(Bars(when, rates))
    return draw_bars("channels", "Accepted by channel", names, bars, what="channel", y="accepted")


def _answers_section(run: RunFiles) -> Section | None:
    after, before = run.answers.get("after", []), run.answers.get("before", [])
    if not (after or before):
        return None
    answers = []
    for place, answer in enumerate(after or before):
        earlier = []
        if after and place < len(before):
            earlier = before[place]["tokens"]
        images = [read_thumbnail(stored) for stored in answer.get("images", [])]
        note = _drafted(answer["tokens"])
        answers.append(MarkedAnswer(answer["prompt"], answer["channel"], note, answer["tokens"], earlier, images))
    when = "before"
    if after:
        when = "after"
    text = f"Greedy answers to held-out prompts {when} training, with accepted and rejected draft tokens marked."
    return Section("Draft tokens in answers", text, answers=answers)


def _drafted(tokens: Sequence[dict[str, Any]]) -> str:
    drafted = sum(token["depth"] > 0 for token in tokens)
    refused = sum("refused" in token for token in tokens)
    return f"{drafted} of {len(tokens)} tokens are accepted drafts; rejected drafts: {refused}"


def _rollouts_section(run: RunFiles) -> Section | None:
    """Return the completions of a run with rollouts, with their rewards if it has any; None for other runs."""
    rewards = [*lines_of(run, "reward", "all functions"), *lines_of(run, r"rewards/(.+)/mean", "{}")]
    rewards += lines_of(run, "eval_reward", "all functions, held out")
    rewards += lines_of(run, r"eval_rewards/(.+)/mean", "{}, held out")
    accepted = lines_of(run, r"rollout/acceptance_(\d+)", "position {}")
    accepted += lines_of(run, r"rollout/acceptance_(\d+)_after_tool", "position {}, after a tool")
    accepted += lines_of(run, r"eval_rollout/acceptance_(\d+)", "position {}, held out")
    lengths = lines_of(run, "completions/mean_length", "mean")
    lengths += lines_of(run, "eval_completions/mean_length", "mean, held out")
    divergences = [*lines_of(run, "teacher_kl", "training"), *lines_of(run, "eval_teacher_kl", "held out")]
    drawn = [
        ("reward", "Mean reward", rewards, "reward"),
        ("rollout_acceptance", "Drafting steps in which the token was accepted", accepted, "share"),
        ("teacher_kl", "KL divergence from the teacher", divergences, "nats per token"),
        ("entropy", "Entropy of the policy", lines_of(run, "entropy", "entropy"), "nats per token"),
        ("length", "Length of completions", lengths, "tokens"),
        ("rollout_speed", "Speed of rollouts", lines_of(run, "rollout/tokens_per_second", "tokens/s"), "tokens/s"),
    ]
    figures = [draw_lines(name, title, lines, x="step", y=y) for name, title, lines, y in drawn if lines]
    if not figures:
        return None
    completions = [_completion(line, has_rewards=bool(rewards)) for line in run.rollouts]
    text = ""
    if completions:
        text = "Below the figures: completions of the last generation"
        text += ", with accepted draft tokens marked." if any(map(_is_marked, run.rollouts)) else "."
    return Section("Rollouts", text, figures=figures, answers=completions)


def _completion(line: dict[str, Any], *, has_rewards: bool) -> MarkedAnswer:
    """Return a completion with its rewards, given its line in `rollouts/`."""
    notes = []
    if has_rewards:
        scores = ["not scored" if score is None else number(score) for score in line["scores"]]
        notes = [f"rewards: {', '.join(scores)}", f"advantage: {number(line['advantage'])}"]
    tokens = [{"text": shorten(line["completion"], MAX_COMPLETION), "depth": 0}]
    if _is_marked(line):
        tokens = line["tokens"]
        accepted = sum(token["depth"] > 0 for token in tokens)
        generated = sum(token["depth"] >= 0 for token in tokens)  # the others are those of tools
        notes.append(f"{accepted} of {generated} tokens are accepted drafts")
        if len(tokens) > MAX_TOKENS:
            tokens = [{"text": ELLIPSIS, "depth": 0}, *tokens[-MAX_TOKENS:]]
    return MarkedAnswer(shorten(line["prompt"], MAX_PROMPT), "", " · ".join(notes), tokens)


def _is_marked(line: dict[str, Any]) -> bool:
    """Return whether a completion has accepted drafts. Without `tokens`, the engine did not report them."""
    return any(token["depth"] > 0 for token in line.get("tokens", ()))


def shorten(text: str, maximum: int) -> str:
    """Return the end of a text."""
    if len(text) <= maximum:
        return text
    return ELLIPSIS + text[-maximum:]


def _training_section(run: RunFiles) -> Section | None:
    trunk = [*lines_of(run, "loss", "training"), *lines_of(run, "eval_loss", "held out")]
    heads = lines_of(run, r"mtp_(\d+)_loss", "depth {}")
    heads += lines_of(run, r"eval_mtp_(\d+)_loss", "depth {}, held out")
    norms = [*lines_of(run, "grad_norm", "gradient norm"), *lines_of(run, "mtp_grad_norm", "of the heads")]
    rewards = lines_of(run, r"rewards/(chosen|rejected)", "{}")
    rewards += lines_of(run, r"eval_rewards/(chosen|rejected)", "{}, held out")
    accuracies = [
        *lines_of(run, "rewards/accuracies", "training"),
        *lines_of(run, "eval_rewards/accuracies", "held out"),
    ]
    ranks = lines_of(run, "time/(fastest|slowest)", "{}")
    drawn = [
        ("loss", "Loss of the trunk", trunk, "loss"),
        ("rewards", "Rewards of both answers", rewards, "reward"),
        ("accuracies", "Pairs whose preferred answer has the higher reward", accuracies, "share"),
        ("heads", "Loss of the heads", heads, "loss"),
        ("norm", "Gradient norm", norms, "norm"),
        ("rate", "Learning rate", lines_of(run, "learning_rate", "learning rate"), "learning rate"),
        ("speed", "Speed", lines_of(run, "tokens_per_second", "tokens/s"), "tokens/s"),
        ("ranks", "Work of the fastest and of the slowest rank", ranks, "seconds"),
        ("memory", "Peak memory of the first rank", lines_of(run, "peak_memory_gb", "GB"), "GB"),
    ]
    figures = [draw_lines(name, title, lines, x="step", y=y) for name, title, lines, y in drawn if lines]
    if times := _layers_of_time(run):
        figures.append(draw_stacks("time", "Time of a step on the first rank", times, x="step", y="seconds"))
    if not figures:
        return None
    tables = []
    if totals := run.report.get("times"):
        rows = [[name, number(seconds)] for name, seconds in totals.items()]
        tables.append(Table(f"Time on the first rank, {_measured_steps(run)}", ["part", "seconds"], rows))
    if restarts := restarts_in(run.metrics):
        rows = []
        for line in restarts:
            rows.append([number(line[name]) for name in ("step", LOST_SECONDS, REPEATED_STEPS, NUM_RESTARTS)])
        names = ["last step before it", "seconds lost", "steps computed twice", "restarts so far"]
        tables.append(Table("Failures that the run was restarted after", names, rows))
    if decisions := decisions_in(run.metrics):
        tables.append(_decision_table(decisions))
    return Section("Training", figures=figures, tables=tables)


def _decision_table(decisions: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for line in decisions:
        details = {name: value for name, value in line.items() if name not in ("step", "fault", DECISION)}
        text = ", ".join(f"{name} {value}" for name, value in details.items())
        rows.append([number(line["step"]), str(line.get("fault")), str(line[DECISION]), text])
    return Table("Faults, and what was decided after them", ["after step", "fault", "decision", "details"], rows)


def _layers_of_time(run: RunFiles) -> list[Line]:
    """Return the parts of the time of each step; `other` is the rest. Checkpoints are added to the step after them."""
    steps = curve(run.metrics, "time/step")
    if not steps:
        return []
    layers, rest = [], dict(steps)
    for part in PARTS_OF_TIME:
        seconds = dict(curve(run.metrics, f"time/{part}"))
        layers.append(Line(part, [(step, seconds.get(step, 0.0)) for step in rest]))
        if part != "checkpoint":
            rest = {step: left - seconds.get(step, 0.0) for step, left in rest.items()}
    return [*layers, Line("other", list(rest.items()))]


def _profile_section(run: RunFiles) -> Section | None:
    if not run.profiles:
        return None
    tables = []
    for profile in run.profiles:
        what = "Slowest kernels" if profile["device"] == "cuda" else "Slowest operators"
        first, last = profile["steps"]
        rows = []
        for each in profile["operators"]:
            name = clip(each["name"], MAX_OPERATOR)
            rows.append([name, number(each["calls"]), number(each["milliseconds"]), share(each["share"])])
        title = f"{what} of rank {profile['rank']} in steps {first} to {last}"
        tables.append(Table(title, ["name", "calls", "ms", "share"], rows))
    text = (
        "The time of an operator is its own, without that of other operators that it calls. The traces in the folder "
        "profile/ can be opened at https://ui.perfetto.dev."
    )
    return Section("Profile", text, tables=tables)


def lines_of(run: RunFiles, pattern: str, name: str) -> list[Line]:
    """Return a line for each metric whose name matches the regular expression `pattern`.

    The line's name is `name`, filled with the groups of the match.
    """
    names = sorted(set().union(*run.metrics))
    lines = []
    for metric in names:
        found = re.fullmatch(pattern, metric)
        if found and (points := curve(run.metrics, metric)):
            lines.append(Line(name.format(*found.groups()), points))
    return lines


def _rows_section(run: RunFiles) -> Section | None:
    data = run.report.get("data")
    if not data:
        return None
    files = {"all files": data["total"]} | data["files"]
    columns = ["file", *(name.replace("_", " ") for name in data["total"])]
    rows = [[name, *map(number, counts.values())] for name, counts in files.items()]
    tables = [Table("Rows by file", columns, rows)]
    if notes := [[note] for note in data["notes"]]:
        tables.append(Table("Notes", ["note"], notes))
    if bad := data["bad_rows"]:
        shown = [[row] for row in bad[:MAX_BAD_ROWS]]
        title = "Malformed rows"
        if len(shown) < len(bad):
            title += f": {len(shown)} of {len(bad)}; the others are in run_report.json"
        tables.append(Table(title, ["location and problem"], shown))
    text = f"{data['train_samples']} training samples, {data['val_samples']} held out."
    return Section("Rows", text, tables=tables)


def _run_section(run: RunFiles) -> Section:
    tables = []
    for title, name in (("Layout", "layout"), ("Kernels", "kernels"), ("Versions", "versions"), ("Machine", "machine")):
        values = run.report.get(name)
        if values:
            tables.append(Table(title, ["what", "value"], [[key, _cell(value)] for key, value in values.items()]))
    if weights := run.report.get("weights"):
        rows = [["loaded", number(weights["loaded"])]]
        initialized = weights.get("initialized", weights.get("initialised", {}))  # the key of earlier releases
        for how, count in Counter(initialized.values()).items():
            rows.append([f"initialized, {how}", number(count)])
        rows.append(["dropped", number(len(weights["dropped"]))])
        tables.append(Table("Tensors at the start; run_report.json has their names", ["from", "tensors"], rows))
    if tensors := run.report.get("tensors"):
        rows = [[name.replace("_", " "), _cell(value)] for name, value in tensors.items()]
        tables.append(Table("Changed and unchanged tensors", ["what", "value"], rows))
    method = command_of_run(run.options)
    known = options(method.args_class)
    changed = {name: value for name, value in run.options.items() if name in known and value != known[name].default}
    if changed:
        rows = [[f"--{name}", shell_line(value)] for name, value in changed.items()]
        tables.append(Table("Options that differ from the defaults", ["option", "value"], rows))
    commands = []
    if run.options:
        commands.append(command_line(method.words, method.args_class, run.options))
    return Section("Environment", commands=commands, tables=tables)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return number(value)
    return str(value)
