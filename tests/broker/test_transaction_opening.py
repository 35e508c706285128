"""The journal that belongs to the data folder, and no other; a start that fails leaves everything as it was."""

import pytest

from journal.errors import Corrupt
from journal.testing import Moment, SimulatedDisk
from tests.broker.helpers import DATA, Answer, Broker
from tests.scale import seeded
from tfmq.broker.startup import NEW_JOURNAL_MARKER, TRANSACTION_FOLDER

FOLDER = f"{DATA}/{TRANSACTION_FOLDER}"
WORD = f"{DATA}/meta/{NEW_JOURNAL_MARKER}"


def with_one_prepared() -> tuple[Broker, Answer]:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"committed"])])
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"prepared"])
    broker.prepare(began)
    broker.stop()
    return broker, began


def files(disk: SimulatedDisk, folder: str) -> dict[str, bytes]:
    return {name: disk.read_file(f"{folder}/{name}") for name in disk.list(folder)}


def put(disk: SimulatedDisk, kept: dict[str, bytes]) -> None:
    """The folder of the journal with these files and no others."""
    for name in disk.list(FOLDER) if disk.exists(FOLDER) else ():
        disk.unlink(f"{FOLDER}/{name}")
    for name, data in kept.items():
        disk.write_file(f"{FOLDER}/{name}", data)


def test_the_first_start_makes_a_journal_and_the_catalog_knows_it() -> None:
    broker = Broker()
    store = broker.engine.broker.transaction_commands.store
    assert broker.engine.broker.catalog.state.journal_id == store.journal_id
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.engine.broker.transaction_commands.store.journal_id == store.journal_id
    assert left.lease() > store.journal_id


def test_a_data_folder_of_the_release_before_gets_its_journal() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, [b"old"])
    register = broker.engine.broker.catalog.state
    register.journal_id = 0
    broker.stop()
    put(broker.disk, {})
    broker.disk.remove_folder(FOLDER)
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == [b"old"]
    assert again.engine.broker.catalog.state.journal_id > 0
    assert again.transact(again.stream(), [("orders", 0, [b"new"])]).state == "committed"


def test_a_missing_journal_ends_the_start_with_a_sentence_and_changes_nothing() -> None:
    broker, began = with_one_prepared()
    kept = files(broker.disk, FOLDER)
    for folder_left in (True, False):
        put(broker.disk, {})
        if not folder_left:
            broker.disk.remove_folder(FOLDER)
        with pytest.raises(Corrupt, match=r"missing.*new-journal") as raised:
            Broker(broker.disk, broker.clock)
        assert raised.value.path == FOLDER
    broker.disk.make_folder(FOLDER)
    put(broker.disk, kept)
    again = Broker(broker.disk, broker.clock)
    assert again.decide(began).state == "committed"
    assert again.payloads() == [b"committed", b"prepared"]


def test_the_operator_s_word_begins_a_new_journal_once() -> None:
    broker, began = with_one_prepared()
    put(broker.disk, {})
    broker.disk.write_file(WORD, b"")
    again = Broker(broker.disk, broker.clock)
    assert not again.disk.exists(WORD)
    assert again.decide(began).code == "unknown_transaction"
    assert again.payloads() == [b"committed"]
    assert again.transact(again.stream(), [("orders", 0, [b"new"])]).state == "committed"
    left = again.crashed(again.disk.crash(keep="nothing"))
    assert left.payloads() == [b"committed", b"new"]


def test_another_broker_s_journal_is_refused() -> None:
    broker, _ = with_one_prepared()
    first = Broker()
    first.stop()
    put(first.disk, {})
    first.disk.write_file(WORD, b"")
    second = Broker(first.disk, first.clock)
    known = broker.engine.broker.catalog.state.journal_id
    assert second.engine.broker.transaction_commands.store.journal_id != known
    second.stop()
    put(broker.disk, files(second.disk, FOLDER))
    for given_up in (False, True):
        if given_up:
            broker.disk.write_file(WORD, b"")
        with pytest.raises(Corrupt, match="belongs to this data"):
            Broker(broker.disk, broker.clock)
        assert {file.path for file in broker.disk.open_files} <= {DATA}, "it holds no file of the journal"


def test_the_word_beside_a_whole_journal_is_taken_back_and_changes_nothing() -> None:
    broker, began = with_one_prepared()
    broker.disk.write_file(WORD, b"")
    again = Broker(broker.disk, broker.clock)
    assert not again.disk.exists(WORD) and again.decide(began).state == "committed"


def test_a_journal_from_an_older_backup_is_refused() -> None:
    """It would number new decisions like those that the partitions have applied, and they would be skipped."""
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"first"])])
    broker.stop()
    old = files(broker.disk, FOLDER)
    later = Broker(broker.disk, broker.clock)
    for n in range(10):
        later.transact(later.stream(), [("orders", 0, [b"%d" % n])])
    later.stop()
    put(broker.disk, old)
    with pytest.raises(Corrupt, match="older than orders-0"):
        Broker(broker.disk, broker.clock)


def test_no_id_is_given_out_that_the_journal_knows() -> None:
    """A catalog from an older backup than the journal would lease the ids of its streams again."""
    broker = Broker()
    broker.create()
    broker.stop()
    old = files(broker.disk, f"{DATA}/meta")
    later = Broker(broker.disk, broker.clock)
    later.lease(4000)
    stream = later.stream()
    began = later.begin(stream, "order-42")
    later.send(stream, began)
    later.prepare(began)
    later.stop()
    for name in later.disk.list(f"{DATA}/meta"):
        later.disk.unlink(f"{DATA}/meta/{name}")
    for name, data in old.items():
        later.disk.write_file(f"{DATA}/meta/{name}", data)
    again = Broker(later.disk, later.clock)
    assert again.lease() > stream.id
    assert [row["xid"] for row in again.listed()] == ["order-42"]


@pytest.mark.parametrize("kind", ["write", "force", "create", "force_folder", "open"])
def test_a_start_that_fails_lets_everything_go_and_the_next_one_succeeds(kind: str) -> None:
    for nth in range(1, 6):
        broker, began = with_one_prepared()
        broker.disk.faults.fail(kind, nth=nth, path="/transactions/")
        try:
            again = Broker(broker.disk, broker.clock)
        except (OSError, Exception) as error:
            assert not isinstance(error, AssertionError)
            broker.disk.faults.clear()
            again = Broker(broker.disk, broker.clock)
        broker.disk.faults.clear()
        if again.engine.status_fields()["transactions"]["journal"] != "open":
            again.engine.broker.lock.release()
            again = again.crashed(again.disk.crash(keep="everything"))
        assert [row["xid"] for row in again.listed()] == ["order-42"], f"{kind} failed at call {nth}"
        assert again.decide(began).state == "committed"
        assert again.payloads() == [b"committed", b"prepared"]


@pytest.mark.long
@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_of_the_first_start_leaves_a_data_folder_that_starts(keep: str) -> None:
    generator = seeded("first start", keep)
    first = Broker(start=False)
    moments = []
    first.disk.after = lambda kind, path: moments.append((kind, path, Moment(first.disk)))
    first.engine.start()
    first.disk.after = None
    for kind, path, moment in moments:
        left = Broker(moment.crash(generator, keep=keep), first.clock)
        assert left.create().code == "ok", f"after {kind} of {path}"
        assert left.transact(left.stream(), [("orders", 0, [b"x"])]).state == "committed"
        again = left.crashed(left.disk.crash(keep="nothing"))
        assert again.payloads() == [b"x"], f"after {kind} of {path}"


@pytest.mark.long
@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_while_a_new_journal_is_begun_leaves_one_that_is_begun(keep: str) -> None:
    generator = seeded("new journal", keep)
    broker, _ = with_one_prepared()
    put(broker.disk, {})
    broker.disk.force_folder(FOLDER)
    broker.disk.write_file(WORD, b"")
    broker.disk.force_folder(f"{DATA}/meta")
    moments = []
    broker.disk.after = lambda kind, path: moments.append((kind, path, Moment(broker.disk)))
    begun = Broker(broker.disk, broker.clock)
    broker.disk.after = None
    assert begun.payloads() == [b"committed"]
    for kind, path, moment in moments:
        left = Broker(moment.crash(generator, keep=keep), broker.clock)
        assert left.transact(left.stream(), [("orders", 0, [b"x"])]).state == "committed"
        assert left.payloads() == [b"committed", b"x"], f"after {kind} of {path}"
        assert left.restart().payloads() == [b"committed", b"x"], f"after {kind} of {path}"


def test_what_the_opening_of_the_journal_found_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    broker, _ = with_one_prepared()
    newest = max(name for name in broker.disk.list(FOLDER) if name.endswith(".snapshot"))
    broker.disk.damage(f"{FOLDER}/{newest}", 5, b"\xff")
    Broker(broker.disk, broker.clock)
    assert [record for record in caplog.records if newest in record.message]
