"""Where this project keeps what it can make or fetch again: the download, the built kernels."""

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for this project, by the platform's custom; a temporary one for a user without a home."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir())
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "minigpt"
