"""The report of a scripted run: console, page, summary, plan, CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from outrider.bench.judgement import Judgement, judge
from outrider.bench.plan import Plan, make_plan
from outrider.bench.records import (
    ClientProof,
    Load,
    LoadKind,
    MetricsSnapshot,
    RunData,
    SpeculativeCounts,
)
from outrider.bench.reference import base_method, published_figures
from outrider.errors import FailureError
from outrider.report.charts import charts
from outrider.report.console import console_report
from outrider.report.files import write_report
from outrider.report.page import page
from outrider.report.summary import SCHEMA_VERSION, requests_csv, summary, summary_text
from outrider.report.tables import (
    acceptance_table,
    category_table,
    conditions_tables,
    contrast_table,
    latency_table,
    power_table,
    published_table,
    run_table,
    verdict_table,
)
from tests.scripted import ScriptedArm, change_blocks, change_requests, counters, scripted_run

LOADS = [Load(LoadKind.CLOSED, n) for n in (1, 2, 4, 8)]
VOID_ELEMENTS = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect"}


def with_counters(data: RunData) -> RunData:
    """Acceptance by position and step times, as a server of ours exposes them."""

    def scraped(block):
        if block.arm == "off":
            return block
        before = counters(0, 0, 0, 0, 0, 0)
        after = counters(1, 100, 400, 95, 60, 35)
        parts = {'outrider_step_seconds_total{part="draft"}': 1.0,
                 'outrider_step_seconds_total{part="verify"}': 3.0}  # fmt: skip
        zero = dict.fromkeys(parts, 0.0)
        return replace(
            block,
            metrics_before=MetricsSnapshot(0, {**before.samples, **zero}),
            metrics_after=MetricsSnapshot(1, {**after.samples, **parts}),
        )

    return change_blocks(data, scraped)


def small() -> RunData:
    """Two arms, one user, no server that exposes counters."""
    fast = ScriptedArm("eagle3", 0.014, tokens_per_step=2, ttft_s=0.045)
    return scripted_run([ScriptedArm("off", 0.010), fast], num_prompts=4)


@pytest.fixture(scope="module")
def judgement() -> Judgement:
    arms = [
        ScriptedArm("off", 0.010, slowdown=lambda users: 1 + 0.02 * users),
        ScriptedArm("ngram", 0.0175, tokens_per_step=2, ttft_s=0.045,
                    slowdown=lambda users: 1 + 0.03 * users),
        ScriptedArm("eagle3", 0.014, tokens_per_step=2, ttft_s=0.045,
                    slowdown=lambda users: 1 + 0.03 * users),
    ]  # fmt: skip
    data = with_counters(scripted_run(arms, LOADS, num_prompts=8))
    odd = replace(data.run.workload, source="[red]my<b>set</b>.jsonl")
    return judge(replace(data, run=replace(data.run, workload=odd)))


@pytest.fixture(scope="module")
def html(judgement: Judgement) -> str:
    return page(judgement)


class Elements(HTMLParser):
    """Every element's name and attributes, and whether all were closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.is_nested = True
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID_ELEMENTS:
            self.is_nested = self.is_nested and bool(self.open) and self.open.pop() == tag


def printed(judgement: Judgement, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in console_report(judgement):
        console.print(part)
    return console.export_text()


def test_the_console_begins_with_the_verdicts_sentence_then_the_table(judgement: Judgement):
    text = printed(judgement, width=1000)
    lines = text.splitlines()

    assert judgement.headline == lines[0].strip()
    assert lines[0].startswith("GO: deploy eagle3: ")
    table = verdict_table(judgement)
    assert text.index(table.title) < text.index("Latencies and rates")
    for cell in judgement.cells:
        assert any(
            cell.load.text in line and cell.arm.name in line and str(cell.verdict) in line
            for line in lines
        )


def test_a_narrow_console_loses_nothing_of_the_sentence(judgement: Judgement):
    text = " ".join(printed(judgement, width=60).split())

    assert " ".join(judgement.headline.split()) in text


def test_markup_in_a_name_is_not_interpreted(judgement: Judgement, html: str):
    assert "[red]my<b>set</b>.jsonl" in printed(judgement, width=1000)
    assert "<b>set</b>" not in html
    assert "my&lt;b&gt;set&lt;/b&gt;.jsonl" in html


def test_the_page_is_one_file_that_loads_nothing(html: str):
    found = Elements(html)
    loading = [
        (tag, name, value)
        for tag, attributes in found.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "srcset")
        and not (value or "").startswith(("#", "data:"))
    ]

    assert [] == loading
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in found.elements}
    assert [] == re.findall(r"url\((?!#)[^)]*\)|@import", html)
    assert found.is_nested
    assert [] == found.open


def test_no_two_elements_of_the_page_share_an_id(html: str):
    ids = [attributes["id"] for _, attributes in Elements(html).elements if "id" in attributes]

    assert ids
    assert len(ids) == len(set(ids))


def test_every_chart_is_drawn_with_its_conditions(judgement: Judgement):
    drawn = {chart.title: chart for chart in charts(judgement)}

    assert {
        "Ratio over load", "Time to first token at 1 user", "Chunk gap at 8 users",
        "Acceptance by position", "Acceptance by category", "Where a step's time goes",
        "Projection against measurement, eagle3",
    } <= drawn.keys()  # fmt: skip
    for chart in drawn.values():
        assert chart.svg is not None, chart.title
        assert chart.svg.startswith("<svg")
        for condition in ("#0123456789ab", "greedy, at most 48 tokens", "outrider 1.0", "a test"):
            assert condition in chart.caption, chart.title


def test_conditions_that_all_methods_share_are_told_once(judgement: Judgement):
    shared, apart = conditions_tables(judgement)

    rows = dict(shared.rows)
    assert "a test, 2 cores, 3 GiB memory" == rows["machine"]
    assert "greedy, at most 48 tokens" == rows["sampling"]
    assert ("method", "draft") == apart.columns
    assert ["ngram", "eagle3"] == [row[0] for row in apart.rows]
    assert not {"load", "blocks"} & {*rows, *apart.columns}


def test_the_run_says_machine_versions_and_client_in_words(judgement: Judgement):
    run = replace(
        judgement.data.run,
        machine={
            "processor": "AMD EPYC",
            "num_cores": 2,
            "governor": "performance",
            "load_average": [0.5, 0.25, 0.0],
            "gpus": [{"name": "H200", "power.limit": "700 W"}],
        },
        client=ClientProof(4, 99, 0.0001, 0.0015, 20000.0, True),
    )
    told = dict(run_table(replace(judgement, data=replace(judgement.data, run=run))).rows)

    assert "1 December 2026, 10:00 UTC" == told["begun"]
    assert "AMD EPYC, 2 cores, H200" == told["client's machine"]
    assert "performance" == told["governor"]
    assert "0.5, 0.25, 0.0" == told["load before (1, 5, 15 min)"]
    assert "name H200, power.limit 700 W" == told["GPUs"]
    assert "outrider 0.1.0" == told["versions"]
    assert "at 4 at once it saw a mock server's gaps with an error of 1.5 ms" in told["client"]
    assert "not tested before the run" == dict(run_table(judgement).rows)["client"]


def test_what_is_not_drawn_is_listed_with_its_reason():
    told = judge(change_requests(small(), lambda r: replace(r, speculative=None)))
    text = page(told)

    assert "Not drawn, and why" in text
    assert "<li>Acceptance by position. Unavailable: no server tells.</li>" in text
    assert text.count("<figure>") == sum(chart.svg is not None for chart in charts(told))


def test_one_wide_interval_does_not_press_the_others_flat(judgement: Judgement):
    """A noisy method's interval spans a factor of tens; then ratios are drawn by logarithm."""
    arms = [
        ScriptedArm("off", 0.010, noise=0.01),
        ScriptedArm("eagle3", 0.011, tokens_per_step=2, noise=1.6),
    ]
    wide = charts(judge(scripted_run(arms)))[0].svg or ""
    narrow = charts(judgement)[0].svg or ""
    low, high = (judge(scripted_run(arms)).cells[0].speedup.point()[k] for k in (1, 2))

    assert high > 4 * low
    marks = [float(text) for text in re.findall(r">(\d+(?:\.\d+)?)</text>", wide)]
    assert {0.5, 1.0, 2.0, 5.0} <= set(marks), "steps of a logarithm"
    assert ">5</text>" not in narrow


def test_the_page_adapts_to_its_width_and_to_paper(html: str):
    assert 'name="viewport" content="width=device-width' in html
    assert "minmax(min(100%, 360px), 1fr)" in html
    assert "@media print" in html
    widths = [float(w) for w in re.findall(r'<svg[^>]* width="([\d.]+)pt"', html)]
    assert widths
    assert max(widths) * 96 / 72 < 450  # text keeps its size on a phone


def test_a_chart_without_data_says_so():
    told = judge(change_requests(small(), lambda r: replace(r, speculative=None)))
    drawn = {chart.title: chart for chart in charts(told)}

    assert drawn["Acceptance by position"].svg is None
    assert "Unavailable" in drawn["Where a step's time goes"].caption
    assert "Not shown" in drawn["Projection against measurement, eagle3"].caption
    assert "unavailable" in {cell for row in verdict_table(told).rows for cell in row}


def test_the_summary_is_json_with_a_schema_version_and_no_bare_ratio(judgement: Judgement):
    document = json.loads(summary_text(judgement))

    assert SCHEMA_VERSION == document["schema_version"]
    assert ("GO", 0, "eagle3") == tuple(document[k] for k in ("verdict", "exit_status", "winner"))
    assert len(LOADS) * 2 == len(document["cells"])
    for cell in document["cells"]:
        assert "#0123456789ab"[1:] == cell["speedup"]["conditions"]["prompt_hash"]
        assert cell["load"] == cell["speedup"]["conditions"]["load"]
    figures = {(entry["arm"], entry["load"]): entry for entry in document["figures"]}
    assert 6 * 8 == figures["off", "closed:1"]["ttft_s"]["num_samples"]
    assert pytest.approx(1.95) == figures["eagle3", "closed:2"]["acceptance"]["length"]
    assert "unavailable" == figures["off", "closed:1"]["acceptance"]
    assert 0.75 == figures["ngram", "closed:8"]["step_time"]["shares"]["verify"]


def test_the_same_records_give_the_same_summary(judgement: Judgement):
    assert summary(judgement) == summary(judge(judgement.data))


@pytest.mark.parametrize(
    ("num_prompts", "percents"), [(3, ["50"]), (8, ["50", "75"]), (16, ["50", "90"])]
)
def test_the_tail_shown_is_the_highest_that_every_row_has_requests_for(num_prompts, percents):
    """18, 48 and 96 requests; gaps are more."""
    arms = [ScriptedArm("off", 0.01), ScriptedArm("ngram", 0.014, tokens_per_step=2)]
    table = latency_table(judge(scripted_run(arms, num_prompts=num_prompts)))

    shown = [f"{word} p{percent}" for word in ("TTFT", "TPOT") for percent in percents]
    assert (*shown, "gap p50", "gap p95") == table.columns[2:-2]
    assert ("1 user", "off") == table.rows[0][:2]
    assert pytest.approx(51.0, abs=2.0) == float(table.rows[0][2])
    assert all(len(table.columns) == len(row) for row in table.rows)


def test_a_percentile_below_its_floor_is_not_printed():
    arms = [ScriptedArm("off", 0.01), ScriptedArm("ngram", 0.014, tokens_per_step=2)]
    table = latency_table(judge(scripted_run(arms, num_blocks=1, num_aa=0, num_prompts=2)))

    assert "too few" == table.rows[0][2]


def test_goodput_has_a_column_only_under_a_service_level():
    arms = [ScriptedArm("off", 0.01), ScriptedArm("ngram", 0.014, tokens_per_step=2)]
    limit = {"judging": {"slo_ttft_ms": 200.0}}
    plain, judged_by_it = (
        verdict_table(judge(scripted_run(arms, settings=settings))) for settings in ({}, limit)
    )

    assert "goodput" not in plain.columns
    assert "goodput" in judged_by_it.columns
    assert "Goodput: TTFT <= 200 ms" in judged_by_it.note
    for table in (plain, judged_by_it):
        assert all(len(table.columns) == len(row) for row in table.rows)


def test_the_console_says_how_many_answers_are_plain_decodings(judgement: Judgement):
    text = printed(judgement, width=1000)

    assert "ngram: all 192 texts are the baseline's" in text
    assert "all 192 texts are the baseline's; lossless" in judgement.headline


def test_kinds_of_prompts_are_groups_on_the_console_and_all_on_the_page(judgement: Judgement):
    names = {"chat": "rewrite", "code": "code"}
    data = change_requests(small(), lambda r: replace(r, category=names[r.category]))
    told = judge(data)
    rows = [
        [row[1].strip() for row in category_table(told, groups_only=only).rows]
        for only in (True, False)
    ]

    assert ["repeats input", "rest"] == rows[0]
    assert ["repeats input", "rewrite", "rest", "code"] == rows[1]
    assert ["chat", "code"] * len(LOADS) == [
        row[1] for row in category_table(judgement, groups_only=True).rows
    ]
    assert "Ratio by kind of prompt" in printed(told)
    assert "repeats input" in page(told)


def test_of_many_pairs_the_console_shows_the_winners_and_tree_against_linear():
    tree = {"method": "eagle3-tree", "speculation": {"use_dynamic_tree": True}}
    arms = [
        ScriptedArm("off", 0.010),
        ScriptedArm("ngram", 0.013, tokens_per_step=2, ttft_s=0.045),
        ScriptedArm("mtp", 0.014, tokens_per_step=2, ttft_s=0.045),
        ScriptedArm("eagle3", 0.015, tokens_per_step=2, ttft_s=0.045),
        ScriptedArm("eagle3-tree", 0.016, tokens_per_step=2, ttft_s=0.045, **tree),
    ]
    told = judge(scripted_run(arms))
    every, few = (
        {frozenset(row[1:3]) for row in contrast_table(told, all_pairs=which).rows}
        for which in (True, False)
    )

    assert "ngram" == told.winner.name
    assert 6 == len(every)
    others = ("mtp", "eagle3", "eagle3-tree")
    assert {frozenset(("ngram", other)) for other in others} | {
        frozenset(("eagle3", "eagle3-tree"))
    } == few


def test_what_the_run_could_see_follows_from_its_noise(judgement: Judgement):
    row = power_table(judgement).rows[0]

    assert "A/A blocks differ by" in row[1]
    assert row[2].endswith("%")


def test_the_folder_has_everything_and_can_be_written_again(tmp_path: Path):
    data = small()
    written = write_report(judge(data), tmp_path, csv=True)

    names = ["summary.json", "plan.json", "requests.csv", "report.html"]
    assert names == [path.name for path in written]
    before = {path.name: path.read_bytes() for path in written}
    write_report(judge(data), tmp_path, csv=True)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_folder_that_cannot_be_written_is_named(judgement: Judgement, tmp_path: Path):
    with pytest.raises(FailureError, match=r"gone/summary.json: cannot be written"):
        write_report(judgement, tmp_path / "gone")


def test_the_plan_is_the_winner_with_its_loads_and_evidence(judgement: Judgement):
    plan = make_plan(judgement)

    assert plan is not None
    assert plan == Plan.model_validate_json(plan.model_dump_json())
    assert ("eagle3", "tiny", "exact") == (plan.method, plan.target, plan.losslessness)
    assert ["closed:1", "closed:2", "closed:4", "closed:8"] == [load.load for load in plan.loads]
    assert "abcdef012345" == plan.evidence.settings_hash
    assert plan.break_even is not None


def decided(step_s: float, **more) -> Judgement:
    fast = ScriptedArm("eagle3", step_s, tokens_per_step=2, **more)
    return judge(scripted_run([ScriptedArm("off", 0.01), fast]))


def test_after_a_no_go_plain_decoding_is_planned_and_else_nothing(tmp_path: Path):
    slower, void = decided(0.03), decided(0.014, num_tokens=24)
    plan = make_plan(slower)

    assert plan is not None
    assert ("off", "plain decoding") == (plan.method, plan.losslessness_text)
    assert make_plan(void) is None
    write_report(slower, tmp_path)
    write_report(void, tmp_path)
    assert not (tmp_path / "plan.json").exists()


def test_an_invalid_run_is_reported_without_a_ratio():
    void = decided(0.014, num_tokens=24)

    row = dict(zip(verdict_table(void).columns, verdict_table(void).rows[0], strict=True))
    assert ("INVALID", "-", "-") == (row["verdict"], row["ratio"], row["TTFT ratio"])
    assert "did not do the same work" in printed(void, width=1000)


def test_a_run_of_one_block_is_reported():
    one = scripted_run([ScriptedArm("off", 0.01), ScriptedArm("ngram", 0.014, tokens_per_step=2)],
                       num_blocks=1, num_aa=0)  # fmt: skip

    told = judge(one)

    assert "measured 1 of at least 6 blocks" in printed(told, width=1000)
    assert "INCONCLUSIVE" in page(told)


def test_the_csv_has_one_row_per_measured_request(judgement: Judgement):
    rows = list(csv.DictReader(io.StringIO(requests_csv(judgement))))

    assert 4 * 6 * 3 * 8 == len(rows)
    assert ("off", "closed:1", "p0", "48") == tuple(
        rows[0][name] for name in ("arm", "load", "prompt_id", "completion_tokens")
    )
    assert pytest.approx(0.05, abs=0.005) == float(rows[0]["ttft_s"])


def test_the_csv_keeps_text_from_being_a_formula(judgement: Judgement):
    data = change_requests(judgement.data, lambda r: replace(r, prompt_id="=1+1"))

    assert "'=1+1" in requests_csv(judge(data))


def test_published_figures_have_conditions_and_source():
    figures = published_figures()

    assert {"eagle3", "medusa", "ngram", "draft"} <= {figure.method for figure in figures}
    for figure in figures:
        assert figure.conditions.count(",") >= 4
        assert all((figure.source, figure.reference, figure.value, figure.metric, figure.caveat))
    sources = " ".join(figure.source for figure in figures)
    for name in ("Triton", "Llama at Scale", "EAGLE 3.1", "Spec-Bench", "SpecBundle"):
        assert name in sources


def test_only_figures_of_the_measured_drafters_are_shown(judgement: Judgement):
    table = published_table(judgement)

    assert len(published_figures(["eagle3-tree", "ngram"])) == len(table.rows)
    assert not any("MEDUSA" in cell for row in table.rows for cell in row)
    assert ["eagle3", "ngram", "other"] == [
        base_method(name) for name in ("eagle3-tree+ngram", "ngram", "other")
    ]


def test_the_median_length_of_requests_has_a_spread():
    drafts = SpeculativeCounts(drafted=8, accepted=6, steps=4)
    data = change_requests(
        small(), lambda r: replace(r, speculative=drafts if r.arm != "off" else None)
    )

    assert "2.50 (2.50-2.50)" == acceptance_table(judge(data)).rows[0][3]
