"""ZooKeeper as registry of brokers and topics, as group coordinator, and as offset storage.

Using ZooKeeper is optional; it needs the package kazoo.
"""
