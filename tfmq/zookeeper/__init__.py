"""ZooKeeper, where a site has one: the registry of brokers and topics, groups without the broker, offsets."""
