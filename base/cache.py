"""The folder for files that this project can make or fetch again: the downloaded text, the built kernels."""

import tempfile
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Returns this project's cache folder, which may not exist yet. On Linux it is ~/.cache/minigpt.

    platformdirs knows each platform's custom. A user without a home folder gets a temporary folder.
    """
    try:
        return user_cache_path("minigpt", appauthor=False, opinion=False).expanduser()
    except RuntimeError:  # no home: newer versions of platformdirs raise it, older ones leave "~" to expanduser
        return Path(tempfile.gettempdir(), "minigpt")
