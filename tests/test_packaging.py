"""What a wheel contains, which way imports point, and what an import must not need."""

import ast
import itertools
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE_FOLDERS = ("selfspec", "heads", "kernels", "app", "recipes")
LINKS = PACKAGE_FOLDERS[1:]


def imported_modules(file: Path) -> set[str]:
    """Dotted names that a file imports anywhere, within functions and for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_kernels_has_no_init():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide the package of that name from transformers"


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative(name):
    link = ROOT / "selfspec" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


def test_nothing_is_imported_by_a_bare_folder_name():
    for file in ROOT.rglob("*.py"):
        if not any(part.startswith(".") or part == "build" for part in file.relative_to(ROOT).parts):
            bare = {name for name in imported_modules(file) if name.split(".")[0] in ("heads", "kernels")}
            assert not bare, f"{file.relative_to(ROOT)} imports {sorted(bare)}: write selfspec.{{heads,kernels}}"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_library_imports_without_the_optional_packages():
    run_python(
        "import sys\n"
        "for name in 'triton gradio fastapi uvicorn accelerate datasets datasketch peft torchao'.split():\n"
        "    sys.modules[name] = None\n"
        "import selfspec, selfspec.heads, selfspec.cli.data, selfspec.traffic.masking, selfspec.traffic.clean\n"
        "from selfspec import Target, SamplingParams, load_drafter, generate, generate_iter, stream\n"
    )


def test_library_leaves_the_terminal_packages_alone():
    loaded = run_python("import sys, selfspec; selfspec.generate; print('typer' in sys.modules)")
    assert loaded.strip() == "False"


def test_command_line_starts_without_torch():
    loaded = run_python("import sys, selfspec.cli.main; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded.strip() == "False False"


def test_every_pin_is_exact_and_covers_the_dependencies():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {requirement.split("[")[0].split(">")[0].split("=")[0] for requirement in requirements}
    assert names - pins.keys() - {"selfspec"} == set()


def test_wheel_holds_every_module_and_data_file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    expected = set()
    for folder in PACKAGE_FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            relative = file.relative_to(ROOT)
            if file.is_file() and "__pycache__" not in relative.parts:
                copy = source / relative
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
                expected.add(str(relative) if folder == "selfspec" else f"selfspec/{relative}")
    for name in LINKS:
        (source / "selfspec" / name).symlink_to(Path("..", name))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    [wheel] = tmp_path.glob("selfspec-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("selfspec/")}
    assert packed == expected

    # Without a checkout, recipes are modules.
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "selfspec.recipes.train_medusa", "--help"]
    path = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    shown = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "--num_heads" in shown.stdout, shown.stderr
