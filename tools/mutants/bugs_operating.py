"""Planted bugs: operation of a running server: settings, topics, groups, names of clients."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ADMIN_LOG: Final = "tests/broker/test_admin_log.py"
RETENTION: Final = "tests/broker/test_retention.py"

DELAYED: Final = "tests/broker/test_delayed_transactions.py"

ASKED: Final = "tests/client/admin/test_admin.py"

OPERATING: Final = (
    Mutant(
        "purge-before-the-future",
        "a purge before a time in the future removes nothing",
        "tfmq/client/admin/admin.py",
        "locate_fields(before)[1] > (yield from self.ping())",
        "locate_fields(before)[1] > 2 * (yield from self.ping())",
        [ASKED],
    ),
    Mutant(
        "a-repeated-deletion-deleted-nothing",
        "a deletion whose first reply was lost returns True",
        "tfmq/client/admin/admin.py",
        "        return bool(pending.result().deleted) or pending.send_count > 1\n",
        "        return bool(pending.result().deleted)\n",
        [ASKED],
    ),
    Mutant(
        "creates-on-whatever-connection",
        "a topic can be created on an idle connection that the broker has closed",
        "tfmq/client/admin/admin.py",
        "        yield from self._request(commands.Ping())\n        most",
        "        if not self._link.connection_count:\n"
        "            yield from self._request(commands.Ping())\n        most",
        [ASKED],
    ),
    Mutant(
        "schedule-of-a-partition-that-will-not-be",
        "a schedule that is refused creates no topic",
        "tfmq/broker/schedule_commands.py",
        "        self._check_new_topic(row)\n",
        "",
        ["tests/broker/test_schedule_commands.py"],
    ),
    Mutant(
        "handles-reported-before-the-fsync",
        "after a power cut the handle of a delayed message in a transaction never names another one",
        "tfmq/transaction/applier.py",
        "        self.apply_target.fsync_to(result, durable)\n",
        "        durable(None)\n",
        [DELAYED],
    ),
    Mutant(
        "handles-without-a-bound",
        "the number of handles in the reply to a commit is limited",
        "tfmq/transaction/apply_progress.py",
        " and self.due_words + len(each.dues) <= DUE_WORDS_MAX:",
        ":",
        [DELAYED],
    ),
    Mutant(
        "handles-of-the-first-batch",
        "each delayed batch of a transaction has its own handles",
        "tfmq/transaction/applier.py",
        "result.delayed[first:end]))",
        "result.delayed[: len(pieces)]))",
        [DELAYED],
    ),
    Mutant(
        "handles-that-no-delivery-gets",
        "a delivery of a committed transaction has the handle of its delayed message",
        "tfmq/client/transaction/transaction.py",
        "                batch.set_handles(self.requests.delayed_replies.get(index))\n",
        "",
        ["tests/test_transaction_handles.py"],
    ),
    Mutant(
        "reload-that-keeps-the-limits",
        "limits that are read again on SIGHUP apply at once",
        "tfmq/broker/broker.py",
        "        self.limits.update(config.limits)\n",
        "",
        [RETENTION],
    ),
    Mutant(
        "reload-of-what-needs-a-restart",
        "a setting that cannot change while the server runs keeps its value, and is reported",
        "tfmq/config.py",
        "        if key in RELOADED:\n            values",
        "        if True:\n            values",
        ["tests/test_config.py"],
    ),
    Mutant(
        "misspelt-variable-is-ignored",
        "an environment variable that is no setting is refused by name",
        "tfmq/config.py",
        "        elif not _is_of_others(name, value):\n",
        "        elif not name:\n",
        ["tests/test_config.py"],
    ),
    Mutant(
        "act-without-a-name",
        "the log names the client of an administrative request",
        "tfmq/broker/request_handler.py",
        (
            '        audit.info("%s, asked by %s: %s", self._command.describe_request(self._request), self._ses'
            "sion.identity, result)\n"
        ),
        (
            '        audit.info("%s, asked by %s: %s", self._command.describe_request(self._request), "a client'
            '", result)\n'
        ),
        [ADMIN_LOG],
    ),
    Mutant(
        "program-requests-logged-like-operators",
        "frequent requests of programs are not logged",
        "tfmq/broker/request_handler.py",
        " and (session.operator or not logged.operator_only):",
        ":",
        [ADMIN_LOG],
    ),
    Mutant(
        "settings-without-effect",
        "changed settings apply without a restart",
        "tfmq/broker/topic_admin.py",
        "            self.apply_settings(topic, has_archives=True)\n",
        "",
        ["tests/broker/test_topic_admin.py"],
    ),
    Mutant(
        "configuration-not-for-a-new-log",
        "a configuration that is read again applies to a log that was being opened meanwhile",
        "tfmq/broker/topic_admin.py",
        "                self.apply_settings(there)  # the configuration may have been reloaded",
        "                pass  # the configuration may have been reloaded",
        ["tests/broker/test_topic_admin.py"],
    ),
    Mutant(
        "peer-writes-lines-of-the-log",
        "data from a peer cannot forge a line of the log",
        "tfmq/broker/request_handler.py",
        'character if character.isprintable() else "?" for character',
        "character for character",
        [ADMIN_LOG],
    ),
    Mutant(
        "live-group-deleted",
        "a group with a live member is not deleted",
        "tfmq/broker/groups/offset_commands.py",
        "        self._check_no_live_member(request.group)\n        if request.group not in",
        "        if request.group not in",
        ["tests/broker/groups/test_offset_commands.py"],
    ),
    Mutant(
        "deleted-group-keeps-its-count",
        "the offsets of a deleted group do not count",
        "tfmq/broker/catalog_state.py",
        "            self._count(row, -1)\n",
        "            self.owners_count -= row.owners_count\n",
        ["tests/broker/test_catalog_state.py"],
    ),
    Mutant(
        "folder-gone-is-no-damage",
        "a missing part of a data folder is damage",
        "tfmq/broker/data_repair.py",
        "    return [each for each in found if _is_missing_or_empty(disk, each[0])]\n",
        "    return [each for each in found if disk.exists(each[0]) and _is_missing_or_empty(disk, each[0])]\n",
        ["tests/broker/test_data_repair.py"],
    ),
    Mutant(
        "empty-folder-is-a-new-partition",
        "a partition whose folder is empty at a start accepts no writes before an operator has resumed it",
        "tfmq/broker/partition_dirs.py",
        "            missing = not is_there or (",
        "            missing = not is_there or self.is_stopping and (",
        ["tests/broker/test_data_repair.py"],
    ),
    Mutant(
        "purge-without-groups",
        "groups continue after what a purge removed",
        "tfmq/client/admin/admin.py",
        (
            "            yield from self._request(commands.ResetGroup(group, offsets))\n"
            "        except (NotAllowed, Busy):\n"
        ),
        ("            pass\n        except (NotAllowed, Busy):\n"),
        ["tests/cli/test_topic.py"],
    ),
    Mutant(
        "refused-connections-without-a-bound",
        "the number of connections that are being refused is limited",
        "tfmq/server/server.py",
        "            if self._rejecting >= REJECTED_MAX:\n",
        "            if self._rejecting < 0:\n",
        ["tests/server/test_server.py"],
    ),
    Mutant(
        "refused-connections-counted-without-end",
        "the slot of a refused connection becomes free again",
        "tfmq/server/server.py",
        "        self._rejecting -= 1\n",
        "        pass\n",
        ["tests/server/test_server.py"],
    ),
    Mutant(
        "doubtful-batch-sent-to-the-new-topic",
        "a batch that may be stored in a deleted topic is not sent again to the new one",
        "tfmq/client/send/partition_sender.py",
        ("        if batch.attempts <= 1 and not batch.rerouted_from_partitions:\n            moving.append(batch)\n"),
        ("        if not batch.rerouted_from_partitions:\n            moving.append(batch)\n"),
        ["tests/client/send/test_partition_sender.py"],
    ),
    Mutant(
        "keys-sent-to-other-partitions",
        "a topic that is created again with other partitions gets no batch of the deleted one",
        "tfmq/client/send/accumulator.py",
        "            if batch.rerouted_from_partitions not in (0, len(topic.partitions)):\n",
        "            if batch.rerouted_from_partitions < 0:\n",
        ["tests/client/send/test_partition_sender.py"],
    ),
    Mutant(
        "hang-up-ends-the-server",
        "SIGHUP never ends the server",
        "tfmq/server/main.py",
        "    except ConfigError as error:\n        logger.error(",
        "    except ConfigError as error:\n        os._exit(1)\n        logger.error(",
        ["tests/server/test_main.py"],
    ),
)
