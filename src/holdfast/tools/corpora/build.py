"""`holdfast data build`: text into token files.

    PREFIX.build/        while it is being built: finished units (see units.py), then the whole
    PREFIX.build.json    what it was built from, and the checksums of the files
    PREFIX.bin, .idx     or PREFIX.npy

Killed at any instruction and run again, a build goes on, and the result is the same to the byte. The files appear by
rename, the one that makes the data set readable last.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from holdfast.data.files import TokenFile
from holdfast.data.megatron import CODES, write_index
from holdfast.errors import Damaged, DataError, UsageError
from holdfast.protocol.wire.stored import decode_file
from holdfast.tools.corpora.build_units import FinishedUnit, Recipe, find_unit, make_unit, writing
from holdfast.tools.corpora.encoding import Encoder, load_encoder
from holdfast.tools.corpora.inputs import Unit, find_files, plan_units
from holdfast.tools.corpora.options import BuildOptions, TokenFormat

UNIT_BYTES = 4 << 20
MOST_UNIT_BYTES = 32 << 20
FEW_UNITS = 4096
_AHEAD = 4
_TICK_S = 1.0
SAFE_PATH = "PYTHONSAFEPATH"
_PR_SET_PDEATHSIG = 1

Progress = Callable[[str, int, int], None]
"""Called about every second with the kind of work, and the number of bytes that are done of the total."""


class Input(msgspec.Struct, frozen=True):
    """A file that a data set was built from."""

    path: str
    size: int
    changed_ns: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The content of PREFIX.build.json."""

    key: str
    """Hash of everything on which the result depends."""
    format: TokenFormat
    tokenizer: str
    vocabulary: int
    """The largest token that can occur, plus one."""
    eod: int | None
    """The token that ends every document."""
    dtype: str
    documents: int
    tokens: int
    skipped: int
    """Lines and rows that could not be read."""
    sums: dict[str, str]
    """XXH3-128 of each file, by its suffix."""
    inputs: tuple[Input, ...]


_descriptions = msgspec.json.Decoder(Description)


def build(
    options: BuildOptions, workers: int = 1, progress: Progress = lambda what, done, total: None
) -> Description:
    """Builds a data set, continues one that was begun, or finds that it exists.

    Args:
        workers: processes that read and encode; with 1, this process does.

    Raises:
        UsageError: the options do not fit; raised before anything is read.
        DataError: a line cannot be read, or the disk cannot be written.
    """
    if options.prefix.suffix in (".bin", ".idx", ".npy"):
        raise UsageError(
            f"--out {options.prefix} must not have a suffix; use {options.prefix.with_suffix('')}"
        )
    recipe, largest = _recipe_of(options)
    files = find_files(options.inputs)
    fitting = sum(file.stat().st_size for file in files) // FEW_UNITS
    unit_bytes = options.unit_bytes or min(max(UNIT_BYTES, fitting), MOST_UNIT_BYTES)
    # All inputs are planned before the output is touched: a file that cannot be read is refused while nothing
    # has been written.
    units = plan_units(files, options.reading, unit_bytes)
    spans = [span for unit in units for span in unit.spans]
    inputs = tuple(dict.fromkeys(Input(span.path, span.size, span.changed_ns) for span in spans))
    # The key covers content, options and format but neither workers nor the size of a pool, since those
    # change nothing in the result. A build that is run again with the same key is finished, or goes on.
    key = xxhash.xxh3_128_hexdigest("".join([options.format, *map(recipe.key_of, units)]).encode())
    output = _Output(options.prefix, options.format)
    # One builder at a time, by a lock of the kernel. It ends with its process, so a killed build leaves
    # nothing that has to be cleared by hand.
    with output.working():
        there = output.finished(key, options.overwrite)
        if there is None:
            made = _make_all(units, recipe, output.work, workers, progress)
            there = output.publish(
                made,
                Description(
                    key=key,
                    format=options.format,
                    tokenizer=options.tokenizer,
                    vocabulary=largest + 1,
                    eod=recipe.eod,
                    dtype=recipe.dtype,
                    documents=sum(unit.documents for unit in made),
                    tokens=sum(unit.tokens for unit in made),
                    skipped=sum(unit.skipped for unit in made),
                    sums={},
                    inputs=inputs,
                ),
                progress,
            )
    return there


def describe(prefix: Path) -> Description | None:
    """The content of PREFIX.build.json; None if there is no such file, or it is not one of ours."""
    try:
        return decode_file(_descriptions.decode, _with(prefix, ".build.json"))
    except (OSError, Damaged):
        return None


def _recipe_of(options: BuildOptions) -> tuple[Recipe, int]:
    """The recipe for encoding, and the largest token."""
    encoder = load_encoder(options.tokenizer)
    eod = _eod_of(options, encoder)
    largest = max(encoder.largest, -1 if eod is None else eod)
    dtype = options.dtype or _smallest_dtype(largest, options.format)
    if dtype not in _dtypes_of(options.format):
        raise UsageError(
            f"--dtype {dtype} is not available for {options.format} files; choose one of "
            f"{', '.join(_dtypes_of(options.format))}"
        )
    if largest > np.iinfo(dtype).max:
        raise UsageError(
            f"--dtype {dtype} holds numbers up to {np.iinfo(dtype).max}, but tokens go up to {largest}; remove "
            f"--dtype, or use {_smallest_dtype(largest, options.format)}"
        )
    return Recipe(
        reading=options.reading,
        tokenizer=options.tokenizer,
        tokenizer_key=encoder.key,
        eod=eod,
        dtype=dtype,
    ), largest


def _eod_of(options: BuildOptions, encoder: Encoder) -> int | None:
    if options.eod is not None and options.eod_id is not None:
        raise UsageError(
            "--eod and --eod-id both specify the token that ends documents; use only one of them"
        )
    if options.eod is None:
        if options.eod_id is not None and not 0 <= options.eod_id < 2**31:
            raise UsageError(f"--eod-id must be between 0 and {2**31 - 1} (got {options.eod_id})")
        return options.eod_id
    number = encoder.number_of(options.eod)
    if number is None:
        raise UsageError(
            f"the tokenizer {options.tokenizer} does not have a token {options.eod!r}; look into its file for the "
            "right one, or use --eod-id NUMBER"
        )
    return number


def _dtypes_of(format_: TokenFormat) -> list[str]:
    """The dtypes in which a data set may be written, the smallest first."""
    if format_ is TokenFormat.MEGATRON:  # Megatron has no uint32
        return [name for name in ("uint8", "uint16", "int32", "int64") if name in CODES]
    return ["uint8", "uint16", "uint32", "int32", "int64"]


def _smallest_dtype(largest: int, format_: TokenFormat) -> str:
    return next(name for name in _dtypes_of(format_) if largest <= np.iinfo(name).max)


def _make_all(
    units: list[Unit], recipe: Recipe, folder: Path, workers: int, progress: Progress
) -> list[FinishedUnit]:
    """Makes the units that are not finished yet; returns all units."""
    itemsize = np.dtype(recipe.dtype).itemsize
    total = sum(unit.nbytes for unit in units)
    # Finished units of an earlier, killed run are found by their keys. Each is complete or absent, so nothing
    # else about that run has to be known.
    missing = [unit for unit in units if find_unit(folder, recipe.key_of(unit), itemsize) is None]
    before = total - sum(unit.nbytes for unit in missing)
    make = _make_here if workers == 1 or len(missing) == 1 else _make_in_processes
    make(missing, recipe, folder, workers, lambda nbytes: progress("reading", before + nbytes, total))
    made = [find_unit(folder, recipe.key_of(unit), itemsize) for unit in units]
    # Somebody may delete files of the folder while the build runs. Publishing the rest would write a data set
    # with a hole.
    if None in made:
        raise DataError(
            f"finished parts were removed from {folder} during the build; run the same command again"
        )
    return [unit for unit in made if unit is not None]


def _make_here(
    units: list[Unit], recipe: Recipe, folder: Path, workers: int, done: Callable[[int], None]
) -> None:
    before = 0
    for unit in units:

        def seen(nbytes: int, before: int = before, most: int = unit.nbytes) -> None:
            done(before + min(nbytes, most))

        make_unit(unit, recipe, folder, seen)
        before += unit.nbytes


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that multiprocessing starts (workers, and its resource tracker) import nothing from the current folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]


@_safe_path()
def _make_in_processes(
    units: list[Unit], recipe: Recipe, folder: Path, workers: int, done: Callable[[int], None]
) -> None:
    others = set(active_children())
    # Spawned, not forked: tokenizers have threads of their own, and a fork copies their locks in whatever
    # state they are.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_die_with_parent)
    try:
        waiting, nbytes = iter(units), 0
        running: dict[Future[None], int] = {}
        while True:
            for unit in islice(waiting, _AHEAD * workers - len(running)):
                running[pool.submit(make_unit, unit, recipe, folder)] = unit.nbytes
            if not running:
                return
            finished, _ = wait(running, _TICK_S, FIRST_COMPLETED)
            for one in finished:
                nbytes += running.pop(one)
                one.result()
            done(nbytes)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that was encoding was killed, perhaps for lack of memory; run the same command again, with "
            "fewer --workers: finished parts are kept"
        ) from error
    except BaseException:
        # The pool's own shutdown waits for units that are being encoded, which takes up to minutes. They are
        # killed, because each unit appears by rename and half of one is worth nothing.
        for process in set(active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _die_with_parent() -> None:
    """Ends the process with its parent. A pool's processes do not notice that their parent was killed, so the kernel
    has to signal them."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole group of processes. If each of them raised, their tracebacks would bury the
    # parent's message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Output:
    """The files of one data set, and the folder that it is built in."""

    def __init__(self, prefix: Path, format_: TokenFormat) -> None:
        self._prefix, self._format = prefix, format_
        self._suffixes = (".bin", ".idx") if format_ is TokenFormat.MEGATRON else (".npy",)
        self.work = _with(prefix, ".build")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Creates and locks the folder for this builder alone; removes unfinished files of a builder that was killed."""
        with writing(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                # On the folder itself, so that no lock file has to be left behind. Without the lock two
                # builders would remove each other's `.part` files as leftovers.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process is already building {self._prefix}; wait for it or end it"
                ) from error
            for left in self.work.glob("*.part"):
                left.unlink()
            try:
                yield
            finally:
                with suppress(OSError):  # already gone, or there is something to continue from
                    self.work.rmdir()
        finally:
            os.close(fd)

    def finished(self, key: str, overwrite: bool) -> Description | None:
        """The data set if it is complete; remaining files of its build are then removed.

        Raises:
            UsageError: there is a different one.
        """
        there = describe(self._prefix)
        ours = there is not None and there.key == key
        paths = [_with(self._prefix, suffix) for suffix in self._suffixes]
        # The description says which data set it is, and the files show that it is complete. The description
        # is renamed before them, so alone it proves nothing.
        if ours and all(path.exists() for path in paths):
            self._clear()
            return there
        others = [path for path in paths if path.exists()]
        if others and not ours and not overwrite:
            raise UsageError(
                f"{others[0]} exists already, built from other input or options; choose another --out, or replace it with "
                "--overwrite"
            )
        return None

    def publish(self, made: list[FinishedUnit], description: Description, progress: Progress) -> Description:
        """Joins the units and gives the files their names."""
        if not description.tokens:
            raise DataError("the input has no tokens: every document is empty")
        dtype = np.dtype(description.dtype)
        sums = {}
        for suffix in self._suffixes:
            with self._written(suffix) as file:
                if suffix == ".idx":
                    write_index(file, dtype, np.concatenate([unit.lengths() for unit in made]))
                else:
                    _write_tokens(file, made, description, suffix, progress)
            sums[suffix] = file.sum
        description = msgspec.structs.replace(description, sums=sums)
        with self._written(".build.json") as file:
            file.write(msgspec.json.format(msgspec.json.encode(description), indent=1) + b"\n")
        *first, last = self._suffixes
        with writing(self._prefix):
            # The file that makes the data set readable goes first and comes last. A reader at any moment
            # finds the old set, none, or the new one, never the index of one with the tokens of another.
            _with(self._prefix, last).unlink(missing_ok=True)
            for suffix in (".build.json", *first):
                self._finished(suffix).rename(_with(self._prefix, suffix))
            # The first renames are durable before the last one begins. A power failure could otherwise keep
            # the last and lose the first.
            _sync(self._prefix.parent)
            self._finished(last).rename(_with(self._prefix, last))
            _sync(self._prefix.parent)
        self._clear()
        return description

    @contextmanager
    def _written(self, suffix: str) -> Iterator[_Summed]:
        path = self._finished(suffix)
        with writing(path), path.open("wb") as file:
            yield _Summed(file)
            file.flush()
            # Synced before the rename. After it a crash could leave the final name with missing bytes, and
            # the description would vouch for them.
            os.fsync(file.fileno())

    def _finished(self, suffix: str) -> Path:
        return self.work / f"whole{suffix}"

    def _clear(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


class _Summed:
    """A file that computes the checksum of the bytes that are written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, xxhash.xxh3_128()

    def write(self, data: bytes) -> int:
        """Writes all of the data."""
        self._digest.update(data)
        return self._file.write(data)

    @property
    def sum(self) -> str:
        """XXH3-128 of the bytes written."""
        return self._digest.hexdigest()


def _write_tokens(
    file: _Summed, made: list[FinishedUnit], description: Description, suffix: str, progress: Progress
) -> None:
    dtype = np.dtype(description.dtype).newbyteorder("<")
    if suffix == ".npy":
        header = {"descr": dtype.str, "fortran_order": False, "shape": (description.tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
    done, total = 0, description.tokens * dtype.itemsize
    for unit in made:
        for block in unit.content():
            file.write(block)
            done += len(block)
            progress("putting together", done, total)


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_AT_ONCE_BYTES = 8 << 20


def verify(file: TokenFile, seen: Callable[[int], None] = lambda nbytes: None) -> Description | None:
    """Reads everything of a data set.

    Args:
        seen: called with the number of bytes that were read.

    Returns:
        The description of its build, if `holdfast data build` made it; only then are there checksums to compare with.

    Raises:
        DataError: it is not complete; the message names the file and the damage.
    """
    description = describe(file.path.with_suffix(""))
    # The index first: it is small, and when it does not fit the tokens there is no use in reading them.
    if file.index is not None:
        try:
            file.index.check(seen)
        except ValueError as error:
            raise DataError(str(error)) from error
    _check_range(file, description, seen)
    if description is not None:
        paths = [file.path, *([file.index.path] if file.index is not None else [])]
        for path in paths:
            if (recorded := description.sums.get(path.suffix)) is not None and recorded != _sum(path, seen):
                raise DataError(
                    f"{path} differs from what `holdfast data build` wrote; copy or build it again"
                )
    return description


def _check_range(file: TokenFile, description: Description | None, seen: Callable[[int], None]) -> None:
    end = description.vocabulary if description is not None else None
    step = _AT_ONCE_BYTES // file.tokens.dtype.itemsize
    for low in range(0, len(file.tokens), step):
        tokens = file.tokens[low : low + step]
        smallest, largest = int(tokens.min()), int(tokens.max())
        # A token outside of the vocabulary indexes beyond the embedding. On a GPU that is an assertion in a
        # kernel, hours into the run and without the name of a file.
        if smallest < 0 or (end is not None and largest >= end):
            wrong = smallest if smallest < 0 else largest
            at = low + int(np.argmax(tokens == wrong))
            limit = "" if end is None else f" of 0 to {end - 1}"
            raise DataError(
                f"{file.path}: token {at} is {wrong}, which is not a token{limit}; build it again"
            )
        seen(tokens.nbytes)


def _sum(path: Path, seen: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_AT_ONCE_BYTES):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()
