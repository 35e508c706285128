"""All planted bugs, by the part of the project that they are planted in."""

from __future__ import annotations

from typing import Final

from tools.mutants.bugs_access import ACCESS
from tools.mutants.bugs_access_client import ACCESS_CLIENT
from tools.mutants.bugs_api_variants import API_VARIANTS
from tools.mutants.bugs_applying import APPLIED
from tools.mutants.bugs_arrow import ARROW
from tools.mutants.bugs_books import TRANSACTION_BOOKS
from tools.mutants.bugs_broker import BROKER
from tools.mutants.bugs_cli import COMMAND_LINE
from tools.mutants.bugs_client import CLIENT
from tools.mutants.bugs_client_pipeline import CLIENT_PIPELINE
from tools.mutants.bugs_client_transactions import CLIENT_TRANSACTIONS
from tools.mutants.bugs_commit_groups import COMMIT_GROUPS
from tools.mutants.bugs_dead_letters import DEAD_LETTERS
from tools.mutants.bugs_delay_buckets import DELAY_BUCKETS
from tools.mutants.bugs_delay_count import DELAY_COUNT
from tools.mutants.bugs_delay_firing import DELAY_FIRING
from tools.mutants.bugs_delay_landing import DELAY_LANDING
from tools.mutants.bugs_delay_promises import DELAY_PROMISES
from tools.mutants.bugs_delay_store import DELAY_STORE
from tools.mutants.bugs_delayed_sends import DELAYED_SENDS
from tools.mutants.bugs_effects import EFFECTS
from tools.mutants.bugs_fault_runs import FAULT_RUNS
from tools.mutants.bugs_forces import FORCES
from tools.mutants.bugs_group_clients import GROUP_CLIENTS
from tools.mutants.bugs_group_members import GROUP_MEMBERS
from tools.mutants.bugs_group_places import GROUP_PLACES
from tools.mutants.bugs_groups import GROUP_OWNERS
from tools.mutants.bugs_handler import HANDLING
from tools.mutants.bugs_http import HTTP
from tools.mutants.bugs_journal import JOURNAL
from tools.mutants.bugs_journal_store import JOURNAL_STORE
from tools.mutants.bugs_keeping import KEEPING
from tools.mutants.bugs_letters import LETTERS
from tools.mutants.bugs_offsets import OFFSETS
from tools.mutants.bugs_operating import OPERATING
from tools.mutants.bugs_packages import PACKAGES
from tools.mutants.bugs_page import PAGE
from tools.mutants.bugs_programs import PROGRAMS
from tools.mutants.bugs_refusals import REFUSALS
from tools.mutants.bugs_removed_files import REMOVED_FILES
from tools.mutants.bugs_replication_clients import REPLICATION_CLIENTS
from tools.mutants.bugs_replication_recording import REPLICATION_RECORDING
from tools.mutants.bugs_replication_servers import REPLICATION_SERVERS
from tools.mutants.bugs_replication_snapshots import REPLICATION_SNAPSHOTS
from tools.mutants.bugs_replication_stores import REPLICATION_STORES
from tools.mutants.bugs_replication_terms import REPLICATION_TERMS
from tools.mutants.bugs_run import RUN_CALLS
from tools.mutants.bugs_run_ends import RUN_ENDS
from tools.mutants.bugs_run_saved import RUN_SAVED
from tools.mutants.bugs_schedules import SCHEDULES
from tools.mutants.bugs_server import SERVER
from tools.mutants.bugs_spark_archive import SPARK_ARCHIVE
from tools.mutants.bugs_spark_audit import SPARK_AUDIT
from tools.mutants.bugs_spark_logs import SPARK_LOGS
from tools.mutants.bugs_spark_sink import SPARK_SINK
from tools.mutants.bugs_spark_source import SPARK_SOURCE
from tools.mutants.bugs_spark_trials import SPARK_TRIALS
from tools.mutants.bugs_sql import SQL
from tools.mutants.bugs_storages import STORAGES
from tools.mutants.bugs_strict import STRICT
from tools.mutants.bugs_testing import TESTING
from tools.mutants.bugs_tls import TLS
from tools.mutants.bugs_trace import TRACE
from tools.mutants.bugs_tracing import TRACING
from tools.mutants.bugs_transaction_journal import TRANSACTION_JOURNAL
from tools.mutants.bugs_transaction_queue import TRANSACTION_QUEUE
from tools.mutants.bugs_transaction_store import TRANSACTION_STORE
from tools.mutants.bugs_transactions import TRANSACTIONS
from tools.mutants.bugs_two_phases import TWO_PHASES
from tools.mutants.bugs_verification import VERIFICATION
from tools.mutants.mutant import Mutant

BUGS: Final[tuple[Mutant, ...]] = (
    FORCES
    + JOURNAL
    + BROKER
    + KEEPING
    + GROUP_OWNERS
    + GROUP_MEMBERS
    + EFFECTS
    + TRANSACTION_JOURNAL
    + JOURNAL_STORE
    + TRANSACTION_STORE
    + TRANSACTION_QUEUE
    + HANDLING
    + TRANSACTION_BOOKS
    + APPLIED
    + COMMIT_GROUPS
    + TRANSACTIONS
    + DELAY_LANDING
    + DELAY_BUCKETS
    + DELAY_FIRING
    + DELAY_STORE
    + DELAY_PROMISES
    + DELAY_COUNT
    + SCHEDULES
    + OFFSETS
    + STORAGES
    + SERVER
    + CLIENT
    + GROUP_CLIENTS
    + GROUP_PLACES
    + RUN_CALLS
    + RUN_SAVED
    + RUN_ENDS
    + PROGRAMS
    + COMMAND_LINE
    + REFUSALS
    + REMOVED_FILES
    + ARROW
    + SPARK_SINK
    + SPARK_SOURCE
    + SPARK_LOGS
    + SPARK_AUDIT
    + SPARK_ARCHIVE
    + SPARK_TRIALS
    + DEAD_LETTERS
    + LETTERS
    + STRICT
    + API_VARIANTS
    + CLIENT_TRANSACTIONS
    + CLIENT_PIPELINE
    + OPERATING
    + DELAYED_SENDS
    + SQL
    + TWO_PHASES
    + TESTING
    + TLS
    + REPLICATION_CLIENTS
    + ACCESS
    + ACCESS_CLIENT
    + PACKAGES
    + TRACE
    + HTTP
    + VERIFICATION
    + PAGE
    + TRACING
    + FAULT_RUNS
    + REPLICATION_SERVERS
    + REPLICATION_STORES
    + REPLICATION_SNAPSHOTS
    + REPLICATION_RECORDING
    + REPLICATION_TERMS
)
