"""The brokers that tfmq is measured beside."""
