"""The connection to a broker: addresses, requests, reconnection."""
