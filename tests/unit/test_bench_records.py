from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench.records import (
    ArmRecord,
    BlockKind,
    Load,
    LoadKind,
    MetricsSnapshot,
    RequestRecord,
    SpeculativeCounts,
    from_json,
    to_json,
)
from outrider.bench.store import RunFolder, complete_indices, read_run
from outrider.errors import FailureError, ParameterError, RecordError
from tests.bench_runs import block, request, run_record


def test_records_come_back_from_json_as_they_were():
    snapshot = MetricsSnapshot(0.5, {'a_total{model="m"}': 3.0})
    records = [
        request("off", 3, 1, text="Grüße \u2028", speculative=SpeculativeCounts(8, 5, 3, 2.67)),
        dataclasses.replace(block("off", 3, 1), metrics_before=snapshot),
        run_record("off", "ngram"),
    ]

    assert records == [from_json(type(record), to_json(record), "here") for record in records]


def test_a_record_is_one_line_of_json():
    line = to_json(request("off", 0, 0, text="one\ntwo"))

    assert b"\n" not in line
    assert "one\ntwo" == json.loads(line)["text"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "f, line 2: is no RequestRecord: the line: Invalid JSON"),
        (b"{}", "f, line 2: is no RequestRecord: sent_s: Field required"),
        (
            to_json(request("off", 0, 0)).replace(b'"status":200', b'"status":"good"'),
            "f, line 2: is no RequestRecord: status: ",
        ),
    ],
)
def test_a_broken_line_is_named_by_place_and_field(line: bytes, expected: str):
    with pytest.raises(RecordError) as caught:
        from_json(RequestRecord, line, "f, line 2")

    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("load", "name", "text", "concurrency"),
    [
        (Load(LoadKind.CLOSED, 1), "closed:1", "1 user", 1),
        (Load(LoadKind.CLOSED, 16), "closed:16", "16 users", 16),
        (Load(LoadKind.POISSON, 2.5), "poisson:2.5", "2.5 requests/s (Poisson)", None),
        (Load(LoadKind.GAMMA, 2, 3.0), "gamma:2:cv3", "2 requests/s (bursts, cv 3)", None),
        (Load(LoadKind.TRACE, 2, path="t.jsonl"), "trace:x2", "trace t.jsonl at 2x", None),
    ],
)
def test_a_load_has_a_name_for_files_and_one_for_people(load, name, text, concurrency):
    assert (name, text, concurrency) == (load.name, load.text, load.concurrency)


@pytest.mark.parametrize(
    ("kind", "value", "burstiness", "expected"),
    [
        (LoadKind.CLOSED, 0, 1.0, "load closed: 0 is not"),
        (LoadKind.CLOSED, 1.5, 1.0, "concurrency: 1.5 is not a whole number"),
        (LoadKind.POISSON, float("nan"), 1.0, "nan is not a number above 0"),
        (LoadKind.GAMMA, 1.0, -1.0, "burstiness: -1.0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(kind, value, burstiness, expected):
    with pytest.raises(ParameterError, match=expected):
        Load(kind, value, burstiness)


def test_counters_are_summed_over_labels_and_told_apart_by_one():
    snapshot = MetricsSnapshot(
        0.0,
        {
            'pos_total{engine="0",position="0"}': 5.0,
            'pos_total{engine="1",position="0"}': 2.0,
            'pos_total{engine="0",position="1"}': 3.0,
            "pos_total_created": 9.0,
        },
    )

    assert 10.0 == snapshot.total("pos_total")
    assert snapshot.total("pos") is None
    assert {"0": 7.0, "1": 3.0} == snapshot.by_label("pos_total", "position")


def test_a_run_comes_back_from_its_folder_in_the_order_it_was_measured(tmp_path: Path):
    run = run_record("off", "ngram")
    folder = RunFolder(tmp_path / "run")
    folder.create(run)
    turns = [
        (block("off", 9, 0, BlockKind.WARMUP, started_s=0.0), [request("off", 9, 0)]),
        (block("off", 0, 0, started_s=1.0), [request("off", 0, 0), request("off", 0, 0)]),
        (block("ngram", 0, 1, started_s=2.0), [request("ngram", 0, 1)]),
    ]
    for one_block, requests in reversed(turns):
        folder.write_turn(one_block, requests)
    data = read_run(tmp_path / "run")

    assert run == data.run
    assert tuple(one_block for one_block, _ in turns) == data.blocks
    assert tuple(record for _, requests in turns for record in requests) == data.requests
    assert 2 == len(data.requests_of(turns[1][0]))
    assert 9 == folder.last_index()


def test_a_block_counts_only_when_every_arm_had_its_turn(tmp_path: Path):
    run = run_record("off", "ngram", "eagle3")
    folder = RunFolder(tmp_path)
    folder.create(run)
    for arm, index, position, kind in [
        ("off", 0, 0, BlockKind.MEASURE),
        ("ngram", 0, 1, BlockKind.MEASURE),
        ("eagle3", 0, 2, BlockKind.MEASURE),
        ("off", 1, 0, BlockKind.AA),
        ("off", 1, 1, BlockKind.AA),
        ("off", 2, 0, BlockKind.MEASURE),
        ("ngram", 2, 1, BlockKind.MEASURE),
        ("off", 3, 0, BlockKind.AA),
    ]:
        folder.write_turn(block(arm, index, position, kind), [request(arm, index, position)])

    assert {0, 1} == complete_indices(tmp_path, run)
    assert {0, 1} == {one_block.index for one_block in read_run(tmp_path).blocks}


def test_a_turn_that_is_measured_again_replaces_the_first_attempt(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0, text="old")])
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0, text="new")])

    assert ["new"] == [record.text for record in read_run(tmp_path).requests]


def test_a_file_that_was_being_written_when_the_power_failed_is_no_turn(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    (tmp_path / "records" / "0000-0.jsonl.gz.part").write_bytes(b"half")

    assert () == read_run(tmp_path).blocks


def test_a_damaged_turn_is_named_with_what_to_do(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0)])
    file = tmp_path / "records" / "0000-0.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-9])

    with pytest.raises(RecordError, match=r"0000-0\.jsonl\.gz: is damaged .* delete it and resume"):
        read_run(tmp_path)


def flipped(data: bytes) -> bytes:
    """Some bits in the middle of the compressed data are others."""
    return data[:20] + bytes(byte ^ 0x55 for byte in data[20:60]) + data[60:]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flipped, r"is damaged \(Error -3 while decompressing"),
        (lambda data: b"hello", r"is damaged \(Not a gzipped file"),
        (lambda data: b"", r"is damaged \(it holds no request\)"),
        (lambda data: gzip.compress(b"{}"), r"is damaged \(it holds no request\)"),
        (lambda data: gzip.compress(b"{}\n{}"), "line 1: is no BlockRecord"),
    ],
)
def test_bytes_that_are_no_turn_any_more_are_named_with_what_to_do(
    tmp_path: Path, damage, expected: str
):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0)])
    file = tmp_path / "records" / "0000-0.jsonl.gz"
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(RecordError, match=r"0000-0\.jsonl\.gz.*" + expected):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("turn", "changed", "expected"),
    [
        (block("other", 0, 0), {"arm": "other"}, "other at 1 user is no part of the run"),
        (block("off", 0, 0), {"arm": "ngram"}, "line 2 belongs to another turn"),
        (block("off", 0, 0), {"block": 7}, "line 2 belongs to another turn"),
        (block("off", 0, 0), {"load": Load(LoadKind.CLOSED, 2)}, "line 2 belongs to another"),
        (block("off", 0, 0), {"sent_s": 0.5}, "line 2 has times or counts that cannot be"),
        (
            block("off", 0, 0),
            {"chunks": request("off", 0, 0).chunks[::-1]},
            "line 2 has times or counts",
        ),
        (block("off", 0, 0), {"completion_tokens": -1}, "line 2 has times or counts"),
    ],
)
def test_a_turn_that_cannot_have_been_measured_is_damaged(tmp_path: Path, turn, changed, expected):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    wrong = dataclasses.replace(request("off", 0, 0), **changed)
    folder.write_turn(dataclasses.replace(turn, kind=BlockKind.WARMUP), [wrong])

    with pytest.raises(RecordError, match=rf"is damaged \({expected}"):
        read_run(tmp_path)


def test_a_turn_under_another_turns_name_is_damaged(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0)])
    (tmp_path / "records" / "0000-0.jsonl.gz").rename(tmp_path / "records" / "0003-0.jsonl.gz")

    with pytest.raises(RecordError, match="it holds turn 0-0"):
        read_run(tmp_path)


@pytest.mark.parametrize(("baselines", "named"), [((), "none"), ((0, 1), "off and ngram")])
def test_a_run_has_one_baseline(tmp_path: Path, baselines, named: str):
    run = run_record("off", "ngram")
    arms = [dataclasses.replace(arm, is_baseline=i in baselines) for i, arm in enumerate(run.arms)]
    RunFolder(tmp_path).create(dataclasses.replace(run, arms=tuple(arms)))

    with pytest.raises(RecordError, match=rf"one arm must be the baseline, not {named}; bring"):
        read_run(tmp_path)


def test_a_full_disk_keeps_what_is_complete_and_says_how_to_go_on(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.create(run_record("off", "ngram"))
    folder.write_turn(block("off", 0, 0, BlockKind.WARMUP), [request("off", 0, 0)])
    full = tmp_path / "records" / "0001-0.jsonl.gz.part"
    full.symlink_to("/dev/full")

    with pytest.raises(FailureError, match=r"0001-0.*No space left.*run the same command again"):
        folder.write_turn(block("off", 1, 0, BlockKind.WARMUP), [request("off", 1, 0)])
    assert [0] == [each.index for each in read_run(tmp_path).blocks]
    assert not full.is_symlink(), "what was half written is gone"
    folder.write_turn(block("off", 1, 0, BlockKind.WARMUP), [request("off", 1, 0)])
    assert {0, 1} == {each.index for each in read_run(tmp_path).blocks}


def test_records_of_another_schema_version_are_refused(tmp_path: Path):
    RunFolder(tmp_path).create(dataclasses.replace(run_record("off", "a"), schema_version=99))

    with pytest.raises(RecordError, match="schema version 99, and this version reads 1"):
        read_run(tmp_path)


def test_a_folder_without_a_run_is_no_run(tmp_path: Path):
    with pytest.raises(RecordError, match=r"holds no run\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_run_never_writes_among_other_peoples_files(tmp_path: Path, is_file: bool):
    out = tmp_path / "out"
    if is_file:
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")

    for use in (RunFolder(out).check, lambda: RunFolder(out).create(run_record("off", "a"))):
        with pytest.raises(ParameterError, match="is no run that can be resumed"):
            use()
    assert not (out / "run.json").exists()


def test_a_name_that_no_folder_can_have_is_refused_as_any_other(tmp_path: Path):
    path = tmp_path / ("a" * 300)

    assert not RunFolder(path).holds_run()
    with pytest.raises(ParameterError, match=r"cannot be written \(File name too long\)"):
        RunFolder(path).check()
    with pytest.raises(RecordError, match=r"holds no run\.json"):
        read_run(path)


def test_the_logs_of_servers_may_come_before_the_run(tmp_path: Path):
    folder = RunFolder(tmp_path / "new")
    folder.check()
    folder.log("off").write_text("starting")
    folder.create(run_record("off", "a"))

    assert "starting" == folder.log("off").read_text()


def test_the_baseline_is_the_arm_marked_so():
    run = dataclasses.replace(
        run_record("a"),
        arms=(
            ArmRecord("fast", "ngram", False, "http://a", "m"),
            ArmRecord("plain", "off", True, "http://b", "m"),
        ),
    )

    assert "plain" == run.baseline.name


def test_bench_reaches_neither_torch_nor_the_model_code():
    code = (
        "import importlib, pkgutil, sys, outrider.bench as b\n"
        "for m in pkgutil.iter_modules(b.__path__):\n"
        "    importlib.import_module(f'outrider.bench.{m.name}')\n"
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('outrider.models')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()
