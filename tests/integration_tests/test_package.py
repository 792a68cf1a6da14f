"""The wheel is an overlay that neither replaces torchtitan nor needs it."""

import subprocess
import sys
import zipfile


def test_the_wheel_is_an_overlay(repository, tmp_path):
    source = tmp_path / "source"
    # A copy without build leftovers, so that only what is committed or new can get in.
    subprocess.run(["git", "clone", "-q", str(repository), str(source)], check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=source, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        assert "vllm.general_plugins" in archive.read(entry_points).decode()
        archive.extractall(tmp_path / "site")
    assert "torchtitan/__init__.py" not in names
    assert {"torchtitan/grpo_train.py", "torchtitan/grpo/inference/embedded/server.py"} <= names
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
    # As in a server's environment: no torchtitan is installed, the folder is a namespace.
    program = "import torchtitan.grpo.system.files as f; print(f.__file__)"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(tmp_path / 'site')!r}); {program}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert str(tmp_path / "site") in result.stdout
    # As a user has it, with torchtitan and without a checkout.
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import torchtitan_grpo as t; print(t.__file__); t.main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "check-gpu", "--list"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2 and "needs a clone of the repository" in result.stderr
    assets = repository / "assets/reverse_digits"
    result = subprocess.run(
        [sys.executable, "-c", program, "init", f"{assets}/model", f"{assets}/train.jsonl"],
        capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert result.stdout.startswith(str(tmp_path / "site")) and "checked  the file" in result.stdout
    assert (tmp_path / "grpo.toml").is_file()
