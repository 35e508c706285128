"""README.md: what it has its reader type and write works as it stands there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tfmq

ROOT = Path(__file__).resolve().parent.parent
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
TYPED = next(text for _, text in FENCES if "tfmq-server &" in text)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


def example(word: str) -> str:
    """The one example in Python that has this in it."""
    (found,) = [text for language, text in FENCES if language == "python" and word in text]
    return found


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tfmq.local_server(tmp_path / "data") as address:
        monkeypatch.setenv("TFMQ_SERVERS", address)
        yield address


def read(topic: str) -> list[str]:
    with tfmq.Consumer(topics=topic) as consumer:
        return [message.text or "" for message in consumer.poll(10)]


def test_the_commands_at_the_top_work_as_typed(tmp_path: Path) -> None:
    lines = [line.partition("#")[0].strip() for line in TYPED.splitlines()]
    assert lines[0] == "pip install ." and lines[1] == "tfmq-server &"
    script = [
        "coproc tfmq-server",  # as in the background, on a port that it chooses
        "read -r -u ${COPROC[0]} _ TFMQ_SERVERS && export TFMQ_SERVERS",
        *lines[2:],
        "kill $COPROC_PID; wait $COPROC_PID",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TFMQ_SERVER_LISTEN": "127.0.0.1:0"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "hello\n", done.stderr
    assert (tmp_path / "tfmq-data" / "greetings-0").is_dir()


def test_the_first_program_prints_what_stands_beside_it(tmp_path: Path) -> None:
    program = example('local_server("./data")')
    promised = re.findall(r"print\(.*\) +# (.*)", program)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.splitlines() == promised == ["0 0 synced", "0 42 one kettle"], done.stderr


def test_the_examples_of_transactions_and_delays_work(servers: str, tmp_path: Path) -> None:
    with tfmq.Producer() as producer:
        producer.send("orders", "one kettle", key="42").result()
    loop = example("tx.commit_offsets(consumer)")
    names: dict[str, Any] = {"tfmq": tfmq}
    exec(f"{loop}        break\n", names)
    assert read("bills") == ['{"order":"one kettle"}'] and read("mails") == ['{"to":"42"}']
    with tfmq.Admin() as admin:
        assert admin.group("bills").lag == 0
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
        Base.metadata.create_all(engine)
        with tfmq.Producer(codec=tfmq.codecs.json) as producer:
            names |= {"engine": engine, "Session": Session, "producer": producer, "admin": admin}
            exec(example("tfmq.sql.create_table"), names | {"order": Order(number=7)})
            exec(example("deliver_at"), names)
            assert producer.cancel(names["check"].result().delayed) == "cancelled"
        assert read("orders") == ["one kettle", '{"number":7}', '{"number":8}']
        with Session(engine) as session:
            assert session.scalars(sqlalchemy.select(Order.number)).all() == [7]
        assert len(list(admin.schedules())) == 1


def test_the_worker_handles_what_is_sent(servers: str, tmp_path: Path) -> None:
    with tfmq.Producer(codec=tfmq.codecs.json) as producer:
        producer.send("orders", {"number": 7}).result()
    (tmp_path / "billing.py").write_text(example('@consumer.on("orders")'))
    run = subprocess.Popen(
        [sys.executable, "-u", "billing.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None and run.stdout.readline() == "billed {'number': 7}\n"
        run.terminate()
        assert run.wait(60) == 0
    finally:
        run.kill()
        run.communicate()
