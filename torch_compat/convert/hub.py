"""Upload of an export to a repository of the Hugging Face Hub: `export --push-to-hub OWNER/NAME`.

The token is that of `huggingface_hub`: the environment variable HF_TOKEN, or the login of `hf auth
login`. It is never an option or a setting, so it reaches no log, config or shell history.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from jaxforge.errors import StorageError, UserError

FORMATS = ("hf", "peft")
"""Formats of exports that the Hub understands."""

_OPTION = "--push-to-hub"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_REFUSED = (400, 401, 402, 403, 404, 409)  # status codes; others may succeed later


class HubRepository(NamedTuple):
    """Repository to which an export is uploaded.

    Attributes:
        name: OWNER/NAME.
        private: create the repository as private; an existing one keeps its visibility.
        revision: branch, which is created if it does not exist; None for the main branch.
    """

    name: str
    private: bool = False
    revision: str | None = None

    def check(self) -> None:
        """Check what can be checked before the export: name, network mode and token.

        Raises:
            UserError: one of these is missing or invalid.
        """
        from huggingface_hub import constants, get_token, utils

        try:
            utils.validate_repo_id(self.name)
            is_valid = _NAME.fullmatch(self.name) is not None
        except utils.HFValidationError:
            is_valid = False
        if not is_valid:
            raise UserError(f"{_OPTION} {self.name}: must be OWNER/NAME of a model on the Hub")
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{_OPTION} {self.name}: HF_HUB_OFFLINE forbids uploads. Unset it")
        if not get_token():
            raise UserError(
                f"{_OPTION} {self.name}: no token of the Hugging Face Hub. Set HF_TOKEN to a token "
                "with write access, or run `hf auth login`"
            )

    def note(self) -> str:
        """Return a note for the user before the export."""
        visibility = "a private repository" if self.private else "a repository"
        branch = f", branch {self.revision}" if self.revision else ""
        return f"the result is uploaded to {self.name}{branch} ({visibility} is created if needed)"

    def push(self, directory: Path, message: str) -> str:
        """Create the repository if it does not exist, and upload a directory as one commit.

        Args:
            directory: a complete export.
            message: subject of the commit.

        Returns:
            The address of the commit.

        Raises:
            UserError: the Hub refuses the token or the repository.
            StorageError: the Hub cannot be reached, or the upload fails.
        """
        from huggingface_hub import HfApi, errors

        api = HfApi()
        try:
            api.create_repo(self.name, private=self.private or None, exist_ok=True)
            if self.revision:
                api.create_branch(self.name, branch=self.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=self.name,
                folder_path=directory,
                revision=self.revision,
                commit_message=message,
            )
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            kind = UserError if status in _REFUSED else StorageError
            raise kind(self._failure(directory, error)) from error
        except (OSError, errors.HTTPError) as error:  # of the HTTP library, without a response
            raise StorageError(self._failure(directory, error)) from error
        return str(commit.commit_url)

    def _failure(self, directory: Path, error: Exception) -> str:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        revision = f" --revision {shlex.quote(self.revision)}" if self.revision else ""
        return (
            f"{_OPTION} {self.name}: the upload failed: {reason}. The export is complete in "
            f"{directory}. Upload it by: hf upload {self.name} {shlex.quote(str(directory))} ."
            f"{revision}"
        )
