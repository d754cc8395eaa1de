"""The table in the documentation is the one that its script prints."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documented_table_is_what_the_script_prints(capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "training_table.py"))
    script["main"]([])
    printed = capsys.readouterr().out
    documented = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")

    assert 6 == len(printed.splitlines())  # headings, rule, four targets
    assert printed in documented
