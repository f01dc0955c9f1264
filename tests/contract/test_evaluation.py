# SPDX-License-Identifier: Apache-2.0
"""Predictions on disk: reused if nothing changed, continued after a kill, never mixed."""

import json
import pickle
import time

import pytest

from quadtree_attention import use_backend
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks import evaluate
from quadtree_attention.tasks.contract import finite, get_task
from quadtree_attention.tasks.store import Store
from tests.support import processes, raises, tiny
from tests.support.commands import contents

pytestmark = pytest.mark.usefixtures("only_reference")
pytest.importorskip("faster_coco_eval", reason="scores of detectors need the extra 'train'")


@pytest.fixture
def data(task, tmp_path):
    return tiny.write_data(task.name, tmp_path / "data")


@pytest.fixture
def save(task, tmp_path):
    codec = task.load("codec")
    return tmp_path / ("saved" + (codec.suffixes[0] if codec.together else ""))


@pytest.fixture
def run(task, weights, data, save):
    def run(**options):
        own = tiny.OWN.get(task.name, {})
        return evaluate(task.name, weights, **{**data, "save": save, **own, **options})

    return run


def root_of(data):
    return data["data"] if data["data"].is_dir() else data["data"].parent


def test_scores_are_those_of_the_files(task, run, data, save):
    scores = run()
    assert scores.task == task.name and not scores.missing and not scores.skipped
    assert scores.mean and json.dumps(scores.to_dict(), allow_nan=False) and scores.to_text()
    again = evaluate(task.name, **data, predictions=save)
    assert again.to_dict() == scores.to_dict()
    assert scores.settings["weights_sha256"] and not save.with_name("saved.parts").exists()


def test_metrics_of_several_processes_are_merged(task, run, data, save):
    """What each has seen is gathered as plain data."""
    scores = run()
    options = {"split": data.get("split", "val"), **data.get("reader", {})}
    source = task.load("open_source")(data["data"], **options)
    store = Store.open(save, task, source)

    def metric_of(*samples):
        metric = task.load("metric")(source, store.classes)
        for i in samples:
            metric.update(source.name(i), source.truth(i), store.get(source.name(i)))
        return metric

    together, first = task.load("metric")(source), metric_of(0, 2)
    together.merge(pickle.loads(pickle.dumps([first.state(), metric_of(1).state()])))
    found = together.compute()
    assert finite(found.mean) == finite(scores.mean) and found.facts == scores.facts
    assert first.compute().facts != found.facts or first.compute().mean != found.mean


def test_results_are_reused_and_only_those_that_fit(task, run, data, save, monkeypatch):
    first = run()
    before = contents(save.parent)
    predictor = task.load("predictor")
    with monkeypatch.context() as patch:
        patch.setattr(predictor, "forward", lambda *_: pytest.fail("the network ran again"))
        assert run().to_dict() == first.to_dict()
    assert contents(save.parent) == before
    raises(OptionError, r"other settings: size None there, 64 now.*--force", run, size=64)
    assert contents(save.parent) == before
    assert run(size=64, force=True).settings["options"]["size"] == 64
    raises(OptionError, "leave out weights", run, predictions=save)


def test_other_data_of_the_same_names_are_refused(task, run, tmp_path, monkeypatch):
    run()
    put, made = Store.put, []
    monkeypatch.setattr(Store, "put", lambda self, found: (made.extend(found), put(self, found)))
    # Where two samples are replaced, the third result is still of the first data
    for count in (3,) if task.load("codec").together else (2, 3):
        other = tiny.write_data(task.name, tmp_path / "other", count=count)
        raises(OptionError, "of other data as", run, **other)
        assert not run(**other, force=True).missing and len(made) == count
        made.clear()


def test_files_of_others_stay(task, run, save):
    codec = task.load("codec")
    mine = save if codec.together else save / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("precious")
    for force in (False, True):
        raises(OptionError, r"(no|without a) .*settings\.json", run, force=force)
    assert mine.read_text() == "precious"


def test_a_note_cannot_name_files_outside(task, run, save, tmp_path):
    if task.load("codec").together:
        return  # nothing is removed by name
    run()
    note = json.loads((save / "settings.json").read_text())
    victim = tmp_path / f"victim{note['suffix']}"
    victim.write_text("precious")
    note["samples"] |= {"../victim": [], str(victim.with_suffix("")): []}
    (save / "settings.json").write_text(json.dumps(note))
    run(size=64, force=True)
    assert victim.read_text() == "precious"


def test_bad_samples_are_left_out_or_refused(task, run, data, save):
    bad = tiny.files_of(root_of(data))[-1]
    whole = bad.read_bytes()
    bad.write_bytes(b"no image")
    scores = run()
    assert any(bad.name in reason for reason in scores.skipped) and len(scores.missing) <= 1
    bad.write_bytes(whole)
    mended = run()  # what is there is kept, what failed is done
    assert not mended.skipped and not mended.missing
    bad.write_bytes(b"no image")
    raises((DataError, OptionError), rf"{bad.name}|lacks 1 of 3", run, strict=True, force=True)
    for path in tiny.files_of(root_of(data)):
        path.write_bytes(b"no image")
    raises(DataError, r"can be read|can be scored", run, force=True)


def test_predictions_that_are_missing(task, run, data, save, tmp_path):
    with pytest.raises(DataError, match=r"there is no (file|folder) .* of predictions"):
        evaluate(task.name, **data, predictions=tmp_path / "none")
    if not task.load("codec").together:
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="has predictions for none of 3"):
            evaluate(task.name, **data, predictions=tmp_path / "empty")
        run()
        suffix = json.loads((save / "settings.json").read_text())["suffix"]
        sorted(save.glob(f"*{suffix}"))[-1].unlink()
        assert len(evaluate(task.name, **data, predictions=save).missing) == 1
        with pytest.raises(DataError, match="lacks 1 of 3"):
            evaluate(task.name, **data, predictions=save, strict=True)


def test_options_that_do_not_exist(run, save):
    raises(OptionError, "an option of the reader must be .*'layut'", run, reader={"layut": "x"})
    raises(OptionError, "a threshold must be .*'sid'", run, thresholds={"sid": 3})
    raises(OptionError, "data must be the path of a data set, got None", run, data=None)
    assert not save.exists()


def test_workers_make_the_same(task, run, save):
    run()
    before = contents(save.parent)
    run(workers=1, force=True)
    assert contents(save.parent) == before


def evaluated(options, seconds):
    """In a process of its own: `seconds` pass after every result."""
    put = Store.put

    def slow(self, found):
        put(self, found)
        print("put", flush=True)
        time.sleep(seconds)

    Store.put = slow
    with use_backend("reference"):
        evaluate(**options)


@pytest.mark.parametrize("name", ["stereo", "classify"])  # a folder, and one file for all
def test_a_killed_run_continues(name, all_weights, tmp_path):
    task = get_task(name)
    data = tiny.write_data(name, tmp_path / "data")
    codec = task.load("codec")
    suffix = codec.suffixes[0] if codec.together else ""
    weights = all_weights / f"{name}.safetensors"
    output = tmp_path / "output.txt"

    def start(save, seconds=0):
        options = {**data, "task": name, "weights": weights, "save": save, "batch": 1}
        return processes.start(evaluated, options, seconds, output=output)

    whole, broken = tmp_path / f"whole{suffix}", tmp_path / f"broken{suffix}"
    assert processes.finish(start(whole), output).count("put") == 3
    output.unlink()
    killed = start(broken, 60)
    while killed.exitcode is None and not (output.exists() and "put" in output.read_text()):
        time.sleep(0.02)
    killed.kill()
    killed.join()
    printed = processes.finish(start(broken), output)
    assert 0 < printed.count("put") < 3  # what was there stayed
    expected = Store.open(whole, task)
    found = Store.open(broken, task)
    for index in range(3):
        names = list(json.loads(_note(whole, codec).read_text())["samples"])
        left, right = (store.codec.encode({names[index]: store.get(names[index])}, store.suffix)
                       for store in (expected, found))  # fmt: skip
        assert left == right
    assert not broken.with_name("broken.parts").exists()


def _note(path, codec):
    return path.with_suffix(".settings.json") if codec.together else path / "settings.json"
