"""Which of a run's chores are due after a step: a log row, a validation, a checkpoint."""

from typing import NamedTuple

from settings import Settings


class Due(NamedTuple):
    """Chores of a step. They depend on the step alone, so a resumed run writes the rows of a run without a pause."""

    log: bool
    validate: bool
    save: bool


def due(settings: Settings, done: int) -> Due:
    """The chores when `done` steps are done. All are due at the end; an interval of 0 means: only at the end."""

    def every(interval: int | None) -> bool:
        return done == settings.steps or (bool(interval) and done % interval == 0)

    validate, save = every(settings.eval_every), every(settings.save_every)
    return Due(validate or save or done == 1 or every(settings.log_every), validate, save)
