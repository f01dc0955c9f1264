# SPDX-License-Identifier: Apache-2.0
"""Tables from results: what cells show, what is not measured, and the pages in docs/."""

from benchmarks import result as files
from benchmarks.result import ResultFileError, dumps
from benchmarks.tables import summary, table, views, write
from benchmarks.tables.table import number
from tests.benchmarks.conftest import command, result_of, run_of, stored, times
from tests.support import raises


def section(result: dict, name: str = "x") -> str:
    return views.section(name, result)


def test_numbers():
    shown = [number(value) for value in (None, 1234.5, 12.34, 1.234, 0.0123)]
    assert shown == ["-", "1234", "12.3", "1.23", "0.012"]


def test_attention_shows_losses_and_gaps():
    def row(implementation: str, name: str, **outcome) -> dict:
        case = {"case": "tiny", "implementation": implementation, "dtype": "float32"}
        return {"case": case | {"pass": name, "mode": "eager"}, **outcome}

    def measured(ms: float) -> dict:
        return {"values": times(ms) | {"backend": None}}

    result = result_of(
        "speed/ops",
        row("quadtree", "forward", **measured(10.0)),
        row("sdpa", "forward", **measured(4.0)),
        row("quadtree", "forward+backward", **measured(30.0)),
        row("sdpa", "forward+backward", skipped="estimated 99 s for one run, limit 60 s"),
        variant="B",
    )
    text = section(result)
    assert "| tiny | float32 | eager | 10.0 / 30.0 | 1.50 / 1.50 | 4.00 / - |" in text
    assert "| 0.40x / - |" in text and "\nVariant B.\n" in text
    assert "CPU Y, 8 cores, 1 used, load 0.50" in text
    assert "- tiny, sdpa, float32, forward+backward, eager: skipped: estimated 99 s" in text
    assert "2030-01-02, commit 0123456789ab." in text


def test_long_tables_show_some_rows_and_fold_all():
    """`short` selects them; a number relative to a row that is not shown stays."""
    names = ["a", "b", *(f"c{i}" for i in range(table.LONGEST - 1))]
    rows = [{"case": {"name": n}, "values": {"x": 3.0 if n == "a" else 2.0}} for n in names]
    columns = [
        table.Column("name", "case.name", str, words=True),
        table.Column("of a", "values.x", relative={"name": "a"}),
    ]
    lines = table.View(columns, short=[{"name": "b"}, {"name": "z"}]).markdown(rows)
    some, every = lines[: lines.index("")], lines[lines.index("") :]
    assert some == ["| name | of a |", "| --- | ---: |", "| b | 0.67 |"]
    assert f"<summary>All {len(rows)} rows</summary>" in every[1]
    assert sum(line.startswith("| ") for line in every) == 2 + len(rows)
    for few, short in ((rows[1:], [{"name": "b"}]), (rows, [{"name": "z"}]), (rows, None)):
        whole = table.View(columns, short=short).markdown(few)
        assert len(whole) == 2 + len(few)


def test_error_of_calibration_is_that_of_the_runs_that_calibrated():
    result = stored("quality/accelerate")
    rows = [{**row, "run": int(row["case"]["attention"] != "calibrated")} for row in result["rows"]]
    text = section(result | {"runs": [run_of(error=0.1), run_of(error=0.2)], "rows": rows})
    assert '"calibrated" is K for an error of 0.1.' in text
    assert "error of 0.2" not in text


def test_failures_have_cells_and_lines_of_their_own():
    case = {"model": "m", "image": [2048, 1024], "matches": 2000, "precision": "float32"}
    errors = {"full": "out of memory", "linear": "RuntimeError: no"}
    rows = [{"case": case | {"attention": name}, "error": errors[name]} for name in errors]
    lines = section(result_of("speed/matchers", *rows, memory_gib=8.0)).splitlines()
    assert "PyTorch was given 8.00 GiB of the GPU." in lines
    for name, cell in (("full", "out of memory"), ("linear", "failed")):
        line = f"| 2048x1024 | m | float32 | {name} | {cell} | - | - | - | - |"
        assert line in lines and f"{line} - | - |" in lines
    assert "- m, 2048x1024, 2000, float32, linear: failed: RuntimeError: no" in lines
    assert "out of memory" not in "".join(line for line in lines if line.startswith("- "))


def test_only_checksums_are_cut():
    methods = {"mine": {"model": "loftr_quadtree_small", "weights_sha256": "0" * 64, "x": None}}
    text = section(stored("quality/matching") | {"runs": [run_of(methods=methods)]})
    assert f"\n- mine: model loftr_quadtree_small, weights sha256 {'0' * 12}\n" in text


def test_pages_are_updated_and_checked(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "docs" / "page.md", tmp_path / "results"
    page.parent.mkdir()
    (tmp_path / "README.md").write_text("Words.\n")
    monkeypatch.setattr(write, "DOCS", page.parent)
    monkeypatch.setattr(write, "RESULTS", results)
    page.write_text("Words.\n\n<!-- generated: speed/scenes -->\nold\n<!-- end generated -->\n")
    assert command("tables") == 0 and "Not measured yet." in page.read_text()
    settings = {"size": [8, 8], "batch": 1, "samples": 1, "plain": False}
    row = {"case": {"part": "layout"}, "values": times(2.0, None)}
    (results / "speed").mkdir(parents=True)
    (results / "speed" / "scenes--x.json").write_text(
        dumps(result_of("speed/scenes", row, **settings))
    )
    assert command("tables --check") == 1
    assert "page.md is out of date: run python -m benchmarks tables" in capsys.readouterr().out
    assert "| layout |" not in page.read_text()
    assert command("tables") == 0
    assert "Words." in page.read_text() and "| layout | 2.00 |" in page.read_text()
    assert command("tables --check") == 0
    page.write_text("<!-- generated: speed/cars -->\n<!-- end generated -->\n")
    assert command("tables") == 2
    assert "there is no kind 'speed/cars' of results; known: speed/ops" in capsys.readouterr().err


SUMMARY = """
- {what: time, file: speed/scenes--x, value: values.median_ms, unit: ms, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
- {what: speed, file: speed/scenes--x, value: values.median_ms, better: higher, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
- {what: close, file: speed/scenes--x, value: values.median_ms, digits: 1, margin: 3, name: theirs,
   ours: {part: layout}, theirs: {part: all}}
"""


def test_summary_marks_the_better_number(tmp_path, monkeypatch):
    rows = [{"case": {"part": part}, "values": times(ms, None)}
            for part, ms in (("layout", 2.0), ("all", 4.0))]  # fmt: skip
    result = result_of("speed/scenes", *rows, size=[8, 8], batch=1, samples=1, plain=False)
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "scenes--x.json").write_text(dumps(result))
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    files.stored.cache_clear()
    file = tmp_path / "summary.yaml"
    file.write_text(SUMMARY)
    try:
        assert summary.table(file).splitlines()[2:] == [
            "| time | **2.00 ms** | 4.00 ms theirs | NVIDIA X |",
            "| speed | 2.00 | **4.00** theirs | NVIDIA X |",
            "| close | 2.0 | 4.0 theirs | NVIDIA X |",
        ]
        file.write_text(SUMMARY.replace("part: all", "part: nothing"))
        raises(ResultFileError, r"has 0 rows of .*nothing.*, expected one", summary.table, file)
    finally:
        files.stored.cache_clear()


def test_docs_are_up_to_date(capsys):
    assert command("tables --check") == 0, capsys.readouterr().out
