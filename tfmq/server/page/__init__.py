"""The page at `http.listen`: its files, and the JSON API by which it reads and changes the broker."""
