"""Delayed delivery: messages that become messages of their partition when they are due."""
