# SPDX-License-Identifier: Apache-2.0
"""Results on disk with a record of their settings; they are reused only if these are the same.

A store is a folder with one file per sample and `settings.json`, or, for tasks whose format holds
all samples, one file and `NAME.settings.json`. The record ("note") is written when the store is
created, so that several processes can fill one store. While a file for all samples is incomplete,
its parts are in `NAME.parts`, from which an interrupted run continues.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from quadtree_attention import files
from quadtree_attention.checks import shown
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath, check_writable, make_folder, write_whole
from quadtree_attention.tasks.contract import Codec, Result, Source, Task, checked_suffix

SCHEMA = 2
NOTE = "settings.json"
FORMAT = ("classes", "suffix")  # entries of a note beside the settings of results
Note = dict[str, Any]


class Store:
    """Results by sample name. Use `create` to write a store, `open` to read one.

    Attributes:
        path: The folder or file.
        settings: Settings of the results; None if unknown.
        classes: Class names of the predictor; None if unknown or without classes.
    """

    def __init__(
        self, path: Path, codec: Codec[Any], note: Note | None, names: Sequence[str] = ()
    ) -> None:
        self.path, self.codec = path, codec
        self._names = names  # samples covered by one file for all samples
        self.settings: Mapping[str, Any] | None = None if note is None else note["settings"]
        self.classes: Sequence[str] | None = None if note is None else note["classes"]
        self.suffix: str = codec.suffixes[0] if note is None else note["suffix"]
        self._read: dict[str, Result] | None = None  # of one file for all samples

    @classmethod
    def create(
        cls,
        path: StrPath,
        task: Task,
        settings: Mapping[str, Any],
        source: Source[Any],
        *,
        classes: Sequence[str] | None = None,
        suffix: str | None = None,
        force: bool = False,
    ) -> Self:
        """Open a store for writing; existing results with the same settings are kept.

        Args:
            path: The folder, or the file for tasks with one file for all samples.
            task: Task of the results.
            settings: Settings that results depend on, as plain data.
            source: The samples.
            classes: Class names of the predictor.
            suffix: Format of the files in a folder; None: the default of the task.
            force: Remove results of other settings, and recompute results of these samples.

        Raises:
            OptionError: It cannot be written, or holds other files; nothing was changed.
        """
        path = Path(path)
        codec = task.load("codec")(source, classes)
        if codec.together:
            suffix = checked_suffix(path, codec)
            check_writable(path)
        samples = {source.name(i): source.identity(i) for i in range(len(source))}
        note = {
            "schema": SCHEMA,
            "task": task.name,
            "settings": json.loads(json.dumps(settings)),
            "classes": None if classes is None else list(classes),
            "suffix": suffix or codec.suffixes[0],
            "samples": json.loads(json.dumps(samples)),
        }
        before = _read_note(path, codec)
        if before is not None and codec.together and path.exists() and not _is_of(path, before):
            before = None  # it may be any file
        if before is None:  # files that are not listed in a note are kept
            there = _note_path(path, codec)
            old = f"; {there.name} is of an older version or damaged" if there.exists() else ""
            if codec.together and path.exists():
                raise OptionError(
                    f"{str(path)!r} exists without a {there.name} that describes it{old}; write "
                    "to another name"
                )
            if not codec.together and path.is_dir() and any(path.iterdir()):
                raise OptionError(
                    f"{path} holds files, and no {NOTE} that says they are results of ours{old}; "
                    "write to another folder"
                )
        else:
            known = cls(path, codec, before, before.get("found", ()))
            note = _merged(path, before, note, known, force=force)
        store = cls(path, codec, note, note.get("found", ()))
        if before is not None and not codec.together:
            new = [name for name in samples if name not in before["samples"]]
            if foreign := next(filter(None, map(store._file, new)), None):
                raise OptionError(
                    f"{path} holds {foreign.name}, which {NOTE} does not list; move it, or write "
                    "to another folder"
                )
        if force and before is not None:
            store._remove(before, list(samples))
        if not codec.together:
            make_folder(path)
            check_writable(path / NOTE)
        if note != before:
            write_whole(_note_path(path, codec), (json.dumps(note, indent=1) + "\n").encode())
        if codec.together:
            make_folder(store._parts)
        return store

    @classmethod
    def open(cls, path: StrPath, task: Task, source: Source[Any] | None = None) -> Self:
        """Open a store for reading, of this package or of another program with the same format.

        Raises:
            DataError: It does not exist, or is of another task.
        """
        path = Path(path)
        codec: Codec[Any] = task.load("codec")(source)
        if not (path.is_file() if codec.together else path.is_dir()):
            kind = "file" if codec.together else "folder"
            raise DataError(
                f"there is no {kind} {str(path)!r} of predictions; quadtree evaluate {task.name} "
                f"WEIGHTS --data ROOT --save {path} makes it"
            )
        note = _read_note(path, codec)
        if note is not None and note["task"] != task.name:
            raise DataError(
                f"{path} holds results of the task {note['task']}, not of {task.name}; pass another"
            )
        if note is not None and codec.together and not _is_of(path, note):
            note = None  # of an earlier file
        if note is not None:
            codec = task.load("codec")(source, note["classes"])
            return cls(path, codec, note, note.get("found", ()))
        # A file of another program covers all samples
        names = [] if source is None else [source.name(i) for i in range(len(source))]
        return cls(path, codec, None, names)

    def has(self, name: str) -> bool:
        """True if the result of a sample exists."""
        return name in self._all() if self.codec.together else self._file(name) is not None

    def get(self, name: str) -> Result | None:
        """Return the result of a sample; None if it does not exist.

        Raises:
            DataError: Its file is damaged.
        """
        if self.codec.together:
            return self._all().get(name)
        path = self._file(name)
        return None if path is None else next(iter(self.codec.decode(path).values()))

    def put(self, found: Mapping[str, Result]) -> None:
        """Write results, every file atomically."""
        if not found:
            return
        if self.codec.together:
            read = self._all()
            part = self._parts / f"{secrets.token_hex(8)}{self.suffix}"
            names = json.dumps(list(found)).encode()
            content = self.codec.encode(found, self.suffix)
            files.write_all({part: content, part.with_suffix(".names"): names})
            read |= self._decoded(part, list(found))  # without images, to save memory
            return
        for name, result in found.items():
            target = self.path / f"{name}{self.suffix}"
            make_folder(target.parent)
            write_whole(target, self.codec.encode({name: result}, self.suffix))

    def finish(self) -> None:
        """Join the parts of one file for all samples; does nothing for folders."""
        if not self.codec.together or not self._parts.is_dir():
            return
        if not any(self._parts.iterdir()):  # nothing was added
            self._parts.rmdir()
            return
        self._read = None
        found = self._all()
        note = _read_note(self.path, self.codec)
        if note is not None and found:
            order = [name for name in note["samples"] if name in found]
            content = self.codec.encode({name: found[name] for name in order}, self.suffix)
            write_whole(self.path, content)
            note |= {"found": order, "sha256": hashlib.sha256(content).hexdigest()}
            note_path = _note_path(self.path, self.codec)
            write_whole(note_path, (json.dumps(note, indent=1) + "\n").encode())
        shutil.rmtree(self._parts, ignore_errors=True)

    @property
    def _parts(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.parts")

    def _all(self) -> dict[str, Result]:
        """Read the results of one file for all samples, and of its parts."""
        if self._read is None:
            self._read = self._decoded(self.path, self._names) if self.path.is_file() else {}
            for part in sorted(self._parts.glob(f"*{self.suffix}")):
                names = json.loads(part.with_suffix(".names").read_bytes())
                self._read |= self._decoded(part, names)
        return self._read

    def _decoded(self, path: Path, names: Sequence[str]) -> dict[str, Result]:
        """Read the results of a file; samples without an entry get `codec.nothing()`."""
        without = {name: nothing for name in names if (nothing := self.codec.nothing()) is not None}
        return without | dict(self.codec.decode(path))

    def _file(self, name: str) -> Path | None:
        """Return the file of a sample, in folders or flat, in any format of the task."""
        suffixes = dict.fromkeys([self.suffix, *self.codec.suffixes])
        places = (
            self.path / f"{place}{suffix}"
            for place in (name, name.replace("/", "__"))
            for suffix in suffixes
        )
        return next((place for place in places if place.is_file()), None)

    def _remove(self, before: Note, names: Sequence[str]) -> None:
        """Remove all results if settings changed, else the results of these samples."""
        same = all(before[key] == getattr(self, key) for key in ("settings", *FORMAT))
        if self.codec.together:
            self.path.unlink(missing_ok=True)
            shutil.rmtree(self._parts, ignore_errors=True)
            return
        for name in names if same else [*before["samples"], *names]:
            path = PurePosixPath(name)
            if not path.is_absolute() and ".." not in path.parts:  # inside of the folder
                for suffix in {self.suffix, before["suffix"]}:
                    (self.path / f"{name}{suffix}").unlink(missing_ok=True)


def _note_path(path: Path, codec: Codec[Any]) -> Path:
    return path.with_suffix(f".{NOTE}") if codec.together else path / NOTE


def _is_of(path: Path, note: Note) -> bool:
    """True if a note belongs to a file."""
    return bool(note.get("sha256") == files.file_sha256(path))


def _read_note(path: Path, codec: Codec[Any]) -> Note | None:
    """Read the note of a store; None if it does not exist or is not supported."""
    try:
        note = json.loads(_note_path(path, codec).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"schema": int, "task": str, "settings": dict, "suffix": str, "samples": dict}
    usable = isinstance(note, dict) and all(isinstance(note.get(k), v) for k, v in kinds.items())
    usable = usable and note["schema"] == SCHEMA and isinstance(note.get("classes"), list | None)
    return note if usable else None


def _merged(path: Path, before: Note, note: Note, there: Store, *, force: bool) -> Note:
    """Merge the note of an existing store, `there`, with the new one.

    Raises:
        OptionError: Its results do not fit, and `force` is not given.
    """
    if before["task"] != note["task"]:
        task = before["task"]
        raise OptionError(f"{path} holds results of the task {task}; write to another name")
    old, new = (_flat(x["settings"]) | {k: x[k] for k in FORMAT} for x in (before, note))
    changes = [
        f"{key} {shown(old.get(key))} there, {shown(new.get(key))} now"
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]
    if changes and not force:
        raise OptionError(
            f"{path} holds results of other settings: {'; '.join(changes)}; write to another name, "
            "or replace them with --force"
        )
    together = there.codec.together
    if changes or (force and together):
        return note
    kept = before["samples"]
    other = [name for name, of in note["samples"].items() if kept.get(name, of) != of]
    other = [name for name in other if there.has(name)]  # failed samples may have been fixed
    if together:  # one file has the samples of one source
        other += [name for name in kept if name not in note["samples"]]
    if other and not force:
        raise OptionError(
            f"{path} holds results of other data as {other[0]}; write to another name, or replace "
            "them with --force"
        )
    return {**before, "samples": {**kept, **note["samples"]}}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the settings of nested options."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return found
