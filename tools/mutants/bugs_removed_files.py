"""Planted bugs: stores whose file is removed or replaced while it is in use."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

DATABASE: Final = "tests/dead_letters/test_sql_store.py"
STORE: Final = "tests/client/producer/test_outbox.py"

_DATABASE = "tfmq/dead_letters/sql_store.py"
_STORE = "tfmq/client/producer/outbox.py"

REMOVED_FILES: Final = (
    Mutant(
        "dead-letters-go-on-into-a-file-that-was-removed",
        "no dead letter is stored in a file that was removed",
        _DATABASE,
        "            if self._engine is not None and (not own or self._is_file_replaced(self._engine)):\n",
        "            if self._engine is not None and not own:\n",
        [f"{DATABASE}::test_what_is_written_after_a_removal_of_the_file_is_in_the_file_that_is_there"],
    ),
    Mutant(
        "dead-letters-removed-with-their-file-count-as-kept",
        "a file that is removed during a write has stored nothing",
        _DATABASE,
        ("        if self._is_file_replaced(engine):\n            raise StoreFailed(\n"),
        ("        if engine is None:\n            raise StoreFailed(\n"),
        [f"{DATABASE}::test_a_file_that_is_removed_while_it_is_written_has_kept_nothing"],
    ),
    Mutant(
        "dead-letters-may-be-read-by-everybody",
        "only its owner can read the file of dead letters",
        _DATABASE,
        "            create_file(self._own_path)\n",
        "            pass\n",
        [f"{DATABASE}::test_the_file_is_its_owners_alone_also_in_a_folder_that_is_everybodys"],
    ),
    Mutant(
        "an-error-shows-the-row",
        "an error of the store shows no value of a row",
        _DATABASE,
        "            hide_parameters=True,\n            execution_options",
        "            execution_options",
        [f"{DATABASE}::test_an_error_never_shows_values_of_a_row"],
    ),
    Mutant(
        "kept-on-into-a-file-that-was-removed",
        "nothing is stored for a partition in a file that was removed",
        _STORE,
        "                if self._database is not None:\n                    self._discard_if_replaced()\n",
        "",
        [f"{STORE}::test_what_is_kept_after_a_removal_of_the_file_is_in_the_file_that_is_there"],
    ),
    Mutant(
        "kept-although-its-file-was-removed-meanwhile",
        "a file that is removed during a write has stored nothing",
        _STORE,
        "                if self._discard_if_replaced():\n                    raise self._lost_error()\n",
        "                self._discard_if_replaced()\n",
        [f"{STORE}::test_a_file_that_is_removed_while_it_is_written_has_kept_nothing"],
    ),
    Mutant(
        "rows-of-a-file-that-is-gone-are-those-of-the-next",
        "no row is taken for one of another file",
        _STORE,
        ("        if id >> FILE_NUMBER_SHIFT != self._file_number:\n            raise self._lost_error()\n"),
        "",
        [f"{STORE}::test_rows_of_a_file_that_is_gone_are_not_taken_for_those_of_the_next_one"],
    ),
    Mutant(
        "a-lock-is-written-through-a-link",
        "no lock is written through a symbolic link",
        "journal/disk.py",
        "        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)",
        "        descriptor = _open(path, os.O_RDWR | os.O_CREAT)",
        ["tests/offsets/test_file.py::test_a_link_in_the_lock_s_place_is_not_written_through"],
    ),
)
