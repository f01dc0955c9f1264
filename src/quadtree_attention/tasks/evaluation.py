# SPDX-License-Identifier: Apache-2.0
"""The two loops: `predict` runs a network on a source, `evaluate` scores the written predictions.

Scores can be recomputed from the same predictions without the network, and
predictions of other programs are scored in the same way.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from quadtree_attention import checks
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.tasks.cluster import Cluster, Outcome
from quadtree_attention.tasks.contract import Prepared, Result, Scores, Source, Task, get_task
from quadtree_attention.tasks.predictor import Predictor, prepare
from quadtree_attention.tasks.readers import match_classes, refuse_if, summary
from quadtree_attention.tasks.store import Store


def predict(
    predictor: Predictor[Any],
    source: Source[Any],
    *,
    store: Store | None = None,
    batch: int | None = None,
    workers: int = 0,
    progress: bool | None = None,
    cluster: Cluster | None = None,
) -> Iterator[Outcome]:
    """Yield the index and the result, or the error, of every sample missing in the store.

    Several processes may share a store.

    Args:
        predictor: The predictor.
        source: The samples.
        store: Store that results are also written to.
        batch: Batch size; None: default of the predictor.
        workers: Processes that read and prepare images; 0: main process.
        progress: Show a progress bar; None: in a terminal.
        cluster: Cluster that runs the network; None: this process. Actors read images themselves;
            results have no images and arrive in the order of completion.
    """
    checks.count(1, batch=batch)
    checks.count(0, workers=workers)
    left = [i for i in range(len(source)) if store is None or not store.has(source.name(i))]
    step = batch or predictor.batch
    if cluster is None:
        samples = _Samples(source, predictor.preprocess, left, store)
        found = _predict_here(predictor, samples, step, min(workers, os.cpu_count() or 1))
    else:
        chunks = [left[i : i + step] for i in range(0, len(left), step)]
        found = cluster.run(predictor, source, chunks)
    with _progress(None, len(left), predictor.task.item, progress) as bar:
        for outcomes in found:
            if store is not None:
                store.put({source.name(i): x for i, x in outcomes if isinstance(x, Result)})
            bar.update(len(outcomes))
            yield from outcomes
    if store is not None:
        store.finish()


def _predict_here(
    predictor: Predictor[Any], samples: "_Samples", step: int, workers: int
) -> Iterator[list[Outcome]]:
    loader: Any = DataLoader(samples, batch_size=None, num_workers=workers) if len(samples) else ()
    remaining = iter(loader)
    while chunk := list(islice(remaining, step)):
        yield predictor.run_good({i: item for i, item in chunk if item is not None})


def evaluate(
    task: str,
    weights: StrPath | None = None,
    *,
    data: StrPath,
    split: str = "val",
    predictions: StrPath | None = None,
    save: StrPath | None = None,
    reader: Mapping[str, Any] | None = None,
    thresholds: Mapping[str, Any] | None = None,
    batch: int | None = None,
    workers: int = 0,
    strict: bool = False,
    force: bool = False,
    cluster: str | None = None,
    **options: Any,
) -> Scores:
    """Score a predictor, or predictions on disk, against the ground truth of a data set.

    Args:
        task: "classify", "match", "stereo", "detect" or "segment".
        weights: Argument of the task's `from_pretrained`; None: the packaged weights.
        data: Root of the data set.
        split: Split of the data set.
        predictions: Score these instead of running a network: predictions saved by an earlier
            call, or files of another program in the task's format.
        save: Path of the predictions, which are reused if all settings are the same; None:
            `<task>-predictions` in the current folder.
        reader: Options of the task's `open_source`, such as the layout of the data.
        thresholds: Options of the task's metric.
        batch: Batch size.
        workers: Processes that read images; 0: main process.
        strict: Raise at the first unusable sample instead of skipping it.
        force: Recompute predictions, and replace predictions of other settings.
        cluster: Address of a Ray cluster that runs the network, see `Cluster.connect`; `device` is
            then that of its actors. None: this machine.
        **options: Options of `from_pretrained`.

    Raises:
        OptionError: An option is not accepted, or `save` contains other files.
        CheckpointError: The weights cannot be read, or their classes do not fit the data.
        DataError: The data or the predictions cannot be read.

    Example:
        scores = evaluate("match", data="pairs.txt", reader={"images": "photos"})
        print(scores.mean["pose_poselib_auc10"], scores.to_text())
    """
    chosen = get_task(task)
    if not isinstance(data, str | os.PathLike):
        raise OptionError(f"data must be the path of a data set, got {data!r}; pass a path")
    opened, metric = chosen.load("open_source"), chosen.load("metric")
    for name in reader or {}:
        accepted = [n for n in checks.keywords(opened) if n not in ("split", "strict")]
        checks.known(name, accepted, "an option of the reader")
    for name in thresholds or {}:
        checks.known(name, checks.keywords(metric), "a threshold")
    source: Source[Any] = opened(data, split=split, strict=strict, **(reader or {}))
    skipped = list(source.skipped)
    metric(source, **(thresholds or {}))  # refuses thresholds before a network runs
    if predictions is None:
        made = chosen.load("predictor")
        connected = None
        if cluster is not None:
            connected = Cluster.connect(cluster, options.pop("device", "auto"))
            options["device"] = "cpu"
        predictor = made.from_pretrained(weights, **{**made.scored_with, **options})
        if source.classes is not None and (names := getattr(predictor, "names", None)) is not None:
            match_classes(source.classes, names)
        if save is None:
            codec = chosen.load("codec")
            save = f"{task}-predictions{codec.suffixes[0] if codec.together else ''}"
        how: dict[str, Any] = {"batch": batch, "workers": workers, "cluster": connected}
        checks.count(1, batch=batch)  # before anything is written
        checks.count(0, workers=workers)
        store = make_store(predictor, source, save, force=force, cluster=connected)
        outcomes = predict(predictor, source, store=store, **how)
        unread = [refuse_if(strict, found) for _, found in outcomes if isinstance(found, Exception)]
        if unread and len(unread) == len(source):
            raise DataError(
                f"none of {len(source)} {chosen.item}s can be read, the first because: {unread[0]}"
            )
        skipped += unread
    elif weights is not None or save is not None or cluster is not None or options:
        raise OptionError(
            "predictions are scored without a network; leave out weights, save and the options of "
            "the predictor, or predictions"
        )
    else:
        store = Store.open(predictions, chosen, source)
    return score(chosen, source, store, thresholds=thresholds, skipped=skipped, strict=strict)


def make_store(
    predictor: Predictor[Any],
    source: Source[Any],
    save: StrPath,
    *,
    suffix: str | None = None,
    force: bool = False,
    cluster: Cluster | None = None,
) -> Store:
    """Open a store for the results of a predictor; see `Store.create`."""
    settings = predictor.settings() if cluster is None else cluster.settings(predictor)
    classes = getattr(predictor, "names", None)
    own: dict[str, Any] = {"classes": classes, "suffix": suffix, "force": force}
    return Store.create(save, predictor.task, settings, source, **own)


def score(
    task: Task,
    source: Source[Any],
    store: Store,
    *,
    thresholds: Mapping[str, Any] | None = None,
    skipped: Sequence[str] = (),
    strict: bool = False,
) -> Scores:
    """Score the results in a store.

    Raises:
        DataError: There are no results of these samples, or one is damaged.
    """
    metric = task.load("metric")(source, classes=store.classes, **(thresholds or {}))
    skipped, missing, no_truth = list(skipped), list[str](), list[str]()
    for index in _progress(range(len(source)), len(source), task.item):
        name = source.name(index)
        found = store.get(name)
        if found is None:
            missing.append(name)
        try:
            truth = source.truth(index)
        except DataError as error:
            no_truth.append(refuse_if(strict, error))
            continue
        metric.update(name, truth, found)
    if len(missing) == len(source):
        such = f", such as {missing[0]}" if missing else ""
        raise DataError(
            f"{store.path} has predictions for none of {len(source)} {task.item}s{such}; pass "
            f"predictions that quadtree evaluate {task.name} has saved for this data set"
        )
    if strict and missing:
        raise DataError(
            f"{store.path} lacks {len(missing)} of {len(source)} {task.item}s: {summary(missing)}; "
            "predict them, or leave out --strict"
        )
    if len(no_truth) == len(source):
        raise DataError(
            f"none of {len(source)} {task.item}s can be scored, the first because: {no_truth[0]}"
        )
    scores: Scores = metric.compute()
    skipped += [*no_truth, *scores.skipped]
    return replace(scores, skipped=skipped, missing=missing, settings=store.settings)


@dataclass(eq=False)
class _Samples(Dataset[Any]):
    """Dataset of prepared samples. Errors are returned, since workers add their traceback."""

    source: Source[Any]
    preprocess: Callable[..., Prepared]
    indices: Sequence[int]
    store: Store | None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, Prepared | Exception | None]:
        index = self.indices[place]
        # Checked again: another process may have written it in the meantime
        if self.store is not None and self.store.has(self.source.name(index)):
            return index, None
        return index, prepare(self.preprocess, self.source, index)


def _progress(items: Iterable[Any] | None, total: int, item: str, shown: bool | None = None) -> Any:
    """Yield items with a progress bar in a terminal."""
    from tqdm import tqdm

    disable = None if shown is None else not shown
    return tqdm(items, total=total, unit=item, leave=False, disable=disable)
