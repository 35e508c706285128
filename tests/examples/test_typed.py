"""The typed examples do what they say. That type checkers agree is said by `make check` (tools/check_types.py)."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tfmq
from tests import paths
from tfmq.testing.broker import SimulatedBroker
from tools.check_types import CHECKERS, Programs, said

WRONG = """
import tfmq

class Order:
    number: int

consumer = tfmq.Consumer(topics="orders", codec=tfmq.codecs.pydantic(Order))
for message in consumer:
    message.value.nmuber
"""
ROOT = paths.ROOT
PRINTED = {
    "orders": (
        "[\"kettle for '1'\"] [Payment(order=1, cents=2000)]"
        " [Order(number=1, item='kettle'), Order(number=2, item='cup'),"
        " Payment(order=1, cents=2000), Payment(order=2, cents=500)]"
        " [{'number': 1, 'item': 'kettle'}, {'number': 2, 'item': 'cup'}]"
    ),
    "asyncio_orders": "['kettle', 'teapot', 'toaster']",
    "hooks": "{'hooked': 1} {} ['the example'] True",
    "selectors": "[0, 1, 2]",
    "storages": "[['a', 'b'], ['c']] 1",
}


@pytest.mark.parametrize("name", PRINTED)
def test_it_prints(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with SimulatedBroker() as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        import_module(f"examples.typed.{name}").main()
    assert capsys.readouterr().out.strip() == PRINTED[name]


@pytest.mark.long
def test_the_one_with_twisted_runs_in_a_reactor(tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers:
        done = subprocess.run(
            [sys.executable, "-m", "examples.typed.twisted_orders"],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "TFMQ_SERVERS": servers},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert (done.returncode, done.stdout) == (0, "['kettle']\n"), done.stderr


@pytest.mark.long
def test_a_wrong_program_is_refused_by_both_checkers(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    programs = Programs("wrong", tmp_path, ("wrong.py",))
    complaints = [said(checker, options, programs) for checker, *options in CHECKERS]
    assert [words.split()[0] for words in complaints] == ["mypy", "pyright"]
    assert all("nmuber" in words for words in complaints)
