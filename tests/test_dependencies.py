"""Dependencies point one way: jhybrid_server -> jhybrid -> kernels_pallas -> jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {"kernels_pallas": set(), "jhybrid": {"kernels_pallas"}, "jhybrid_server": {"jhybrid", "kernels_pallas"}}
FOLDERS = {
    "kernels_pallas": ROOT / "kernels_pallas",
    "jhybrid": ROOT / "jhybrid",
    "jhybrid_server": ROOT / "server" / "jhybrid_server",
}
COMMAND_LINE = {  # starts the server, or what answers its requests, when asked to, and imports it only then
    ROOT / "jhybrid" / "cli.py",
    ROOT / "jhybrid" / "evaluate" / "commands.py",
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_only_what_is_below_them(package: str):
    files = [f for f in FOLDERS[package].rglob("*.py") if f not in COMMAND_LINE]
    assert files
    for file in files:
        ours = {name.split(".")[0] for name in imports(file)} & set(ALLOWED) - {package}
        assert ours <= ALLOWED[package], file


def test_ops_depend_on_jax_alone():
    allowed = {"jax", "numpy", "kernels_pallas", "libtpu"} | sys.stdlib_module_names
    for file in FOLDERS["kernels_pallas"].rglob("*.py"):
        assert {name.split(".")[0] for name in imports(file)} <= allowed, file


def test_a_client_needs_no_jax():
    told = subprocess.run(
        [sys.executable, "-c", "import sys, jhybrid, jhybrid.config; print('jax' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "False"


def test_families_do_not_import_each_other():
    families = {f.stem for f in (ROOT / "jhybrid" / "models").glob("*.py")} - {
        "__init__",
        "family",
        "hf_config",
        "hf_mixers",
        "hf_rope",
    }
    for name in families:
        used = {m.removeprefix("jhybrid.models.") for m in imports(ROOT / "jhybrid" / "models" / f"{name}.py")}
        assert not used & families, name


def test_the_environment_is_read_in_one_place():
    for folder in FOLDERS.values():
        for file in folder.rglob("*.py"):
            assert "os.environ" not in file.read_text() or file.name == "config.py", file
