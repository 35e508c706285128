"""What a page of the tutorial tells its reader to write and to type, done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0


class Page:
    """One page of docs/tutorial, followed in `folder` with the broker at `servers`."""

    def __init__(self, name: str, folder: Path, servers: str = "127.0.0.1:1") -> None:
        self.text = (ROOT / "docs" / "tutorial" / name).read_text()
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TFMQ_SERVERS": servers,
        }
        for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", self.text, re.DOTALL):
            (folder / name).write_text(text)
        command = folder / "bin" / "tfmq"
        command.parent.mkdir()
        command.write_text(f"#!{sys.executable}\nfrom tfmq.cli.main import main\nmain()\n")
        command.chmod(0o755)

    def consoles(self) -> list[tuple[list[str], list[str]]]:
        """Each block that shows a console: the commands, and what is printed between them."""
        blocks = re.findall(r"```console\n(.*?)```", self.text, re.DOTALL)
        return [
            (
                [line[2:] for line in block.splitlines() if line.startswith("$ ")],
                [line for line in block.splitlines() if not line.startswith("$ ")],
            )
            for block in blocks
        ]

    def run(self, command: str) -> str:
        """What the command prints; it must do well."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, command: str) -> subprocess.Popen[str]:
        """The command, in the background."""
        return subprocess.Popen(
            f"exec {command}",
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pytest(self, *arguments: str) -> str:
        """What pytest prints for the page's tests, with our plug-in."""
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "tfmq.testing.plugin",
                    "-p",
                    "no:cacheprovider",
                ),
                *("-c", os.devnull, f"--rootdir={self.folder}", *arguments, str(self.folder)),
            ],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return done.stdout + done.stderr
