"""Download from the Hugging Face Hub: configuration, tokenizer and weights of models, and adapters.

Weights are safetensors; those of draft heads may be pickled, which is how most are published.

The files are in the cache of huggingface_hub (HF_HOME), shared with other tools. Its progress bars
and tracebacks are replaced by progress lines, or one error with the reason.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, errors, get_cached_repo_tree, snapshot_download
from tqdm.auto import tqdm

from specdec.models.weights.weight_files import SAFETENSORS, SAFETENSORS_INDEX, indexed_names
from specdec.types.errors import ModelNotFoundError

if TYPE_CHECKING:
    Tqdm = tqdm[Any]
else:
    Tqdm = tqdm  # generic in its stubs only

Progress = Callable[[str], None]

TIMEOUT_S = 10.0
_UNREAD = "consolidated*.safetensors"  # the same weights under Mistral's names
_FAULTS = (
    errors.HTTPError,  # type: ignore[attr-defined] # the base of what its HTTP client raises
    errors.HFValidationError,
    errors.XetDownloadError,
    OSError,
    RuntimeError,  # from its downloader in Rust
)


@dataclass(frozen=True)
class FilePatterns:
    """The files of a repository that are downloaded.

    A pattern without a folder matches no file in one, such as training logs or other formats.

    pickled: weights, in place of safetensors where there are none.
    """

    files: tuple[str, ...]
    pickled: tuple[str, ...]

    def wanted(self, may_be_pickled: bool, names: Collection[str]) -> list[str]:
        """Return those of a repository's files that are downloaded."""
        found = [name for name in names if _is_wanted(name, self.files)]
        if may_be_pickled and not any(map(_is_weight_file, found)):
            found += [name for name in names if _is_wanted(name, self.pickled)]
        return found


MODEL_FILES = FilePatterns(
    (
        *("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*.jinja"),
        *("*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    ),
    ("*.bin", "*.bin.index.json", "*.pt", "*.pth"),
)
ADAPTER_FILES = FilePatterns(
    ("adapter_config.json", "adapter_model.safetensors"), ("adapter_model.bin",)
)
"""Files of a LoRA adapter; its repository may hold checkpoints and a merged model too."""


def fetch(
    repo_id: str,
    progress: Progress,
    revision: str | None = None,
    *,
    may_be_pickled: bool = False,
    patterns: FilePatterns = MODEL_FILES,
) -> Path:
    """Return the local snapshot of `repo_id`; download the files that are missing.

    revision: a branch, a tag or a commit; None for the main branch.
    may_be_pickled: whether to take pickled weights where the repository has no safetensors.
    A cached copy is used if the Hub does not respond within TIMEOUT_S seconds, or if its files
    cannot be stored, as in a read-only cache. Without one ModelNotFoundError is raised, with the
    reason in one line.
    """
    cached = partial(_cached, repo_id, revision, partial(patterns.wanted, may_be_pickled))
    try:
        # This request comes first because it is the only one with a time-out.
        info = HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT_S
        )
    except _FAULTS as error:
        return cached(error)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
    wanted = patterns.wanted(may_be_pickled, sizes)
    source = f"{repo_id}@{revision}" if revision else repo_id
    try:
        wanted = _without_unread(wanted, repo_id, revision)
        # An index has been fetched to know what is read.
        total_bytes = sum(sizes[name] for name in wanted if name != SAFETENSORS_INDEX)
        progress(f"fetching {source} from the Hugging Face Hub ({total_bytes / 1e6:.0f} MB)")
        bar_class = _reporting_bar(source, total_bytes, progress)
        return _snapshot(repo_id, revision, wanted, tqdm_class=bar_class)
    except _FAULTS as error:
        found = cached(error)
        if found.name == info.sha and not all((found / name).is_file() for name in wanted):
            raise ModelNotFoundError(_reason(error)) from error
        progress(f"warning: using the cached {source}: {_reason(error)}")
        return found


def _without_unread(
    names: Sequence[str], repo_id: str, revision: str | None, **options: Any
) -> list[str]:
    """Return the files without the weights that no decoder reads.

    These are the files that an index does not name; without one, Mistral's beside others.
    """
    weights = {name for name in names if _is_weight_file(name)}
    read = {name for name in weights if not fnmatch(name, _UNREAD)}
    if SAFETENSORS_INDEX in names:
        silent = _reporting_bar("", 0, lambda line: None)
        found = _snapshot(repo_id, revision, (SAFETENSORS_INDEX,), tqdm_class=silent, **options)
        read = weights.intersection(indexed_names(found / SAFETENSORS_INDEX))
    return [name for name in names if name not in weights or name in (read or weights)]


def _is_weight_file(name: str) -> bool:
    return name.endswith(SAFETENSORS)


def _snapshot(repo_id: str, revision: str | None, names: Sequence[str], **options: Any) -> Path:
    return Path(
        snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=[*map(glob.escape, names)],
            etag_timeout=TIMEOUT_S,
            **options,
        )
    )


def _cached(
    repo_id: str,
    revision: str | None,
    wanted: Callable[[Collection[str]], list[str]],
    download_error: Exception,
) -> Path:
    """Return the cached snapshot; an incomplete one is refused if its list of files is cached."""
    local = {"local_files_only": True}
    try:
        try:
            tree = get_cached_repo_tree(repo_id, revision=revision)
        except errors.CachedRepoTreeNotFoundError:
            tree = []
        names = _without_unread(wanted([each.path for each in tree]), repo_id, revision, **local)
        return _snapshot(repo_id, revision, names, **local)
    except (OSError, errors.HFValidationError):
        raise ModelNotFoundError(_reason(download_error)) from download_error


def _is_wanted(path: str, wanted: Sequence[str]) -> bool:
    folders = path.count("/")
    return any(fnmatch(path, each) and folders == each.count("/") for each in wanted)


def _reporting_bar(source: str, total_bytes: int, progress: Progress) -> type[Tqdm]:
    """Return a tqdm class that prints nothing and reports each tenth of `total_bytes` once."""
    reported = 0

    class Bar(Tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            self._num_bytes = 0.0
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal reported
            self._num_bytes += n or 0
            tenths = int(10 * self._num_bytes / max(1, total_bytes))
            if self._counts_bytes and reported < tenths <= 10:
                reported = tenths
                progress(f"fetching {source}: {tenths}0 %")
            return None

    return Bar


def _reason(error: Exception) -> str:
    match error:
        case errors.GatedRepoError():
            return (
                "on the Hugging Face Hub it is gated: accept its terms there, then `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return "on the Hugging Face Hub the model has no such revision"
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            return "the Hugging Face Hub has no such model, or it is private"
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set and the Hub's cache holds no copy"
        case errors.HfHubHTTPError():
            return f"the Hugging Face Hub answered HTTP {error.response.status_code}"
        case OSError(filename=str()):
            return f"a file of the Hugging Face Hub could not be read or stored ({error})"
    fault = " ".join(str(error.__cause__ or error).split())
    return f"the Hugging Face Hub could not be reached ({fault[:200]})"
