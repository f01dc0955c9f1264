"""Prediction on a Ray cluster: two nodes on this machine, and drivers that are processes."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quadtree_attention.errors import OptionError
from quadtree_attention.sfm.matching import PairMatcher
from quadtree_attention.tasks import cluster as module
from quadtree_attention.tasks.cluster import Cluster, _groups
from quadtree_attention.tasks.contract import Items, Prepared, Result
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.predictor import Predictor
from tests.sfm.test_pipeline import rows
from tests.support.commands import START, command, contents, environment, refusal, refused
from tests.support.scene import write_photographs

COUNT = 5  # photographs; 10 pairs
SIZE = 320
ALONE = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


# ---- without a cluster


def test_groups_are_consecutive_and_small():
    chunks = [range(2 * i, 2 * i + 2) for i in range(41)]
    groups = _groups(chunks, 2)
    assert [i for group in groups for chunk in group for i in chunk] == list(range(82))
    assert max(map(len, groups)) == module.LARGEST // 2
    assert max(map(len, _groups(chunks[:10], 2))) == 1  # rather all actors than large groups
    assert _groups([], 2) == []


def test_a_predictor_is_sent_without_the_maps_that_it_keeps(tmp_path):
    names = sorted(write_photographs(tmp_path, 2, size=(64, 48)))
    matcher = PairMatcher.from_pretrained(device="cpu", size=64)
    small = len(pickle.dumps(matcher))
    pair = tmp_path / names[0], tmp_path / names[1]
    expected = matcher(*pair)
    data = pickle.dumps(matcher)
    assert len(data) < 1.01 * small
    again = pickle.loads(data).to("cpu")(*pair)
    np.testing.assert_array_equal(again.keypoints1, expected.keypoints1)


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001", "127.0.0.1:port"])
def test_what_is_no_address(address, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs Ray, of the extra 'cluster'")
    told = refusal(OptionError, Cluster.connect, address)
    assert "is HOST:PORT, auto or local, got" in told
    write_photographs(tmp_path / "photos", 2, size=(64, 48))
    monkeypatch.chdir(tmp_path)
    assert "HOST:PORT" in refused("sfm", "photos", "out", "--cluster", address)


def test_no_cluster_at_an_address():
    pytest.importorskip("ray", reason="needs Ray, of the extra 'cluster'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = refusal(OptionError, Cluster.connect, f"127.0.0.1:{port}")
    assert f"no Ray cluster at 127.0.0.1:{port}" in told and "ray start --head" in told


def test_options_that_exclude_each_other():
    given = ("evaluate", "match", "--data", "pairs.txt", "--cluster", "auto", "--workers", "2")
    assert "--cluster excludes --workers" in refused(*given)
    assert "--cluster is for --pairs FILE" in refused("match", "a", "b", "--cluster", "auto")


# ---- on a cluster of two nodes


class Nodes:
    """A cluster of a head and another node, with one CPU each."""

    def __init__(self, start):
        small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        self.cluster = start(initialize_head=True, head_node_args=small)
        self.small = small
        self.second = None
        self.complete()

    def complete(self):
        if self.second is None:
            self.second = self.cluster.add_node(**self.small)
            self.cluster.wait_for_nodes()

    def remove(self):
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None

    @property
    def address(self):
        return self.cluster.address


@pytest.fixture(scope="module")
def nodes():
    testing = pytest.importorskip("ray.cluster_utils", reason="needs Ray, of the extra 'cluster'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(**ALONE).items():
            patch.setenv(name, value)
        started = Nodes(testing.Cluster)
        yield started
        started.cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs and pairs, and what one machine makes of them."""
    folder = tmp_path_factory.mktemp("cluster")
    names = sorted(write_photographs(folder / "photos", COUNT))
    pairs = [f"{a} {b}" for i, a in enumerate(names) for b in names[i + 1 :]]
    (folder / "pairs.txt").write_text("\n".join([*pairs, "00.png missing.png"]) + "\n")
    done = command(*words(folder, folder / "alone"), **ALONE)
    assert done.returncode == 1 and "missing.png" in done.stderr, done.stderr
    return folder


def words(folder, out):
    given = ["match", "--pairs", folder / "pairs.txt", "--images", folder / "photos"]
    return [*given, "--save", out, "--size", SIZE, "--device", "cpu"]


def start(*options):
    return subprocess.Popen(
        [sys.executable, "-c", START, *map(str, options)],
        env=environment(**ALONE),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def workers():
    """Processes of actors, by the title that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:  # it has ended
            continue
        if title.startswith(b"ray::_Worker"):
            found.append(int(path.parent.name))
    return found


def done(out):
    return sorted(out.glob("*.npz"))


def of(folder):
    return {path.name: data for path, data in contents(folder).items()}


def check_equal(out, folder):
    assert of(out) == of(folder / "alone") and len(done(out)) == COUNT * (COUNT - 1) // 2


@pytest.mark.slow
def test_the_same_files_as_without_it(nodes, folder, tmp_path):
    run = command(*words(folder, tmp_path / "out"), "--cluster", nodes.address, **ALONE)
    assert run.returncode == 1, run.stderr
    assert "room for 2 actors with 1 CPU thread each" in run.stderr and "missing.png" in run.stderr
    assert "10 done, 1 failed" in run.stdout
    check_equal(tmp_path / "out", folder)
    again = command(*words(folder, tmp_path / "out"), "--cluster", nodes.address, **ALONE)
    assert "10 already done" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_a_worker_is_killed_or_a_node_removed(nodes, folder, tmp_path, lost):
    nodes.complete()
    running = start(*words(folder, tmp_path / "out"), "--cluster", nodes.address)
    wait_for(lambda: len(workers()) == 2 and len(done(tmp_path / "out")) >= 2)
    if lost == "node":
        nodes.remove()
    assert running.poll() is None and len(done(tmp_path / "out")) < 9
    if lost == "worker":
        os.kill(workers()[0], signal.SIGKILL)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 1 and "10 done, 1 failed" in said, said
    check_equal(tmp_path / "out", folder)


@pytest.mark.slow
def test_a_driver_is_killed_and_started_again(nodes, folder, tmp_path):
    nodes.complete()
    running = start(*words(folder, tmp_path / "out"), "--cluster", nodes.address)
    wait_for(lambda: len(done(tmp_path / "out")) >= 3)
    running.kill()
    running.wait()
    there = {path: path.stat().st_mtime_ns for path in done(tmp_path / "out")}
    assert 3 <= len(there) < 10
    run = command(*words(folder, tmp_path / "out"), "--cluster", nodes.address, **ALONE)
    assert f"{len(there)} already done" in run.stdout, run.stderr
    check_equal(tmp_path / "out", folder)
    assert {path: path.stat().st_mtime_ns for path in there} == there
    wait_for(lambda: not workers())


@pytest.mark.slow
def test_sfm(nodes, folder, tmp_path):
    nodes.complete()
    given = ["sfm", folder / "photos", "--focal", 260, "--size", 256, "--device", "cpu"]
    alone = command(*given, tmp_path / "alone", **ALONE)
    shared = command(*given, tmp_path / "shared", "--cluster", nodes.address, **ALONE)
    assert alone.returncode == shared.returncode == 0, shared.stderr
    assert of(tmp_path / "alone" / "matches") == of(tmp_path / "shared" / "matches")
    assert rows(tmp_path / "alone") == rows(tmp_path / "shared")


@pytest.mark.slow
def test_evaluate(nodes, folder, tmp_path):
    nodes.complete()
    line = " ".join(["1 0 0 0 1 0 0 0 1"])
    (tmp_path / "pairs.txt").write_text(
        "".join(f"0{i}.png 0{j}.png {line}\n" for i, j in ((0, 1), (1, 2)))
    )
    given = ["evaluate", "match", "--data", tmp_path / "pairs.txt", "--images", folder / "photos"]
    given += ["--size", SIZE, "--device", "cpu", "--json"]
    alone = command(*given, "--save", tmp_path / "alone", **ALONE)
    shared = command(*given, "--save", tmp_path / "shared", "--cluster", nodes.address, **ALONE)
    assert alone.returncode == shared.returncode == 0, shared.stderr
    assert alone.stdout == shared.stdout and of(tmp_path / "alone") == of(tmp_path / "shared")


class Deadly(Predictor[Result]):
    """Ends its process at the second sample."""

    task = TASK
    batch = 1

    def __init__(self, folder):
        import torch

        super().__init__(torch.nn.Identity(), {"model": "none"}, device="cpu")
        self.folder = folder

    def preprocess(self, *images):
        return Prepared((), (), key=images)

    def forward(self, batch):
        (item,) = batch
        (self.folder / f"{item.key[0]}-{time.monotonic_ns()}").touch()
        if item.key[0] == "b":
            os._exit(9)
        return ["result"]

    def finish(self, raw, item):
        return Result()


@pytest.mark.slow
def test_a_sample_that_ends_its_worker_is_tried_again_and_then_told(nodes, tmp_path):
    import ray

    nodes.complete()
    try:
        cluster = Cluster.connect(nodes.address)
        told = refusal(OptionError, Cluster.connect, "127.0.0.1:1")
        assert f"is connected to the Ray cluster at {nodes.address}" in told
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        source = Items(list("abc"), [(x,) for x in "abc"])
        outcomes = cluster.run(Deadly(tmp_path), source, [[0], [1], [2]])
        told = refusal(OptionError, list, outcomes)
    finally:
        ray.shutdown()
    assert "4 actors of the Ray cluster ended at the same samples" in told
    assert len(list(tmp_path.glob("a-*"))) == 1
    assert len(list(tmp_path.glob("b-*"))) == module.RETRIES + 1
