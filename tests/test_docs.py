"""The README and the documentation work: their Python runs, their commands and names exist.

The Python blocks of a page run in order, in a folder as the how-to guides assume it: drawn images
in `photos/`, and the weights of a short training in `runs/photos/`. Blocks that need a server are
fenced as `py`; `tests/web` runs the example that they are taken from.
"""

import dataclasses
import importlib
import re
import runpy
import shlex
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest
import typer
from markupsafe import Markup

from bcosvit import DenseNetConfig, ModelConfig, list_models
from bcosvit.cli import app
from bcosvit.data.scenes import Scenes
from bcosvit.paper.charts import Chart
from bcosvit.paper.schedule import schedule_names
from bcosvit.settings import parse_settings
from bcosvit.train import RECIPES, Recipe, train
from tests.conftest import registries

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
CARDS = sorted(ROOT.glob("src/bcosvit/pretrained/*.md"))
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPERATOR = re.compile(r"[&|;<>]+")
SIZE = 32


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the how-to guides assume it."""
    folder = tmp_path_factory.mktemp("workplace")
    drawn = Scenes("train", size=SIZE, length=320)
    for index in range(len(drawn)):
        scene = drawn[index]
        path = folder / "photos" / drawn.classes[scene.label] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene.image.save(path)
    drawn[0].image.save(folder / "photo.jpg")
    settings = {"epochs": 6, "learning_rate": 6e-3, "explain_every": 0}
    tiny = {"model.depth": 1, "model.image_size": SIZE}
    out = folder / "runs" / "photos"
    train(folder / "photos", out=out, recipe="quick", settings={**settings, **tiny})
    return folder


PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]
# Traces a whole model; `tests/export` has the same in small.
SLOW = {"docs/howto/export.md"}


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] * (name(page) in SLOW))
        for page in PYTHON_PAGES
    ],
)
def test_python_runs(page, workplace, tmp_path, monkeypatch):
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # Dataclasses look their module up.
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_pages_show_python():
    shown = {name(page) for page in PYTHON_PAGES}
    assert {"README.md", "docs/quickstart.md", "docs/idea.md"} <= shown
    extending = {"own-layer", "own-method", "own-metric", "own-model"}
    assert {f"docs/howto/{page}.md" for page in extending} <= shown


NAME = re.compile(r"(?<![\w./:@-])bcosvit(?:\.[A-Za-z_]\w*)+(?![\w-])")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
# Metadata of exported files has keys that look like names.
KEY = re.compile(r"bcosvit\.(classes|input)(?=[`\"])")


def names(text: str) -> set[str]:
    """Every dotted name of the library that a page mentions, its code included."""
    found = {*NAME.findall(KEY.sub("", text)), *DIRECTIVE.findall(text)}
    return found - {registry.group for registry in registries()}


def resolve(dotted: str) -> object:
    """The module or object of this name, as ``import`` and attribute access find it."""
    parts = dotted.split(".")
    found: object = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:count]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", *CARDS, NOTEBOOK], ids=name)
def test_names_resolve(page):
    text = page.read_text()
    wrong = {}
    for dotted in names(text):
        try:
            resolve(dotted)
        except (ImportError, AttributeError) as error:
            wrong[dotted] = str(error)
    assert wrong == {}


def test_names_are_found():
    found = names("`bcosvit.explain`, bcosvit.nn.AvgPool2d. `bcosvit.no.such(1)`\n::: bcosvit.ops")
    assert found == {"bcosvit.explain", "bcosvit.nn.AvgPool2d", "bcosvit.no.such", "bcosvit.ops"}
    with pytest.raises(ImportError):
        resolve("bcosvit.no.such")
    reference = {name for page in PAGES for name in names(page.read_text())}
    assert len(reference) > 100


def commands(page: Path) -> list[tuple[str, ...]]:
    """Every `bcosvit ...` of a page's shell blocks, as words."""
    found = []
    for block in blocks(page, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"(^|\s)bcosvit\s+[a-z]", line):
                lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
                lexer.whitespace_split = True
                words = list(lexer)
                start = words.index("bcosvit") + 1
                ends = [at for at in range(start, len(words)) if OPERATOR.fullmatch(words[at])]
                found.append(tuple(words[start : min(ends, default=None)]))
    return found


FIELDS = {
    field.name
    for config in (Recipe, ModelConfig, DenseNetConfig)
    for field in dataclasses.fields(config)
}
COMMAND_PAGES = [page for page in PAGES if commands(page)]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name)
def test_commands_exist(page):
    known = typer.main.get_command(app).commands
    for words in commands(page):
        assert words[0] in known, words
        # Parses as the command line does, and raises where it would; nothing is run.
        given = known[words[0]].make_context(words[0], list(words[1:])).params
        # Names that the command would look up only when it runs.
        recipes = (None, *(schedule_names() if words[0] == "reproduce" else RECIPES))
        assert given.get("recipe") in recipes, words
        assert given.get("model") in (None, *list_models()), words
        for key in parse_settings(given.get("settings") or []):
            assert key.rpartition(".")[2] in FIELDS, words


def test_every_command_is_shown():
    shown = {words[0] for page in COMMAND_PAGES for words in commands(page)}
    assert set(typer.main.get_command(app).commands) == shown


def test_extras_and_targets_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    shown = re.findall(r"pip install '(?:\.|bcosvit)\[([\w,]+)\]'", text)
    _, _, after = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = re.findall(r"^(\w+) = \[", after.partition("\n[")[0], re.MULTILINE)
    assert {extra for each in shown for extra in each.split(",")} <= set(extras)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= set(targets)


@pytest.mark.slow
def test_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=tmp_path)
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2


def test_notebook_is_stored_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_plots_of_results_show_the_tables_with_their_intervals(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "docs" / "figures" / "results.py"))
    estimate, main = script["estimate"], script["main"]
    found = estimate("**−0.03** [−0.12, 0.06] (LibraGrad)")
    assert (found.mean, found.low, found.high) == (-0.03, -0.12, 0.06)
    assert estimate("76.4 % [75.0, 77.7]").high == 77.7
    assert estimate("0.5").low == 0.5
    assert estimate("88.5 %").low < 88.5
    assert estimate("not measured") is None
    drawn = {}

    def record(name, caption, axis, groups, **options):
        drawn[name] = groups
        return Chart(name=name, caption=caption, inline=Markup(), svg=b"", png=b"")

    monkeypatch.setitem(main.__globals__, "FOLDER", tmp_path)
    monkeypatch.setitem(main.__globals__, "grouped_bars", record)
    main()
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name, groups in drawn.items():
        assert f"figures/{name}.svg" in page
        assert (ROOT / "docs" / "figures" / f"{name}.svg").exists()
        assert groups and all(groups.values()), name
        with_intervals = [e for bars in groups.values() for e in bars.values() if e.low < e.high]
        assert with_intervals or name == "attention"


def test_figures_can_be_drawn_again(tmp_path, monkeypatch):
    figures = runpy.run_path(str(ROOT / "docs" / "figures" / "make.py"))
    for draw in ("two_vectors", "six_channels"):
        monkeypatch.setitem(figures[draw].__globals__, "FOLDER", tmp_path)
        figures[draw]()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"two-vectors.svg", "six-channels.svg"}
    assert drawn <= {path.name for path in (ROOT / "docs" / "figures").iterdir()}
