"""The folder for files that can be made or fetched again."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from base.cache import cache_folder

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="another platform has another custom")


@linux_only
def test_the_cache_is_in_the_home_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder() == Path("/home/ada/.cache/minigpt")


@linux_only
@pytest.mark.parametrize("home", ["/home/ada", None])
def test_xdg_cache_home_comes_first(monkeypatch, home):
    without_home(monkeypatch) if home is None else monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder() == Path("/scratch/minigpt")


@pytest.mark.skipif(os.name != "posix", reason="Windows does not ask the user database")
def test_a_user_without_a_home_gets_a_temporary_folder(monkeypatch):
    without_home(monkeypatch)
    assert cache_folder() == Path(tempfile.gettempdir(), "minigpt")


def without_home(monkeypatch) -> None:
    """Makes the user one that neither the environment nor the user database gives a home, as in some containers."""

    def unknown_user(_):
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown_user)
