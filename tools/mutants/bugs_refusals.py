"""Planted bugs: what is refused, ended or hidden at once, because continuing would lose messages silently."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

_LISTENERS = "tfmq/client/worker/listeners.py"
_OPTIONS = "tfmq/client/consumer/options.py"
_AWAY = "tfmq/client/worker/runner.py"
_URLS = "tfmq/databases.py"
_HOPELESS = "tfmq/databases.py"

FOLDERS: Final = (
    Mutant(
        "escape-sequences-of-a-message-reach-a-terminal",
        "no message that tfmq read prints controls the terminal",
        "tfmq/cli/read.py",
        r'    return CONTROLS.sub(lambda found: b"\\x%02x" % found[0][-1], text)' + "\n",
        "    return text\n",
        ["tests/cli/test_read.py::test_no_message_steers_a_terminal"],
    ),
    Mutant(
        "a-folder-named-like-a-partition-is-a-brokers",
        "a folder with other content is refused, and nothing is written into it",
        "tfmq/data_dir.py",
        "                if is_partition_folder(children(name)):\n",
        "                if children(name) is not None:\n",
        ["tests/test_data_dir.py"],
    ),
    Mutant(
        "what-may-not-be-looked-at-is-missing",
        "a path without access rights is refused by name, and is not taken for missing",
        "journal/disk.py",
        "        except (FileNotFoundError, NotADirectoryError):\n            return False\n        return True\n",
        "        except OSError:\n            return False\n        return True\n",
        ["tests/journal/test_disk.py"],
    ),
    Mutant(
        "a-catalog-that-may-not-be-read-is-missing",
        "a check does not report an unreadable file as missing",
        "tfmq/broker/data_repair.py",
        "    if type(error) in PATH_ERRORS:\n",
        "    if isinstance(error, OSError):\n",
        ["tests/broker/test_data_repair.py"],
    ),
)

HANDLERS: Final = (
    Mutant(
        "a-generator-is-taken-for-a-listener",
        "a listener whose body would never run is refused",
        _LISTENERS,
        "    if _matches_any(listener, inspect.isgeneratorfunction, inspect.isasyncgenfunction):\n",
        "    if _matches_any(listener, inspect.isasyncgenfunction):\n",
        ["tests/client/worker/test_listeners.py"],
    ),
    Mutant(
        "body-that-never-ran-counts-as-done",
        "a handler whose body did not run has failed",
        _LISTENERS,
        '        found.close()  # Closed so that Python does not log a "never awaited" warning.\n',
        "        return found.close()\n",
        ["tests/client/worker/test_listeners.py"],
    ),
    Mutant(
        "what-a-thread-was-given-back-is-not-looked-at",
        "a handler whose body did not run has failed, in threads too",
        "tfmq/client/worker/thread_runner.py",
        "                check_result(found)\n",
        "",
        ["tests/client/worker/test_runner.py::test_a_handler_whose_body_did_not_run_has_failed"],
    ),
    Mutant(
        "messages-taken-from-the-handlers-of-a-run",
        "during a run no other caller is handed messages",
        "tfmq/client/consumer/ack_tracker.py",
        ("        if self.is_run_active:\n            raise NotAllowed(\n"),
        ("        if self.is_run_active and False:\n            raise NotAllowed(\n"),
        ["tests/client/worker/test_runner.py::test_within_a_run_no_other_caller_is_handed_messages"],
    ),
    Mutant(
        "what-is-to-be-awaited-is-a-yes",
        "a filter that returns neither True nor False passes nothing",
        "tfmq/client/consumer/fetcher.py",
        "                _raise_if_awaitable(accepted)\n",
        "                pass\n",
        ["tests/client/consumer/test_fetcher.py"],
    ),
    Mutant(
        "on-assigned-not-awaited",
        "on_assigned and on_revoked are run, or refused",
        "tfmq/client/consumer/rebalance.py",
        "        self.start_await: StartAwait = start_task if options.awaits else refuse_await\n",
        "        self.start_await: StartAwait = start_task\n",
        ["tests/client/consumer/test_rebalance.py"],
    ),
)

CONSUMERS: Final = (
    Mutant(
        "dead-letters-come-back-as-messages",
        "a consumer does not store its dead letters in a topic that it reads",
        _OPTIONS,
        "    if subscription.reads(topic):\n",
        "    if topic in subscription.topics:\n",
        ["tests/client/consumer/test_options.py"],
    ),
    Mutant(
        "a-single-bar-is-part-of-a-tag",
        "an expression over tags that would match nothing is refused",
        _OPTIONS,
        '    if isinstance(tags, str) and any("|" in part for part in tags.split(TAG_SEPARATOR)):\n',
        '    if isinstance(tags, str) and any("||" in part for part in tags.split(TAG_SEPARATOR)):\n',
        ["tests/client/consumer/test_options.py"],
    ),
    Mutant(
        "a-run-ends-well-with-places-unsaved",
        "an end of a run without the broker reports what is not committed",
        _AWAY,
        "        if unsaved:\n",
        "        if unsaved and self._link.state == 'ready':\n",
        ["tests/client/worker/test_run_end.py"],
    ),
    Mutant(
        "a-broker-that-came-back-is-still-away",
        "a broker that returns in time is used by the end of a run",
        _AWAY,
        ("        if self._link.state == READY:\n            self._since = None\n            return False\n"),
        "",
        ["tests/client/worker/test_run_end.py"],
    ),
    Mutant(
        "stop-of-a-coroutine-that-awaits-nothing-comes-too-late",
        "after stop() in a handler no other begins",
        "tfmq/client/worker/runner.py",
        "        return core.stop_requested.done or core.positions.stopped or core.closed\n",
        "        return core.stop_requested.done or core.closed\n",
        [
            "tests/client/worker/test_asyncio_runner.py::test_after_stop_in_a_handler_that_awaits_nothing_no_other_begins"
        ],
    ),
    Mutant(
        "a-lease-stands-still-while-the-machine-sleeps",
        "after a suspend of the machine a lease is not assumed to be valid",
        "tfmq/zookeeper/group_coordinator.py",
        "    return time.monotonic() if clock is None else time.clock_gettime(clock)\n",
        "    return time.monotonic()\n",
        ["tests/zookeeper/test_group_membership.py::test_a_machine_that_slept_is_sure_of_nothing"],
    ),
)

PLACES: Final = (
    Mutant(
        "a-store-without-hope-is-waited-for",
        "where no dead letter can be stored, no caller waits",
        "tfmq/dead_letters/sql_store.py",
        "        if is_permanent_error(error, self.path):\n",
        "        if is_permanent_error(error):\n",
        ["tests/dead_letters/test_sql_store.py::test_where_no_dead_letter_can_ever_be_kept_no_caller_waits"],
    ),
    Mutant(
        "a-run-goes-on-with-a-store-without-hope",
        "a store that can store nothing ends the run before any call",
        "tfmq/dead_letters/retry_loop.py",
        "            except StoreUnusable:\n                raise\n",
        "",
        ["tests/test_consumer_base.py::test_a_store_that_can_keep_nothing_ends_the_run_before_any_call"],
    ),
    Mutant(
        "too-many-open-files-are-for-good",
        "a temporary failure is waited for",
        _HOPELESS,
        '        return path is not None and not str(path).startswith("file:") and not _is_accessible(Path(path))\n',
        '        return path is not None and not str(path).startswith("file:")\n',
        ["tests/test_databases.py"],
    ),
    Mutant(
        "a-strangers-folder-is-taken-for-data",
        "a folder with other content is not a data folder",
        "tfmq/data_dir.py",
        "    others = [name for name in names if name not in IGNORED_NAMES]\n",
        '    others = [name for name in names if name not in IGNORED_NAMES and "." not in name]\n',
        ["tests/test_data_dir.py"],
    ),
    Mutant(
        "a-password-among-the-options-is-shown",
        "no password is shown, wherever it is in the URL",
        _URLS,
        r'    return _OPTION.sub(r"\1***", masked)' + "\n",
        "    return masked\n",
        ["tests/test_databases.py"],
    ),
    Mutant(
        "a-password-with-an-at-is-shown-in-part",
        "no password is shown, nor its end",
        _URLS,
        '''r"//([^:/@]*):.*@"''',
        '''r"//([^:/@]*):[^@]*@"''',
        ["tests/test_databases.py"],
    ),
)

DERIVED: Final = (
    Mutant(
        "a-missing-mark-is-left-missing-by-repair",
        "a repair writes a missing mark anew from the segments",
        "journal/fsck/log_repair.py",
        ("        if self.checkpoint is None and (self.bases or has_traces) and not self.checkpoint_fault:\n"),
        "        if self.checkpoint is None and (self.bases or has_traces) and self.checkpoint_fault:\n",
        [
            "tests/journal/fsck/test_log_repair.py::test_what_is_made_from_the_segments_is_written_anew_where_it_is_wrong"
        ],
    ),
    Mutant(
        "a-folder-remade-by-a-start-is-a-mere-stop",
        "a partition whose folder was missing is damaged until an operator has dropped its messages",
        "tfmq/broker/data_repair.py",
        "        if each.what.startswith(tuple(STOPPED + loss for loss in LOSSES))\n",
        "        if each.what.startswith(LOSSES)\n",
        [
            "tests/broker/test_data_repair.py"
            "::test_a_folder_that_is_gone_as_a_whole_is_damage_and_has_the_advice_of_the_start"
        ],
    ),
    Mutant(
        "repaired-arrivals-are-reported-as-damaged",
        "damage of the arrival log that a start repairs is reported once",
        "tfmq/broker/startup.py",
        "        log_recovery(partition.log, damage=False)  # the result of the repair is logged below\n",
        "        log_recovery(partition.log)  # the result of the repair is logged below\n",
        ["tests/broker/test_startup.py::test_arrivals_that_lost_their_end_are_reported_once_as_repaired"],
    ),
)

REFUSALS: Final = FOLDERS + HANDLERS + CONSUMERS + PLACES + DERIVED
