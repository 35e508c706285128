"""The PostgreSQL server of the database tests, for the examples too."""

from tests.sql.conftest import postgres as postgres
