# SPDX-License-Identifier: Apache-2.0
"""Result files: what is checked, how they are written, how they grow."""

import json
from argparse import Namespace

import pytest

from benchmarks.result import (
    KINDS,
    RESULTS,
    ROOT,
    ResultFile,
    ResultFileError,
    check,
    describe,
    dumps,
    hide_paths,
    read_all,
)
from benchmarks.training.comparison import comparisons
from tests.benchmarks.conftest import read, result_of, run_of, stored, times
from tests.support import raises

CASE = {"model": "m", "attention": "sr", "part": "network", "image": [4, 3], "batch": 1,
        "precision": "float32", "mode": "eager"}  # fmt: skip
ROW = {"case": CASE, "values": times(4.0)}
KIND = "speed/detectors"


GONE = object()
MISTAKES = [  # kind, the place of a change in a committed result, the new value, what is said
    (KIND, "runs", GONE, "result must have the keys"),
    (KIND, "schema", 1, "schema is 1, this version reads 2"),
    (KIND, "kind", "speed/prices", "kind is 'speed/prices', expected one of"),
    (KIND, "runs.0.date", GONE, r"runs\[0\] must have the keys"),
    (KIND, "runs.0.machine.cores", "2", "machine.cores must be"),
    (KIND, "runs.0.settings.x", 1, r"runs\[0\].settings must have the keys"),
    (KIND, "rows.0.run", 1, r"rows\[0\].run must be one of 1 runs"),
    (KIND, "rows.0.values.median_ms", "4", "values.median_ms must be float"),
    (KIND, "rows.0.values.peak_mib", GONE, r"rows\[0\].values must have the keys"),
    (KIND, "rows.0.case.part", "head", r"part must be network\|detector"),
    (KIND, "rows.0.case.image.1", "3", r"image\[1\] must be int"),
    (KIND, "rows.0.case", GONE, r"rows\[0\].case must have the keys"),
    (KIND, "rows.0.error", 3, r"rows\[0\].error must be str"),
    (KIND, "rows.0", {"run": 0, "error": "no", "values": {"ms": 1}}, "must have the keys"),
    ("quality/matching", "rows.0.details.pairs.0", GONE, r"details.pairs has \d+ pairs of"),
    ("quality/matching", "rows.0.values.truth", "flow", "truth must be pose.homography"),
    ("quality/matching", "rows.0.values.estimators.opencv.auc.5", GONE, "auc must have"),
    ("quality/stereo", "rows.0.details.pairs.0", GONE, r"details.pairs has \d+ pairs of"),
    ("training/attentions", "kind", "training", "kind is 'training', expected one of"),
    ("training/attentions", "rows.0.kind", GONE, r"rows\[0\].kind must be run\|step"),
    ("training/attentions", "rows.0.case.seed", GONE, r"rows\[0\].case must have the keys"),
    ("training/attentions", "rows.0.details.history.epoch.19", GONE, r"with epoch \[19\] of 20"),
    ("training/attentions", "rows.0.details.history.seconds.0", GONE, "has 19 epochs of 20"),
    ("training/attentions", "runs.2.settings.batch", GONE, r"runs\[2\].settings must have"),
    ("training/match-attentions", "rows.0.details.weights.sha256", GONE, "weights must have"),
    ("training/match-attentions", "rows.6.details.errors.opencv.0", GONE, "has 99 pairs of 100"),
    ("training/match-attentions", "runs.2.settings.synthetic.seed", GONE, "synthetic must have"),
]


@pytest.mark.parametrize(("kind", "place", "value", "message"), MISTAKES)
def test_results_with_a_mistake_are_refused(kind, place, value, message):
    result = found = stored(kind)
    *path, last = (int(x) if x.isdigit() else x for x in place.split("."))
    for key in path:
        found = found[key]
    last = str(last) if isinstance(found, dict) else last  # "5" of an area
    if value is GONE:
        del found[last]
    else:
        found[last] = value
    raises(ValueError, message, check, result)


def test_rows_without_values_say_why():
    result_of(KIND, {"case": CASE, "error": "out of memory"}, {"case": CASE, "skipped": "slow"})
    counts = {"params": 1, "macs": 2, "attention_macs": 1}  # which may be known all the same
    case = {"network": "full-2", "image": [4, 3], "pass": "forward", "precision": "float32"}
    result_of("speed/stereo", {"case": case, "values": counts, "error": "out of memory"})


def test_committed_results_are_valid():
    kinds = [k for k in KINDS if not k.startswith("training/")]
    kinds += [comparison.kind for comparison in comparisons().values()]
    found = {name: result for kind in kinds for name, result in read_all(kind).items()}
    files = [str(p.relative_to(RESULTS).with_suffix("")) for p in RESULTS.rglob("*.json")]
    assert sorted(found) == sorted(files)
    for result in found.values():
        assert result["complete"] and result["rows"]
        assert all(row.get("values", {}).get("median_ms", 1) > 0 for row in result["rows"])


def test_other_files_are_refused(tmp_path):
    path = tmp_path / KIND
    path.parent.mkdir()
    path = path.with_name("detectors--x.json")
    path.write_text(json.dumps(result_of(KIND, ROW) | {"kind": "speed/matchers"}))
    with pytest.raises(ResultFileError, match=r"detectors--x.json is not a result file: kind is"):
        read_all(KIND, tmp_path)
    path.write_text("{")
    raises(ResultFileError, r"x.json is not a result file", ResultFile, path, KIND, grows=True)


def test_a_result_takes_its_place_when_it_is_complete(tmp_path):
    path = tmp_path / "new folder" / "x.json"
    file = ResultFile(path, KIND)
    file.begin(run_of())
    file.add(ROW, complete=False)
    partial = path.with_name("x.json.partial")
    assert not path.exists() and not read(partial)["complete"]
    file.add(ROW)
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    assert len(read(path)["rows"]) == 2 and read(path)["complete"]


def test_a_file_grows_over_commands(tmp_path):
    path, other = tmp_path / "x.json", run_of() | {"command": "python -m benchmarks speed y"}
    for i, run in enumerate((run_of(), other)):
        file = ResultFile(path, KIND, grows=True)
        file.begin(run)
        file.add(ROW | {"values": times(float(i))})
        file.add(ROW | {"values": times(float(i) + 0.5)})
    result = read(path)
    assert [row["run"] for row in result["rows"]] == [0, 0, 1, 1]
    assert result["runs"] == [run_of(), other]
    file.add(replaces=lambda row: row["run"] == 0)
    assert read(path)["runs"] == [other]  # without rows the other is gone
    assert [row["run"] for row in read(path)["rows"]] == [0, 0]


def test_rows_are_written_on_few_lines():
    value = {"rows": [{"case": {"a": '  "[1], {', "b": [1, 2]}, "values": {"c,\n": None}}], "d": []}
    text = dumps(value)
    assert json.loads(text) == value
    assert '\n   "values": {"c,\\n": null}\n' in text and '"b": [1, 2]' in text


def test_no_path_of_this_machine_is_recorded(tmp_path):
    data = tmp_path / "photos"
    options = Namespace(device="cpu", threads=1, data=str(data), work=None)
    out = ROOT / "benchmarks" / "results" / "x.json"
    run = describe(["quality", "stereo", "--data", str(data), f"--out={out}"], options, a=1)
    assert run["command"].endswith("quality stereo --data photos --out=benchmarks/results/x.json")
    assert run["settings"] == {"a": 1} and run["machine"]["threads"] == 1
    assert hide_paths("no /home/me/x.npz, a/b, https://x.y/z") == "no x.npz, a/b, https://x.y/z"
