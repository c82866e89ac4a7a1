"""The picture of a run, looked at by its colours."""

import math
import warnings

import numpy as np
import pytest

from run.log import Row
from watch.plot import plot

NAN = math.nan
BLUE, ORANGE, RED = (31, 119, 180), (255, 127, 14), (255, 0, 0)  # loss, validation, skipped steps


def rows(count: int = 5, **changes) -> list[Row]:
    """Rows of a run; a change is one value for all of them or a list with one for each."""
    made = []
    for i in range(count):
        row = Row(
            10 * i + 1, 4 / (i + 1), None, None, 1e-3, 0.5, 2.0**15, 0, 768 * i, 9e3, "cpu/library/library", 1.0 * i
        )
        made.append(row._replace(**{k: v[i] if isinstance(v, list) else v for k, v in changes.items()}))
    return made


def picture(path, rows: list[Row]) -> np.ndarray:
    """The pixels of the PNG that plot() wrote."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(rows, path, "stdlib, 809,856 parameters, bf16")
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def has(pixels: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((pixels == colour).all(axis=-1).any())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "loss.png"


def test_a_run_without_validation(path):
    pixels = picture(path, rows())
    assert pixels.shape == (840, 960, 3)
    assert has(pixels, BLUE)
    assert not has(pixels, ORANGE)
    assert not has(pixels, RED)


def test_a_run_with_validation(path):
    validated = rows(val=[None, 3.0, None, NAN, 2.0], val_error=[None, 0.1, None, NAN, NAN])
    assert has(picture(path, validated), ORANGE)


def test_skipped_steps_are_marked_in_red(path):
    assert has(picture(path, rows(skipped=[0, 0, 2, 2, 2], scale=[8.0, 8.0, 2.0, 2.0, 4.0])), RED)


def test_the_best_validation_is_written_beside_it(path, monkeypatch):
    from matplotlib.axes import Axes

    texts = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, at, **kwargs: texts.append((text, at)))
    picture(path, rows(val=[NAN, 3.0, 1.25, NAN, 2.0], val_error=0.1))
    assert texts == [("1.250", (21, 1.25))]


@pytest.mark.parametrize("loss", [[4.0, NAN, 3.0, math.inf, 2.0], NAN, math.inf], ids=["some", "NaN", "inf"])
def test_losses_that_are_no_numbers(path, loss):
    assert picture(path, rows(loss=loss, val=loss, val_error=NAN, grad_norm=NAN)).shape == (840, 960, 3)


@pytest.mark.parametrize("val", [None, 2.0, NAN])
def test_a_single_row(path, val):
    pixels = picture(path, rows(1, val=val, val_error=NAN))
    assert pixels.shape == (840, 960, 3)
    assert has(pixels, ORANGE) == (val is not None)


def test_an_old_picture_is_replaced(path):
    path.write_bytes(b"not a picture")
    picture(path, rows())


def test_a_name_with_dollar_signs_is_drawn_as_it_is(path):
    """As mathtext "$x_$" is an error."""
    plot(rows(), path, "run $x_$")
    assert path.stat().st_size > 0


def test_the_backend_of_a_notebook_stays(path):
    import matplotlib

    before = matplotlib.get_backend(auto_select=False)
    plot(rows(), path)
    assert matplotlib.get_backend(auto_select=False) == before


def test_an_older_log_without_columns_is_drawn_without_them(path):
    assert has(picture(path, rows(val=3.0, val_error=None, skipped=None)), ORANGE)
