"""The tree is as DESIGN draws it: imports point one way, and sizes stay within budgets."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each room may import the rooms before it. Rooms of one line may import each other, but in one direction only.
LAYERS = (
    ("base",),
    ("settings",),
    ("csrc", "data"),
    ("amp",),
    ("optim",),
    ("engine",),
    ("model",),
    ("run", "watch"),
    ("request",),
    ("train", "sample"),
    ("benchmarks", "benchmark"),
    ("tests",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
ROOMS_WITHOUT_TORCH = ("base", "data", "optim", "engine", "run", "watch", "request", "settings", "train", "sample")
FILES_WITHOUT_TORCH = ("amp/formats.py", "amp/policy.py", "amp/scaler.py", "model/backends.py", "model/config.py")
LONGEST_FILE = 400
PATH_OF_A_STEP = ("train.py", "settings.py", "data/batches.py", "amp/*.py", "model/minigpt.py")


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith("."))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import in a file, also of those within functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = [(alias.name, node.lineno) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in froms), f"{path}: a relative import"
    named = [(node.module or "", node.lineno) for node in froms]
    return plain + named


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_every_room_has_its_place():
    assert {room(path) for path in sources()} == set(LEVEL)


def test_no_room_imports_one_above_it():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources()
        for module, line in imports(path)
        if LEVEL.get(module.split(".")[0], 0) > LEVEL[room(path)]
    ]
    assert wrong == []


def test_settings_import_base_alone():
    modules = {module.split(".")[0] for module, _ in imports(ROOT / "settings.py")}
    assert modules & set(LEVEL) == {"base"}


@pytest.mark.parametrize("rooms", [rooms for rooms in LAYERS if len(rooms) > 1])
def test_rooms_side_by_side_import_in_one_direction_only(rooms):
    directions = {
        (room(path), module.split(".")[0])
        for path in sources()
        if room(path) in rooms
        for module, _ in imports(path)
        if module.split(".")[0] in rooms and module.split(".")[0] != room(path)
    }
    assert not {(imported, importer) for importer, imported in directions} & directions


def test_code_that_runs_without_torch_never_imports_it():
    files = [path for path in sources() if room(path) in ROOMS_WITHOUT_TORCH]
    files += [ROOT / name for name in FILES_WITHOUT_TORCH]
    files += [path for path in (ROOT / "model").glob("*.py") if path.name.startswith(("numpy_", "engine_"))]
    assert len(files) > 30
    for path in files:
        assert not [line for module, line in imports(path) if module.split(".")[0] == "torch"], path


def test_no_import_gives_a_module_of_ours_another_name():
    renamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name} as {alias.asname}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname and (getattr(node, "module", None) or alias.name).split(".")[0] in LEVEL
    ]
    assert renamed == []


# ---- budgets of size


def test_no_file_is_too_long():
    files = [*sources(), *(ROOT / "csrc").rglob("*.c*"), *(ROOT / "csrc").rglob("*.h")]
    files = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)): lines(path) for path in files if lines(path) > LONGEST_FILE} == {}


def test_train_py_and_its_loop_are_short():
    tree = ast.parse((ROOT / "train.py").read_text(encoding="utf-8"))
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    length = loop.end_lineno - loop.lineno + 1
    print(f"train.py: {lines(ROOT / 'train.py')} lines, train(): {length}")
    assert lines(ROOT / "train.py") <= 200
    assert length <= 60


def test_the_path_of_one_step_is_short():
    sizes = {str(path.relative_to(ROOT)): lines(path) for pattern in PATH_OF_A_STEP for path in ROOT.glob(pattern)}
    print(f"the path of one step: {sum(sizes.values())} lines: {sizes}")
    assert sum(sizes.values()) <= 1500
