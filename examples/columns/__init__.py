"""Messages as data frames of pandas, polars and DuckDB."""
