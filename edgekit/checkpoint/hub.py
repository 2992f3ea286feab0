"""Downloads from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from edgekit.errors import UsageError

_FILES = ("*.json", "*.jinja", "*.safetensors")


def download(repository: str, revision: str | None) -> Path:
    """Downloads what a checkpoint needs, or finds it in the local cache of the hub.

    Args:
        repository: Its id, such as ``HuggingFaceTB/SmolLM2-135M-Instruct``.
        revision: Branch, tag or commit; the default branch when None.

    Returns:
        A directory whose name is the commit.

    Raises:
        UsageError: There is no such repository or revision, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        # Only the top folder: others hold copies of the weights in other formats.
        snapshot = snapshot_download(
            repository, revision=revision, allow_patterns=list(_FILES), ignore_patterns=["*/*"]
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{repository!r} is neither a local path nor a Hugging Face repository that can be reached: {reason}"
        ) from error
    return Path(snapshot)
