"""What keeps the replicated objects: an object store, a database, or a folder of a shared file system."""
